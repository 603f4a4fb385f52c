"""The Redis client of the scheduler."""

from redis.asyncio import Redis


def redis_client(url: str) -> Redis:
    """Return a client whose calls can be cancelled.

    With a socket timeout redis-py 8.1 sends through `asyncio.wait_for`, which on Python 3.11 loses a
    cancellation that arrives as the send ends; a lost lease could then not end a term. So there is none, and
    calls outside a term carry their own `asyncio.timeout`.
    """
    return Redis.from_url(url, socket_timeout=None)
