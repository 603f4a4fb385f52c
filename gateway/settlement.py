"""Settling what ended: an owned loop, so that no HTTP handler waits for it and no disconnect loses it.

1. A generation offers its numbers; nothing blocks.
2. The loop runs the settle script for all that wait, in one write (exactly once per request id, whoever settles).
   Once settled, a request's outcome is reported, its inbox entry acknowledged and deleted and its in-flight
   record dropped: with the next settlements' write, or `FINISH_WITHIN_S` later. Each step may be repeated. A
   settlement that Redis refuses for its content is logged and left to billing's sweep, so that it holds up no other.
3. While Redis is away, what waits is also written to the journal; when Redis is back, everything in
   memory and in the journal is settled and the journal is emptied. A gateway that starts adopts the
   journals of dead ones.
4. Nobody waits for Redis' answer, so it lies unread until the next request ends, or `READ_WITHIN_S`: by itself it would
   wake this process once more for each request. Who must know (`caught_up`, `drain`) has it read as it comes.
5. What Redis acknowledged it may still lose when it is killed or a replica takes over. Once the connection had to be
   opened anew, what was settled in the last seconds is settled again: that changes nothing, unless it was lost.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from redis.exceptions import RedisError

from contracts import keys
from contracts.resp import Command, RespConnection, ScriptCall
from contracts.settlement import Settled, actual_usage, outcome_of, settle_call, settle_script
from contracts.wire import FIELD, encode
from gateway.journal import Journal
from gateway.records import Records
from gateway.terms import Closed
from gateway.unconfirmed import Unconfirmed

log = structlog.get_logger()

FINISH_WITHIN_S: Final = 0.1
"""How long the records of a settled request wait for company: whoever finds them finds that it is settled."""

READ_WITHIN_S: Final = 0.1
"""How long the answer to a settlement may lie unread. It is settled all the same."""

_BATCH: Final = 64
_RETRY_S: Final = 0.2
_LOOK_S: Final = 1.0  # for another life of Redis, while nothing ends
_OUTCOMES_KEPT: Final = 100_000


class Settlement:
    """Settles closed requests. `recover`, then `run` until cancelled, then `drain` before and `close` after."""

    def __init__(self, connection: RespConnection, journal: Journal, records: Records, *, max_waiting: int) -> None:
        self._connection = connection
        self._script = settle_script(connection)
        self._journal = journal
        self._records = records
        self._waiting: asyncio.Queue[Closed] = asyncio.Queue(max_waiting)
        self._in_hand: Sequence[Closed] = ()
        self._settled: Sequence[Closed] = ()  # whose records are still there
        self._idle = asyncio.Event()
        self._idle.set()
        self._only_in_journal = False
        self._redis_up = True
        self._unsettled: Counter[str] = Counter()  # by organisation, of those in memory
        self._num_offered = self._num_settled = 0  # of those in memory, which are settled in order
        self._progress = asyncio.Event()
        self._unconfirmed = Unconfirmed()
        self._num_opened = 0  # the connection that settled what is unconfirmed
        self._sent_ms = 0.0  # Unix time at which what is in hand was sent
        self._num_hurried = 0  # callers that wait until something is settled
        connection.rest(READ_WITHIN_S)

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
        self._connection.listen()  # the loop may wait for the answer to those before

    async def caught_up(self, org: str, timeout_s: float) -> bool:
        """Wait until everything of an organisation that ended before this call is settled.

        False: nothing of it waited, or it takes longer than `timeout_s`.
        """
        if not self._unsettled[org]:
            return False
        until = self._num_offered
        self._num_hurried += 1
        self._connection.rest(0)
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_settled < until:
                    await self._progress.wait()
        except TimeoutError:
            return False
        finally:
            self._num_hurried -= 1
            if not self._num_hurried:
                self._connection.rest(READ_WITHIN_S)
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
            batch = await self._next_batch()
            if not batch and not self._settled:
                await self._look_again()
                continue
            await self._settle_surely(batch)
            self._count(batch)
            if self._waiting.empty() and not self._settled:
                await self._empty_journal()
                if self._waiting.empty():
                    self._idle.set()

    async def _next_batch(self) -> list[Closed]:
        """Return what waits; nothing when nothing comes in time to take the settled ones' records along.

        Nor when it is time to look whether Redis lives.
        """
        if self._waiting.empty():
            longest_s = FINISH_WITHIN_S if self._settled else _LOOK_S if self._unconfirmed else None
            try:
                async with asyncio.timeout(longest_s):
                    batch = [await self._waiting.get()]
            except TimeoutError:
                return []
        else:
            batch = []
        while len(batch) < _BATCH and not self._waiting.empty():
            batch.append(self._waiting.get_nowait())
        return batch

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything is settled, at most `timeout_s`; the rest goes to the journal."""
        self._num_hurried += 1  # for good: this is the end
        self._connection.rest(0)
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
        self._in_hand = batch
        while True:
            try:
                await self._settle_all(batch, self._note)
                await self._confirm(batch)
                break
            except (RedisError, OSError) as error:
                await self._wait_for_redis(batch, error)
        self._in_hand = ()
        if not self._redis_up:
            log.info("settlements_resumed", num_waiting=self._waiting.qsize())
            self._redis_up = True

    async def _confirm(self, settled: Sequence[Closed]) -> None:
        """Keep what is settled for a while, and what Redis lost of the last seconds settle again. Raises RedisError."""
        if not self._unconfirmed:
            self._num_opened = self._connection.num_opened
        self._unconfirmed.add(settled)
        while self._num_opened != (opened := self._connection.num_opened):
            for batch in self._unconfirmed.batches(_BATCH):
                self._unconfirmed.add(await self._settle_all(batch, self._records.restored))
            self._num_opened = opened
        self._unconfirmed.forget_old()

    async def _look_again(self) -> None:
        try:
            await self._connection.call("PING")
            await self._confirm(())
        except (RedisError, OSError) as error:
            log.info("settlements_unconfirmed", kept=len(self._unconfirmed), error=str(error))

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

    async def _settle_all(self, batch: Sequence[Closed], note: Callable[[Closed, Settled], None]) -> Sequence[Closed]:
        """Settle each request, and clear the records of those before. Note and return those not settled before.

        Raises RedisError when Redis took not all.
        """
        settling: list[tuple[Closed, ScriptCall]] = []
        for closed in batch:
            try:
                call = settle_call(closed.event, actual_usage(closed.event), unreserved=closed.unreserved)
            except ValueError as error:
                _refused(closed, error)
            else:
                settling.append((closed, call))
        clearing = self._clearing()
        self._sent_ms = time.time() * 1000
        replies = await self._script.call_all([call for _, call in settling], beside=clearing)
        self._settled = batch
        for command, reply in zip(clearing, replies[len(settling) :], strict=True):
            if isinstance(reply, Exception):  # would be refused again
                log.error("record_not_cleared", command=command[0], key=command[1], error=str(reply))
        first: list[Closed] = []
        for (closed, _), reply in zip(settling, replies, strict=False):
            if isinstance(reply, Exception):
                _refused(closed, reply)
            elif reply:
                note(closed, Settled(reply))
                first.append(closed)
            else:  # by a scheduler that took us for dead, or by us: before an answer was lost, or to be sure
                log.debug("settled_before", rid=closed.event.rid)
        return first

    def _note(self, closed: Closed, settled: Settled) -> None:
        self._records.settled(closed, lag_ms=max(0.0, self._sent_ms - closed.ended_unix_ms))
        if settled is Settled.UNRESERVED:
            self._records.restored(closed, settled)

    def _clearing(self) -> list[Command]:
        """Return the commands that tell the schedulers of settled requests and clear the pools' records."""
        commands: list[Command] = []
        for pool in {closed.event.pool for closed in self._settled}:
            mine = [closed for closed in self._settled if closed.event.pool == pool]
            kept = ("MAXLEN", "~", _OUTCOMES_KEPT)
            commands += [("XADD", keys.outcomes(pool), *kept, "*", FIELD, encode(outcome_of(c.event))) for c in mine]
            entry_ids = [closed.entry_id for closed in mine if closed.entry_id]
            if entry_ids:
                commands.append(("XACK", keys.inbox(pool), keys.CONSUMER_GROUP_SCHEDULER, *entry_ids))
                commands.append(("XDEL", keys.inbox(pool), *entry_ids))
            commands.append(("DEL", *(keys.inflight(pool, closed.event.rid) for closed in mine)))
        return commands

    async def _empty_journal(self) -> None:
        if self._only_in_journal:
            self._only_in_journal = False
            for closed in self._journal.read():
                await self._settle_surely([closed])
            await self._settle_surely(())
        if self._journal.num_records and self._waiting.empty():
            self._journal.clear()

    def _keep(self, closed: Closed) -> None:
        if not self._journal.append(closed):
            log.error("settlement_not_journaled", rid=closed.event.rid)


def _refused(closed: Closed, error: Exception) -> None:
    log.error("settlement_refused", rid=closed.event.rid, org=closed.event.org, error=str(error))
