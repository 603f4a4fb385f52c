"""Settling what ended: an owned loop, so that no HTTP handler waits for it and no disconnect loses it.

1. A generation offers its numbers; nothing blocks.
2. The loop runs the settle script for each (exactly once per request id, whoever settles), then
   reports the outcome, acknowledges and deletes the inbox entry, and drops the in-flight record. Each
   step may be repeated. A settlement that Redis refuses for its content is logged and left to billing's
   sweep, so that it holds up no other.
3. While Redis is away, what waits is also written to the journal; when Redis is back, everything in
   memory and in the journal is settled and the journal is emptied. A gateway that starts adopts the
   journals of dead ones.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import structlog
from redis.exceptions import RedisError, ResponseError

from contracts import keys
from contracts.resp import Argument, RespConnection
from contracts.settlement import SettlementScripts, actual_usage, outcome_of
from contracts.wire import FIELD, encode
from gateway.journal import Journal
from gateway.records import Records
from gateway.terms import Closed

log = structlog.get_logger()

_BATCH: Final = 64
_RETRY_S: Final = 0.2
_OUTCOMES_KEPT: Final = 100_000


class Settlement:
    """Settles closed requests. `recover`, then `run` until cancelled, then `drain` before and `close` after."""

    def __init__(self, connection: RespConnection, journal: Journal, records: Records, *, max_waiting: int) -> None:
        self._connection = connection
        self._scripts = SettlementScripts(connection)
        self._journal = journal
        self._records = records
        self._waiting: asyncio.Queue[Closed] = asyncio.Queue(max_waiting)
        self._in_hand: Sequence[Closed] = ()
        self._idle = asyncio.Event()
        self._idle.set()
        self._only_in_journal = False
        self._redis_up = True
        self._unsettled: Counter[str] = Counter()  # by organisation, of those in memory
        self._num_offered = self._num_settled = 0  # of those in memory, which are settled in order
        self._progress = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that ended and are not settled."""
        return self._waiting.qsize() + len(self._in_hand)

    @property
    def num_journalled(self) -> int:
        """Settlements in the journal, which Redis could not take."""
        return self._journal.num_records

    def offer(self, closed: Closed) -> None:
        """Take over a request whose numbers are final."""
        self._idle.clear()
        full = self._waiting.full()
        if full or not self._redis_up:
            self._keep(closed)
        if full:
            self._only_in_journal = True
        else:
            self._put(closed)

    async def caught_up(self, org: str, timeout_s: float) -> bool:
        """Wait until everything of an organisation that ended before this call is settled.

        False: nothing of it waited, or it takes longer than `timeout_s`.
        """
        if not self._unsettled[org]:
            return False
        until = self._num_offered
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_settled < until:
                    await self._progress.wait()
        except TimeoutError:
            return False
        return True

    def recover(self) -> None:
        """Open the journal and take over what dead gateways left. Raises OSError."""
        for closed in self._journal.open():
            self._idle.clear()
            try:
                self._put(closed)
            except asyncio.QueueFull:
                self._only_in_journal = True

    async def run(self) -> None:
        """Settle what is offered, however long Redis is away."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < _BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            await self._settle_surely(batch)
            self._count(batch)
            if self._waiting.empty():
                await self._empty_journal()
                if self._waiting.empty():
                    self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything is settled, at most `timeout_s`; the rest goes to the journal."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("settlements_left", num_waiting=self.num_waiting)

    def close(self) -> None:
        """Leave what is not settled to the next gateway. Only after `run` has ended."""
        if self._redis_up:  # otherwise it is in the journal already
            for closed in self._in_hand:
                self._keep(closed)
            while not self._waiting.empty():
                self._keep(self._waiting.get_nowait())
        self._journal.close()

    def _put(self, closed: Closed) -> None:
        self._waiting.put_nowait(closed)
        self._num_offered += 1
        self._unsettled[closed.event.org] += 1

    def _count(self, settled: Sequence[Closed]) -> None:
        self._num_settled += len(settled)
        for closed in settled:
            self._unsettled[closed.event.org] -= 1
            if not self._unsettled[closed.event.org]:
                del self._unsettled[closed.event.org]
        self._progress.set()  # wakes who waits now
        self._progress = asyncio.Event()

    async def _settle_surely(self, batch: Sequence[Closed]) -> None:
        left = self._in_hand = batch
        while left:
            try:
                await self._settle_all(left)
                await self._finish(left)
                left = ()
            except (RedisError, OSError) as error:
                await self._wait_for_redis(left, error)
            self._in_hand = left
        if not self._redis_up:
            log.info("settlements_resumed", num_waiting=self._waiting.qsize())
            self._redis_up = True

    async def _wait_for_redis(self, left: Sequence[Closed], error: Exception) -> None:
        """Secure everything that waits, once per outage, and pause. Settling again is harmless."""
        if self._redis_up:
            log.warning("settlements_wait", num_waiting=self.num_waiting, error=str(error))
            self._redis_up = False
            for closed in left:
                self._keep(closed)
            for _ in range(self._waiting.qsize()):
                closed = self._waiting.get_nowait()
                self._keep(closed)
                self._waiting.put_nowait(closed)
        await asyncio.sleep(_RETRY_S)

    async def _settle_all(self, batch: Sequence[Closed]) -> None:
        """Settle each request; the calls share a write. Raises RedisError when one did not go through."""
        async with asyncio.TaskGroup() as tasks:
            settling = [tasks.create_task(self._settle(closed)) for closed in batch]
        for task in settling:
            error = task.result()
            if error is not None:
                raise error

    async def _settle(self, closed: Closed) -> Exception | None:
        event = closed.event
        try:
            first = await self._scripts.settle(event, actual_usage(event), unreserved=closed.unreserved)
        except (ResponseError, ValueError) as error:
            log.error("settlement_refused", rid=event.rid, org=event.org, error=str(error))  # noqa: TRY400 - data, not code
            return None
        except (RedisError, OSError) as error:
            return error
        if first:
            self._records.settled(closed, lag_ms=max(0.0, time.time() * 1000 - closed.ended_unix_ms))
        else:  # by a scheduler that took us for dead, or by us before an answer was lost
            log.info("settled_before", rid=event.rid)
        return None

    async def _finish(self, batch: Sequence[Closed]) -> None:
        """Tell the schedulers and clear the pools' records. Raises RedisError."""
        commands: list[tuple[Argument, ...]] = []
        for pool in {closed.event.pool for closed in batch}:
            mine = [closed for closed in batch if closed.event.pool == pool]
            kept = ("MAXLEN", "~", _OUTCOMES_KEPT)
            commands += [("XADD", keys.outcomes(pool), *kept, "*", FIELD, encode(outcome_of(c.event))) for c in mine]
            entry_ids = [closed.entry_id for closed in mine if closed.entry_id]
            if entry_ids:
                commands.append(("XACK", keys.inbox(pool), keys.CONSUMER_GROUP_SCHEDULER, *entry_ids))
                commands.append(("XDEL", keys.inbox(pool), *entry_ids))
            commands.append(("DEL", *(keys.inflight(pool, closed.event.rid) for closed in mine)))
        for command, reply in zip(commands, await self._connection.call_all(commands), strict=True):
            if isinstance(reply, Exception):  # would be refused again
                log.error("record_not_cleared", command=command[0], key=command[1], error=str(reply))

    async def _empty_journal(self) -> None:
        if self._only_in_journal:
            self._only_in_journal = False
            for closed in self._journal.read():
                await self._settle_surely([closed])
        if self._journal.num_records and self._waiting.empty():
            self._journal.clear()

    def _keep(self, closed: Closed) -> None:
        if not self._journal.append(closed):
            log.error("settlement_not_journaled", rid=closed.event.rid)
