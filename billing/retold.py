"""Restores by itself what Redis lost: from what workers say again once they see another life of it.

1. Workers write their journals' last minute to a stream of their pool (`workers.retelling`). It is left alone until
   nothing was added for `QUIET_MS`: the others say theirs, and gateways settle again what they had settled.
2. Its cost rows are written, and the requests noted that an answer was delivered of and that nobody billed.
3. For those, all that is said of them is read once more and settled (`billing.restore`).
4. Then what was read is dropped. Whoever dies before leaves it to the next: nothing of this counts twice.

Several may run. Pages are small, and of those requests at most `AT_ONCE` are held.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import structlog
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.attempts import AttemptSink
from billing.restore import Journals, journals_of, restore, restore_cost_rows, unbilled
from contracts import keys
from contracts.usage import AttemptRecord
from contracts.wire import FIELD

log: Final = structlog.get_logger()

QUIET_MS: Final = 10_000
LONGEST_MS: Final = 20_000
"""Read after so long, although more is added: workers may keep on starting."""

AT_ONCE: Final = 5_000
_PAGE: Final = 20


class Retold:
    """Reads what was said again."""

    def __init__(
        self,
        engine: AsyncEngine,
        redis: Redis,
        sink: AttemptSink,
        *,
        pools: Callable[[], Awaitable[Sequence[str]]],
        restored: Callable[[int], None],
    ) -> None:
        """`pools`: all there are at the moment; `restored`: told how many requests were."""
        self._engine = engine
        self._redis = redis
        self._sink = sink
        self._pools = pools
        self._restored = restored

    async def look(self) -> None:
        """Restore from every pool's stream what has been there for long enough.

        Raises RedisError, SQLAlchemyError, OSError.
        """
        for pool in await self._pools():
            stream = keys.retold(pool)
            if last := await self._complete(stream):
                requests, lines = await self._restore(stream, last)
                await self._redis.xtrim(stream, minid=_after(last), approximate=False)
                self._restored(requests)
                log.info("retold_read", pool=pool, lines=lines, requests=requests)

    async def _complete(self, stream: str) -> bytes | None:
        """Return the last entry to read; None when there is nothing, or more may come."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.xrange(stream, count=1)
        pipe.xrevrange(stream, count=1)
        pipe.time()
        first, last, (now_s, _) = await pipe.execute()
        if not last:
            return None
        now_ms = int(now_s) * 1000
        if now_ms - _ms(last[0][0]) < QUIET_MS and now_ms - _ms(first[0][0]) < LONGEST_MS:
            return None
        found: bytes = last[0][0]
        return found

    async def _restore(self, stream: str, last: bytes) -> tuple[int, int]:
        """Return how many requests were restored, and how many lines were read."""
        missing: set[str] = set()
        lines = 0
        async for page in self._pages(stream, last):
            lines += len(page.records) + len(page.delivered)
            await restore_cost_rows(self._sink, page.records)
            missing |= await unbilled(self._engine, self._redis, {rid for rid, _, _ in page.delivered} - missing)
        ordered = sorted(missing)
        restored = 0
        for start in range(0, len(ordered), AT_ONCE):
            about = await self._about(frozenset(ordered[start : start + AT_ONCE]), stream, last)
            done = await restore(self._engine, self._redis, self._sink, about, settled_within_ms=QUIET_MS)
            restored += len(done.requests)
        return restored, lines

    async def _about(self, rids: AbstractSet[str], stream: str, last: bytes) -> Journals:
        """Return all that is said of some requests."""
        records: list[AttemptRecord] = []
        delivered: set[tuple[str, int, int]] = set()
        async for page in self._pages(stream, last):
            records += [record for record in page.records if record.rid in rids]
            delivered |= {mark for mark in page.delivered if mark[0] in rids}
        return Journals(records=records, delivered=frozenset(delivered), unreadable=0)

    async def _pages(self, stream: str, last: bytes) -> AsyncIterator[Journals]:
        start = "-"
        while True:
            page: Any = await self._redis.xrange(stream, min=start, max=last.decode(), count=_PAGE)
            if page:
                yield journals_of(line for _, fields in page for line in fields.get(FIELD.encode(), b"").splitlines())
            if len(page) < _PAGE:
                return
            start = f"({page[-1][0].decode()}"


def _ms(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


def _after(entry_id: bytes) -> str:
    ms, _, number = entry_id.partition(b"-")
    return f"{int(ms)}-{int(number) + 1}"
