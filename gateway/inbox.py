"""Our entries in the pools' inboxes: submits awaited by the request, the rest by an owned loop."""

import asyncio
from typing import Final

import structlog
from redis.exceptions import RedisError

from contracts import keys
from contracts.resp import RespConnection
from contracts.wire import FIELD, InboxEntry, Submit, encode

log = structlog.get_logger()

_MAX_WAITING: Final = 10_000
_RETRY_S: Final = 0.2


class Inbox:
    """Writes inbox entries. `run` until cancelled."""

    def __init__(self, connection: RespConnection) -> None:
        self._connection = connection
        self._waiting: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(_MAX_WAITING)
        self.num_dropped = 0

    async def submit(self, submit: Submit) -> str:
        """Write a request and return the entry's id. Raises RedisError."""
        entry_id: bytes = await self._connection.call("XADD", keys.inbox(submit.pool), "*", FIELD, encode(submit))
        return entry_id.decode()

    def tell(self, pool: str, entry: InboxEntry) -> None:
        """Write an abort or a continuation soon; dropped and counted when too many wait."""
        try:
            self._waiting.put_nowait((keys.inbox(pool), encode(entry)))
        except asyncio.QueueFull:
            self.num_dropped += 1
            log.warning("inbox_entry_dropped", pool=pool, rid=entry.rid)

    async def run(self) -> None:
        """Write what `tell` took, in order, however long Redis is away."""
        while True:
            stream, raw = await self._waiting.get()
            while True:
                try:
                    await self._connection.call("XADD", stream, "*", FIELD, raw)
                    break
                except (RedisError, OSError):
                    await asyncio.sleep(_RETRY_S)
