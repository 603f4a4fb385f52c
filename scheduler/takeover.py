"""What a new leader does with the work of the one before.

1. Claim every pending inbox entry and read the in-flight records.
2. A submit without a record was never dispatched: queue it. (Or settled since it was claimed: then its entry is gone.)
3. A submit with a record waits until it is known how its workers stand: their Inventory came, or they are
   dead or gone. Then: running or finished there = adopt as it is; on no reachable worker = another attempt,
   by the same rules as after a loss (attempts.py).
4. Aborts and continuations are acted on as always, after the submits before them.
5. Reports that arrive before their request is decided are held back and replayed.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis

from contracts import keys
from contracts.identity import rid_from_bytes
from contracts.lifecycle import HandOff, Phase, RequestState
from contracts.v1 import worker_pb2 as pb
from contracts.wire import FINISH_FROM_PB, PHASE_FROM_PB, Inflight, Submit, WorkerRef
from scheduler.attempts import Attempts
from scheduler.book import Book, Part, PartState, Request
from scheduler.dispatch import Dispatcher
from scheduler.inbox import Entry, Inbox
from scheduler.intake import Intake
from scheduler.record import decode_record
from scheduler.registry import WorkerRegistry
from scheduler.verdicts import Verdicts
from scheduler.worker import Standing, Worker

log = structlog.get_logger()

_MGET_BATCH = 500


class Takeover:
    """The adoption of one term's inheritance. Listens to the registry in front of Attempts."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        *,
        inbox: Inbox,
        intake: Intake,
        book: Book,
        dispatcher: Dispatcher,
        verdicts: Verdicts,
        registry: WorkerRegistry,
        attempts: Attempts,
        epoch: int,
        stale_leader: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._pool = pool
        self._inbox = inbox
        self._intake = intake
        self._book = book
        self._dispatcher = dispatcher
        self._verdicts = verdicts
        self._registry = registry
        self._attempts = attempts
        self._epoch = epoch
        self._stale_leader = stale_leader
        self._caught_up = False
        self._undecided: dict[str, tuple[Request, Inflight]] = {}
        self._inventories: dict[Worker, pb.Inventory] = {}
        self._held: list[tuple[Worker, str | None, pb.ControlReport]] = []

    # -- the registry's listener -------------------------------------------------------------------

    def capacity_changed(self) -> None:
        """Try those who wait."""
        self._attempts.capacity_changed()

    def worker_up(self, worker: Worker, inventory: pb.Inventory) -> None:
        """Decide what waited for this worker; compare the rest with the book."""
        if inventory.leader_epoch > self._epoch:
            self._stale_leader()
            return
        self._inventories[worker] = inventory
        if self._caught_up:
            self._decide()
            self._reconcile(worker, inventory)
            self._replay()

    def worker_lost(self, worker: Worker) -> None:
        """Decide what waited for this worker."""
        self._inventories.pop(worker, None)
        self._attempts.worker_lost(worker)
        if self._caught_up:
            self._decide()
            self._replay()

    def worker_reported(self, worker: Worker, kind: str | None, report: pb.ControlReport) -> None:
        """Pass a report on, or hold it while its request is undecided."""
        if not self._caught_up or (self._undecided and _rid_of(kind, report) in self._undecided):
            self._held.append((worker, kind, report))
        else:
            self._attempts.worker_reported(worker, kind, report)

    # -- claims ------------------------------------------------------------------------------------

    async def take_claimed(self, entries: list[Entry]) -> None:
        """Take in entries that another leader had read. Raises redis.exceptions.RedisError."""
        records = await self._records(entries)
        # Its gateway settled it after we had claimed it: the entry goes first and the record last, so one of the two
        # always tells. Without a record it would look as if it had never been dispatched, and run again.
        unrecorded = [e[0] for e in entries if isinstance(m := self._intake.read(e), Submit) and m.rid not in records]
        settled = await self._inbox.missing(unrecorded) if unrecorded else set()
        num_new = 0
        for entry in entries:
            if entry[0] in settled:
                continue
            message = self._intake.read(entry)
            if not isinstance(message, Submit) or message.rid in self._book:
                self._intake.take(entry)
                continue
            request = self._intake.admit_claimed(message, entry[0])
            if request is None:
                continue
            record = records.get(message.rid)
            if record is None:
                num_new += 1
                self._dispatcher.enqueue(request)
            else:
                request.attempt = record.attempt
                self._undecided[message.rid] = (request, record)
        if entries:
            log.info("claimed", pool=self._pool, num_entries=len(entries), never_dispatched=num_new)
        if self._caught_up:
            self._decide()

    def caught_up(self) -> None:
        """Every pending entry is in the book: decide, and end what nobody asked for."""
        self._caught_up = True
        self._attempts.caught_up = True
        self._decide()
        for worker, inventory in list(self._inventories.items()):
            self._reconcile(worker, inventory)
        self._replay()

    async def _records(self, entries: list[Entry]) -> dict[str, Inflight]:
        rids = [m.rid for m in map(self._intake.read, entries) if isinstance(m, Submit)]
        found: dict[str, Inflight] = {}
        for start in range(0, len(rids), _MGET_BATCH):
            batch = rids[start : start + _MGET_BATCH]
            answers: Any = await self._redis.mget([keys.inflight(self._pool, rid) for rid in batch])
            for rid, raw in zip(batch, answers, strict=True):
                try:
                    if raw:
                        found[rid] = decode_record(raw)
                except msgspec.DecodeError as error:
                    # Placed anew: the write-ahead script finds the attempt in its way, and the next one runs.
                    log.warning("bad_record", pool=self._pool, rid=rid, error=str(error))
        return found

    # -- decisions ---------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Decide all whose workers' standing is known."""
        for request, record in list(self._undecided.values()):
            refs = [record.decode] + ([record.prefill] if record.prefill is not None else [])
            if any(self._is_connecting(ref) for ref in refs):
                continue
            del self._undecided[request.rid]
            if self._book.get(request.rid) is request:
                self._adopt(request, record)

    def _is_connecting(self, ref: WorkerRef) -> bool:
        worker = self._registry.get(ref.worker_id, ref.epoch)
        return worker is not None and worker.standing is Standing.CONNECTING

    def _adopt(self, request: Request, record: Inflight) -> None:
        request.path, request.rooms = record.path, record.rooms
        request.done = frozenset(record.done)
        if record.continued and not request.delivered:
            request.delivered = None
        request.decode_ref, request.prefill_ref = record.decode, record.prefill
        request.hand_off_now = record.hand_off
        if request.state is not RequestState.QUEUED:  # aborted while undecided: end what runs
            request.stop_requested = True
        decode = _Side(request, record.decode, Phase.DECODE if record.prefill else Phase.UNIFIED, self)
        prefill = _Side(request, record.prefill, Phase.PREFILL, self) if record.prefill is not None else None
        if request.state is RequestState.QUEUED:
            request.move(RequestState.PREFILLING)
        for side in (prefill, decode):
            if side is not None:
                side.enter(self._dispatcher)
        how = self._judge(request, decode, prefill)
        write = log.debug if how == "adopted" else log.info
        write("inherited", pool=self._pool, rid=request.rid, attempt=request.attempt, how=how)
        if how == "adopted":
            self._dispatcher.tell_adopted(request)
        for side in (prefill, decode):
            if side is not None and side.worker is not None:
                for final in side.finals:
                    self._attempts.final(side.worker, final)
        self._verdicts.end_if_stopped(request)

    def _judge(self, request: Request, decode: "_Side", prefill: "_Side | None") -> str:
        """Decide one request by where its parts are; return what was decided."""
        if request.stop_requested:
            self._verdicts.stop_parts(request, "aborted")
            return "aborted"
        if request.hand_off_now is HandOff.STORE and prefill is not None and decode.absent and not decode.all_final:
            return self._judge_stored(request, decode, prefill)
        if decode.reachable:
            unsent = decode.absent or (prefill is not None and prefill.reachable and prefill.absent)
            if unsent and not decode.all_final:
                # The old leader died between its record and its submits: nothing can have been streamed.
                self._verdicts.retry(request, "not_submitted")
                return "not_submitted"
            if prefill is None or not prefill.reachable:
                request.move(RequestState.DECODING)
            if prefill is not None and not prefill.reachable and not decode.all_final:
                self._attempts.watch_hand_off(request)
            return "adopted"
        if prefill is not None and prefill.reachable and not prefill.all_final:
            self._verdicts.retry(request, "worker_lost")  # still computing, or never began
            return "worker_lost"
        request.move(RequestState.DECODING)
        self._verdicts.ask_gateway(request, "worker_lost")
        return "asked_gateway"

    def _judge_stored(self, request: Request, decode: "_Side", prefill: "_Side") -> str:
        """Decide a request of the store hand-off whose decode worker has not heard of it, as far as is known."""
        if not decode.reachable or request.delivered is None:
            request.move(RequestState.DECODING)  # it may have streamed, or goes on from what only the gateway knows
            self._verdicts.ask_gateway(request, "worker_lost" if request.delivered is not None else "leader_changed")
            return "asked_gateway"
        if not prefill.reachable or prefill.absent:
            cause = "not_submitted" if prefill.reachable else "worker_lost"
            self._verdicts.retry(request, cause)
            return cause
        decode.hold(self._dispatcher)  # goes on when the prefill side's report comes, or is among its finals
        return "adopted"

    def _reconcile(self, worker: Worker, inventory: pb.Inventory) -> None:
        self._attempts.reconcile(worker, inventory, undecided=self._undecided)

    def _replay(self) -> None:
        held, self._held = self._held, []
        for worker, kind, report in held:
            self.worker_reported(worker, kind, report)

    def inventory_of(self, ref: WorkerRef) -> tuple[Worker | None, pb.Inventory | None]:
        """Return this life of a worker and its first Inventory of the term; None where there is none."""
        worker = self._registry.get(ref.worker_id, ref.epoch)
        return worker, self._inventories.get(worker) if worker is not None else None


