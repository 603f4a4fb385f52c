"""The Redis client of the scheduler."""

from redis.asyncio import Redis

from contracts.environment import SettingsError


def redis_client(url: str) -> Redis:
    """Return a client whose calls can be cancelled.

    With a socket timeout redis-py 8.1 sends through `asyncio.wait_for`, which on Python 3.11 loses a
    cancellation that arrives as the send ends; a lost lease could then not end a term. So there is none, and
    calls outside a term carry their own `asyncio.timeout`.

    Raises:
        SettingsError: not a Redis URL.
    """
    try:
        return Redis.from_url(url, socket_timeout=None)
    except ValueError as error:
        raise SettingsError(f"SCHEDULER_REDIS_URL: {error}") from None
