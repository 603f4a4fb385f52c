"""One call per key at a time: who comes meanwhile shares its result.

Without it a burst of requests of one tenant finds the same cache entry expired and asks Postgres once each.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Calls in progress, by key."""

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Future[V]] = {}

    async def run(self, key: K, call: Callable[[], Awaitable[V]]) -> V:
        """Return the result of `call`, or of the call for this key that is in progress. Raises what it raises."""
        while (running := self._running.get(key)) is not None:
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not running.cancelled() or (task is not None and task.cancelling()):
                    raise
                # Only the caller that made the call was cancelled: somebody else makes it.
        result = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            value = await call()
        except Exception as error:
            result.set_exception(error)
            result.exception()  # nobody may be waiting for it
            raise
        else:
            result.set_result(value)
            return value
        finally:
            del self._running[key]
            result.cancel()  # changes nothing unless this caller was cancelled