class _Side:
    """The parts of one recorded attempt on one worker, as the worker's Inventory shows them."""

    def __init__(self, request: Request, ref: WorkerRef, phase: Phase, takeover: Takeover) -> None:
        self.worker, inventory = takeover.inventory_of(ref)
        self.reachable = inventory is not None
        self._request = request
        self._phase = phase
        self.finals: list[pb.Final] = []
        self._running: set[int] = set()
        if inventory is not None:
            self.finals = [f for f in inventory.finals if self._is_mine(f.id, f.phase)]
            self._running = {r.id.sample for r in inventory.running if self._is_mine(r.id, r.phase)}
        present = self._running | {f.id.sample for f in self.finals}
        samples = request.samples
        if phase is Phase.PREFILL and request.hand_off_now is HandOff.STORE:
            samples = samples[:1]  # one prompt in the store is enough for all
        self._samples = samples
        self.absent = len(present) < len(samples)
        self.all_final = len(self.finals) >= len(samples) and not any(
            not FINISH_FROM_PB[f.reason].complete for f in self.finals
        )

    def _is_mine(self, name: pb.AttemptId, phase: pb.Phase) -> bool:
        return (
            name.rid == self._request.rid_bytes
            and name.attempt == self._request.attempt
            and PHASE_FROM_PB.get(phase) is self._phase
        )

    def enter(self, dispatcher: Dispatcher) -> None:
        """Add the parts to the request; those of an unreachable worker as lost, for it may come back."""
        if self.worker is None:
            return
        for sample in self._samples:
            part = Part(self.worker, self._phase, sample, PartState.LOST)
            self._request.parts[self._phase, sample] = part
            if sample in self._running:
                part.state = PartState.ACCEPTED
                dispatcher.charge(self._request, part)
            elif self.reachable:
                part.state = PartState.SENT
        if self.worker not in self._request.workers:
            self._request.workers.append(self.worker)

    def hold(self, dispatcher: Dispatcher) -> None:
        """Keep back what was not submitted yet."""
        for part in self._request.side(self._phase):
            if part.state is PartState.SENT:
                part.state = PartState.HELD
                dispatcher.charge(self._request, part)


def _rid_of(kind: str | None, report: pb.ControlReport) -> str:
    if kind in ("accepted", "rejected", "prefill_done", "final", "delivered"):
        return rid_from_bytes(getattr(report, kind).id.rid)
    return ""
