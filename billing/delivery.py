"""At-least-once delivery from Redis streams into a sink that ignores repeats: together, exactly once.

1. Read new entries, after a small batch not before `linger_s`; now and then claim those that a dead
   consumer left.
2. The sink prepares each entry. One that can never be written is buried alone, with the reason.
3. The sink writes the rest in one transaction. If the database refuses the data, halve the batch until the
   rows at fault stand alone, and bury those: a bad entry never fails its batch. A fault of ours does the same.
4. After the commit, acknowledge. A crash before that delivers the entries again; they change nothing.

When Postgres or Redis is away nothing is acknowledged: the entries stay in Redis, and the same batch is tried
again, ever more slowly.
"""

import random
import time
from asyncio import sleep
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

import asyncpg
import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from billing.events import Poison
from billing.streams import Entry, GroupReader

log: Final = structlog.get_logger()

T = TypeVar("T")

_LONGEST_BACKOFF_S: Final = 5.0

# The data's fault: some row holds a value that the table does not take.
REFUSED: Final = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, ValueError, OverflowError)
# Not the data's fault (a server away, a deadlock, a schema that is not there yet): the same batch again.
AWAY: Final = (OSError, TimeoutError, RedisError, SQLAlchemyError, asyncpg.InterfaceError, asyncpg.PostgresError)


class Sink(Protocol[T]):
    """What entries are turned into and written to. Writing a thing again must change nothing."""

    async def prepare(self, raws: Sequence[bytes]) -> list[T | Poison]:
        """Return what each entry becomes, in order."""
        ...

    async def write(self, things: Sequence[T]) -> int:
        """Write all in one transaction; return how many were not there before."""
        ...


class Count(Protocol):
    """Told what became of entries: posted | repeated | dead_letter."""

    def __call__(self, number: int, result: str) -> None:
        """Count `number` entries."""
        ...


class Backoff:
    """How long to wait after failures in a row, seconds: doubling, with jitter, bounded."""

    def __init__(self) -> None:
        self._failures = 0

    async def wait(self) -> None:
        """Wait after one more failure."""
        self._failures += 1
        longest_s = min(_LONGEST_BACKOFF_S, 0.05 * 2 ** min(self._failures, 10))
        await sleep(longest_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    def reset(self) -> None:
        """Forget the failures: something worked."""
        self._failures = 0


class Delivery(Generic[T]):
    """One consumer: moves entries from its streams into its sink."""

    def __init__(
        self,
        name: str,
        reader: GroupReader,
        sink: Sink[T],
        count: Count,
        *,
        batch_size: int = 500,
        block_ms: int = 1000,
        claim_idle_ms: int = 10_000,
        linger_s: float = 0.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._reader = reader
        self._sink = sink
        self._count = count
        self._batch_size = batch_size
        self._block_ms = block_ms
        self._claim_idle_ms = claim_idle_ms
        self._linger_s = linger_s
        self._now_s = now_s
        self._next_claim_s = 0.0
        self._has_groups = False
        self._per_stream = max(1, batch_size // 16)

    async def run(self) -> None:
        """Deliver until cancelled."""
        backoff = Backoff()
        while True:
            try:
                entries = await self._take()
            except (RedisError, OSError) as error:
                log.warning("stream_away", delivery=self._name, error=f"{type(error).__name__}: {error}")
                await backoff.wait()
            else:
                backoff.reset()
                await self.deliver(entries)
                if 0 < len(entries) < self._batch_size:
                    await sleep(self._linger_s)  # few at a time cost a transaction each

    async def _take(self) -> list[Entry]:
        """Return entries to deal with: those that a dead consumer left go first, until there are none."""
        if self._now_s() >= self._next_claim_s:
            if not self._has_groups:  # one that is lost later is made again by whoever reads
                await self._reader.create_groups()
                self._has_groups = True
            entries = await self._reader.claim(idle_ms=self._claim_idle_ms, count=self._per_stream)
            if entries:
                return entries
            self._next_claim_s = self._now_s() + self._claim_idle_ms / 2000
        entries = await self._reader.read(count=self._per_stream, block_ms=self._block_ms)
        self._adapt(len(entries))
        return entries

    def _adapt(self, taken: int) -> None:
        """Keep what one read takes near two batches, however many streams are busy.

        Redis counts per stream. Whoever takes more than it can write before others may claim it makes them
        do the same work twice.
        """
        most = 2 * self._batch_size
        if taken > most:
            self._per_stream = max(1, self._per_stream * most // taken)
        elif taken < self._batch_size:
            self._per_stream = min(self._batch_size, 2 * self._per_stream)

    async def deliver(self, entries: Sequence[Entry]) -> None:
        """Write, bury and acknowledge entries; returns when all are dealt with, however long that takes."""
        for start in range(0, len(entries), self._batch_size):
            batch = entries[start : start + self._batch_size]
            backoff = Backoff()
            while not await self._tried(batch):
                await backoff.wait()

    async def _tried(self, batch: Sequence[Entry]) -> bool:
        try:
            await self._process(batch)
        except AWAY as error:
            log.warning(
                "batch_waits", delivery=self._name, entries=len(batch), error=f"{type(error).__name__}: {error}"
            )
            return False
        return True

    async def _process(self, batch: Sequence[Entry]) -> None:
        """Write a batch; halve it when something in it is at fault, and bury what fails alone."""
        try:
            prepared = await self._sink.prepare([entry.raw for entry in batch])
            good: list[tuple[Entry, T]] = []
            for entry, thing in zip(batch, prepared, strict=True):
                if isinstance(thing, Poison):
                    await self._bury(entry, thing)
                else:
                    good.append((entry, thing))
            new = await self._sink.write([thing for _, thing in good]) if good else 0
        except REFUSED as error:
            await self._halve(batch, Poison("refused_by_database", f"{type(error).__name__}: {error}"))
        except AWAY:
            raise
        except Exception as error:  # a fault of ours must not keep the others' usage from being posted
            log.exception("batch_failed", delivery=self._name, entries=len(batch))
            await self._halve(batch, Poison("unexpected", f"{type(error).__name__}: {error}"))
        else:
            if good:
                await self._reader.acknowledge([entry for entry, _ in good])
                self._count(new, "posted")
                self._count(len(good) - new, "repeated")

    async def _halve(self, batch: Sequence[Entry], poison: Poison) -> None:
        if len(batch) == 1:
            await self._bury(batch[0], poison)
            return
        middle = len(batch) // 2
        await self._process(batch[:middle])
        await self._process(batch[middle:])

    async def _bury(self, entry: Entry, poison: Poison) -> None:
        if await self._reader.bury(entry, str(poison)):
            log.error(
                "entry_buried", delivery=self._name, stream=entry.stream, entry=entry.entry_id, reason=str(poison)
            )
            self._count(1, "dead_letter")
