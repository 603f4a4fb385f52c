"""From the inbox to the workers: queue, place, record, submit.

States are those of contracts.lifecycle:

1. `arrive`: QUEUED, in the waiting queue.
2. Placement (policy) chooses workers and charges them. The choice goes into the in-flight record; only
   then are the parts submitted, decode side first: PREFILLING. Work of a unified worker is DECODING at
   once, since its tokens may be under way before anything else is heard of it.
3. Reports move it on (attempts.py): DECODING from the first PrefillDone, then FINISHED or ABORTED.
4. After a fault (verdicts.py) it is QUEUED again for another attempt, or FAILED, or the gateway decides.
5. It is forgotten when it is settled, whoever did it.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import structlog
from redis.exceptions import RedisError

from contracts.identity import new_room
from contracts.lifecycle import HandOff, Path, Phase, RequestState, Role
from contracts.wire import Submit, encode
from observability.metrics import Instruments
from scheduler.book import Book, Part, PartState, Request
from scheduler.helm import Helm
from scheduler.leader import LeaderLease, LeadershipLost
from scheduler.outbox import Outbox
from scheduler.policy.admission import Refusal, refuse_on_arrival, refuse_waiting
from scheduler.policy.cluster import Limits
from scheduler.policy.ladder import Way
from scheduler.policy.placement import Reason
from scheduler.policy.scoring import NotScored, Scored
from scheduler.record import Placed as Recorded
from scheduler.record import WriteAhead
from scheduler.registry import WorkerRegistry
from scheduler.router import Router
from scheduler.spans import Spans
from scheduler.submits import submits
from scheduler.verdicts import Verdicts
from scheduler.waiting import WaitingQueue, view
from scheduler.yields import Yields

log = structlog.get_logger()

_RETRY_PAUSE_S = 0.2
_BATCH = 64
_NOTICE_WITHIN_S = 0.1
"""How long the head of an answer may wait for the notice that releases it, if no token does."""


class Dispatcher:
    """Places requests of one pool during one term."""

    def __init__(
        self,
        pool: str,
        *,
        book: Book,
        waiting: WaitingQueue,
        verdicts: Verdicts,
        registry: WorkerRegistry,
        lease: LeaderLease,
        write_ahead: WriteAhead,
        outbox: Outbox,
        router: Router,
        helm: Helm,
        yields: Yields,
        limits: Limits,
        instruments: Instruments,
        spans: Spans,
        now_s: Callable[[], float] = time.monotonic,
        now_unix_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._pool = pool
        self._book = book
        self._waiting = waiting
        self._verdicts = verdicts
        self._registry = registry
        self._lease = lease
        self._write_ahead = write_ahead
        self._outbox = outbox
        self._router = router
        self._helm = helm
        self._yields = yields
        self._limits = limits
        self._instruments = instruments
        self._spans = spans
        self._now_s = now_s
        self._now_unix_ms = now_unix_ms
        self._seq = 0
        self._blocked_by: Reason | None = None
        self._placements: Counter[tuple[str, str]] = Counter()  # not counted in the metric yet

    # -- arrivals ----------------------------------------------------------------------------------

    def arrive(self, submit: Submit, entry_id: bytes) -> Request | None:
        """Queue a new request; None when it is known already (the gateway wrote it twice)."""
        known = self._book.get(submit.rid)
        if known is not None:
            if known.entry_id != entry_id:
                self._outbox.acknowledge(entry_id)
            return None
        request = self.enter(submit, entry_id)
        self._helm.arrived(request)
        left_s = (submit.deadline_unix_ms - self._now_unix_ms()) / 1000
        # A request whose own deadline is over is refused for that, by the next tick.
        left_s = left_s if left_s > 0 else math.inf
        why = self._ladder_refuses(request)
        why = why or refuse_on_arrival(self._verdicts.queue_for(request), self._limits, left_s=left_s)
        if why is not None:
            self._verdicts.refuse_for(request, why)
        else:
            self._waiting.push(request, self._now_s())
        return request

    def enter(self, submit: Submit, entry_id: bytes) -> Request:
        """Take a request into the book without queueing it."""
        self._seq += 1
        request = Request(submit, entry_id, seq=self._seq, now_s=self._now_s())
        self._router.size_up(request)
        self._book.add(request)
        return request

    def enqueue(self, request: Request) -> None:
        """Let a QUEUED request wait for workers."""
        self._waiting.push(request, self._now_s())

    # -- placing -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Place, record and submit until cancelled. Raises LeadershipLost."""
        while True:
            await self._waiting.stirred()
            while batch := self._choose_all():
                await self._record(batch)
                for item in batch:
                    self._submit(item.request)

    def _choose_all(self) -> list[Recorded]:
        """Choose workers for waiting requests, in order, until one has to wait."""
        chosen: list[Recorded] = []
        now_s = self._now_s()
        self._blocked_by = None
        turns = self._waiting.turns(now_s)
        short_of: Role | None = None
        while len(chosen) < _BATCH and (request := turns.next()) is not None:
            result = self._place(request)
            if result is None:
                self._waiting.pause(request, now_s + _RETRY_PAUSE_S)
                continue
            if isinstance(result, Scored):
                if self._waiting.in_vain(request, result.predicted_ttft_ms):
                    if self._batch_yields(request):
                        short_of = Role.UNIFIED
                        break
                    self._waiting.give_up(request)
                    continue
                self._waiting.take(request, now_s)
                request.charged = True
                chosen.append(self._choose(request, result))
                continue
            request.blocked_by = result.reason
            if result.reason is Reason.TOO_LONG:
                self._verdicts.refuse_for(request, Refusal.TOO_LONG)
            elif result.reason is Reason.ALL_EXCLUDED:
                # Nowhere else to go: the same workers again, after a pause, within the attempts left.
                request.excluded.clear()
                request.not_before_s = now_s + _RETRY_PAUSE_S
                self._waiting.pause(request, request.not_before_s)
            else:
                self._batch_yields(request)
                if turns.no_room(request.ticket):
                    self._blocked_by, short_of = result.reason, result.short_of
        self._waiting.blocked(short_of, now_s)
        return chosen

    def _ladder_refuses(self, request: Request) -> Refusal | None:
        """Return why the degrade ladder takes no new request of this kind. Those that wait already stay."""
        match self._helm.ladder.way(request, self._registry.cluster()):
            case Way.SHED:
                return Refusal.SHED
            case Way.UNAVAILABLE:
                return Refusal.UNAVAILABLE
            case _:
                return None

    def _place(self, request: Request) -> Scored | NotScored | None:
        """Return workers for a request, or what it waits for; None = for a pair, and those behind it need not."""
        cluster = self._registry.cluster()
        gives_way = self._waiting.gives_way(request)
        way = self._helm.ladder.way(request, cluster)
        if way is Way.WAIT:
            return None
        if way is Way.UNIFIED:
            result = self._router.place(request, cluster.only_unified, gives_way=gives_way)
            if isinstance(result, Scored):
                return msgspec.structs.replace(result, path=Path.FALLBACK, reason=Reason.DEGRADED)
        return self._router.place(request, cluster, gives_way=gives_way)

    def _batch_yields(self, request: Request) -> bool:
        """Whether batch lines leave for a request that has no room, or none in time. It is tried again then."""
        gives_way = self._waiting.gives_way(request)
        return self._yields.make_room(
            request, self._registry.cluster(), lambda view: self._router.place(request, view, gives_way=gives_way)
        )

    def _choose(self, request: Request, placement: Scored) -> Recorded:
        replaces = request.attempt
        request.attempt += 1
        request.placing = True
        request.path = Path.LOCAL if request.submit.local else placement.path
        request.reason = placement.reason
        request.blocked_by = None
        self._router.placed(request, placement)
        samples = request.samples
        rooms = (new_room() for _ in range(request.submit.num_samples))
        request.hand_off_now = placement.hand_off
        request.rooms = tuple(rooms) if placement.hand_off is HandOff.DIRECT else ()
        decode = self._registry.get(placement.decode.worker_id, placement.decode.epoch)
        assert decode is not None
        request.decode_ref, request.prefill_ref = decode.ref, None
        phase = Phase.UNIFIED
        request.parts = {}
        if placement.prefill is not None:
            phase = Phase.DECODE
            prefill = self._registry.get(placement.prefill.worker_id, placement.prefill.epoch)
            assert prefill is not None
            request.prefill_ref = prefill.ref
            # All samples find the one prompt in the store.
            for sample in samples if placement.hand_off is HandOff.DIRECT else samples[:1]:
                request.parts[Phase.PREFILL, sample] = Part(prefill, Phase.PREFILL, sample)
        state = PartState.HELD if placement.hand_off is HandOff.STORE else PartState.SENT
        for sample in samples:
            request.parts[phase, sample] = Part(decode, phase, sample, state)
        for part in request.parts.values():
            self.charge(request, part)
        return Recorded(request, replaces)

    def charge(self, request: Request, part: Part) -> None:
        """Count a part against its worker."""
        prompt = kv = request.input_tokens
        held = 0
        if part.phase is not Phase.PREFILL:
            assert request.sized is not None
            kv += min(request.output_tokens, request.sized.promised_output)
            held = int(prompt + min(request.output_tokens, request.sized.expected_output) / 2)
        uncached = max(1, prompt - request.hoped_cached_tokens)
        part.worker.charge(
            request.key(part.sample),
            kv_tokens=kv,
            prefill_tokens=0 if part.phase is Phase.DECODE else uncached,
            decoding_kv_tokens=held,
        )
        if part.worker not in request.workers:
            request.workers.append(part.worker)

    async def _record(self, batch: list[Recorded]) -> None:
        """Write the batch ahead; while Redis is away, try again for as long as we lead."""
        while True:
            if not self._lease.held:
                raise LeadershipLost("the lease ran out")
            try:
                answers = await self._write_ahead.write(batch)
                break
            except RedisError as error:
                log.warning("write_ahead_failed", pool=self._pool, error=str(error))
                await asyncio.sleep(0.05)
        for item, held_attempt in zip(batch, answers, strict=True):
            item.request.placing = False
            if held_attempt:
                log.warning("attempt_in_the_way", rid=item.request.rid, attempt=held_attempt)
                self._undo(item.request)
                item.request.attempt = held_attempt

    def _submit(self, request: Request) -> None:
        """Send a recorded request to its workers."""
        if request.rid not in self._book:  # settled while it was being recorded
            self._undo(request)
            self._outbox.delete_record(request.rid)
            return
        if request.state is not RequestState.QUEUED:  # aborted or failed meanwhile
            self._undo(request)
            return
        if not request.parts:  # another attempt was in the way
            self._waiting.push(request, self._now_s())
            return
        if not self._lease.held:
            raise LeadershipLost("the lease ran out")
        request.move(RequestState.PREFILLING)
        if request.attempt == 1:
            request.queued_ms = max(0.0, self._now_unix_ms() - request.written_unix_ms)
        if not self._send(request):
            return
        if request.prefill_ref is None:
            request.move(RequestState.DECODING)
        self._notify_placed(request)

    def _send(self, request: Request) -> bool:
        """Submit what is not held; when a stream is down, try elsewhere and return False."""
        if any(part.state is PartState.LOST for part in request.parts.values()):
            return self._stream_down(request)
        for part, command in submits(request, self._lease.epoch, placed=encode(request.notice)):
            part.sent_s = self._now_s()
            if not self._registry.send(part.worker, command):
                part.state = PartState.LOST
                part.worker.release(request.key(part.sample))
                return self._stream_down(request)
        return True

    def _stream_down(self, request: Request) -> bool:
        self._verdicts.retry(request, "stream_down", announce=False)
        return False

    def prompt_stored(self, request: Request) -> None:
        """Submit the unchanged request to its decode worker: its prompt is computed and in the store."""
        held = [part for part in request.streaming_parts if part.state is PartState.HELD]
        if not held or request.placing or request.stop_requested or request.terminal:
            return
        for part in held:
            part.state, part.sent_s = PartState.SENT, self._now_s()
        for part, command in submits(request, self._lease.epoch, placed=encode(request.notice)):
            if part in held and not self._registry.send(part.worker, command):
                part.state = PartState.LOST
                part.worker.release(request.key(part.sample))
                self._verdicts.retry(request, "stream_down", exclude=[part.worker.worker_id], announce=False)
                return

    def _notify_placed(self, request: Request) -> None:
        decode, prefill = request.decode_ref, request.prefill_ref
        assert request.path is not None
        assert request.reason is not None
        assert decode is not None
        # A first attempt's notice is with its first tokens, too: by Redis it may wait for company.
        self._outbox.notify(
            request.submit.gateway_id, request.notice, within_s=_NOTICE_WITHIN_S if request.attempt == 1 else 0.0
        )
        self._helm.decisions.placed(request)
        self._yields.placed(request)
        self._placements[request.path.value, request.reason.value] += 1
        self._spans.placed(request, now_unix_ms=self._now_unix_ms(), cold=self._helm.cold)
        if request.attempt == 1:
            self._instruments.queue_wait(request.queued_ms, pool=self._pool)
        log.debug(
            "placed",
            rid=request.rid,
            attempt=request.attempt,
            path=request.path,
            reason=request.reason,
            decode=decode.worker_id,
            prefill=prefill.worker_id if prefill is not None else None,
        )

    def tell_adopted(self, request: Request) -> None:
        """Tell a gateway where its request runs: the leader that placed it may have died before it could."""
        self._outbox.notify(request.submit.gateway_id, request.notice, within_s=_NOTICE_WITHIN_S)

    def _undo(self, request: Request) -> None:
        """Take back a choice that no worker has heard of."""
        for part in request.parts.values():
            part.worker.release(request.key(part.sample))
        request.parts = {}

    # -- time --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what is due: refuse those who waited too long, tell workers what is settled."""
        now_s, now_unix_ms = self._now_s(), self._now_unix_ms()
        for request in self._waiting:
            if request.blocked_by is None and self._blocked_by is Reason.NO_WORKER:
                request.blocked_by = Reason.NO_WORKER
            why = refuse_waiting(
                view(request, now_s=now_s), now_unix_ms, self._limits, workers_come=self._helm.workers_come
            )
            if why is not None:
                self._verdicts.refuse_for(request, why)
        self._waiting.stir()
        for (path, reason), number in self._placements.items():
            self._instruments.placements.add(number, {"pool": self._pool, "path": path, "reason": reason})
        self._placements.clear()
