"""What workers say about running attempts, and what follows from it.

The rule of retries (PROTOCOL, one owner at a time): until the first PrefillDone of a pair nothing can have
reached the gateway, so the scheduler tries again by itself. From then on, and always on a unified worker,
the gateway is asked: it alone knows whether it accepted a token.
"""

import time
from collections.abc import Callable, Container

import structlog

from contracts.errors import Interrupted
from contracts.identity import rid_from_bytes
from contracts.lifecycle import FinishReason, HandOff, Phase, RequestState
from contracts.perf import LatencyModel
from contracts.v1 import worker_pb2 as pb
from contracts.wire import PHASE_FROM_PB, counts_from_pb, stages_from_pb
from scheduler.book import Book, Part, PartState, Request
from scheduler.dispatch import Dispatcher
from scheduler.handoff import HandOffTimers
from scheduler.links import Links
from scheduler.registry import WorkerRegistry
from scheduler.retries import Retries
from scheduler.verdicts import Verdicts
from scheduler.waiting import WaitingQueue
from scheduler.worker import ChargeKey, Worker

log = structlog.get_logger()


class Attempts:
    """Follows the attempts of one term."""

    def __init__(
        self,
        pool: str,
        *,
        book: Book,
        waiting: WaitingQueue,
        dispatcher: Dispatcher,
        verdicts: Verdicts,
        registry: WorkerRegistry,
        hand_offs: HandOffTimers,
        retries: Retries,
        links: Links,
        latency: Callable[[], LatencyModel],
        stale_leader: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._book = book
        self._waiting = waiting
        self._dispatcher = dispatcher
        self._verdicts = verdicts
        self._registry = registry
        self._hand_offs = hand_offs
        self._retries = retries
        self._links = links
        self._latency = latency
        self._stale_leader = stale_leader
        self._now_s = now_s
        self.caught_up = False
        """Whether every pending entry is in the book, so that an unknown request is a settled one."""

    # -- what the registry hears --------------------------------------------------------------------

    def capacity_changed(self) -> None:
        """Try those who wait."""
        self._waiting.stir()

    def worker_reported(self, worker: Worker, kind: str | None, report: pb.ControlReport) -> None:
        """Take one report about an attempt. `kind` is the name of its set field."""
        match kind:
            case "accepted":
                self._accepted(worker, report.accepted)
            case "rejected":
                self._rejected(worker, report.rejected)
            case "prefill_done":
                self._prefill_done(worker, report.prefill_done)
            case "final":
                self.final(worker, report.final)
            case "delivered":
                self._delivered(worker, report.delivered)
            case _:
                pass  # a newer worker's report, or a role change, which nobody here asked for

    def worker_lost(self, worker: Worker) -> None:
        """Every part on the worker is lost."""
        for rid, attempt, _ in list(worker.charges):
            request = self._book.find(rid)
            if request is None or request.attempt != attempt:
                continue
            lost = [part for part in request.parts.values() if part.worker is worker and not part.ended]
            for part in lost:
                part.state = PartState.LOST
            if lost and not request.placing:
                self._parts_lost(request, lost, "worker_lost")

    # -- inventories -------------------------------------------------------------------------------

    def reconcile(self, worker: Worker, inventory: pb.Inventory, *, undecided: Container[str] = ()) -> None:
        """Adopt, abort or count as lost whatever differs between worker and book.

        `undecided`: requests that a take-over has still to decide; they are left alone.
        """
        for running in inventory.running:
            self._still_running(worker, running, undecided)
        for final in inventory.finals:
            if rid_from_bytes(final.id.rid) not in undecided:
                self.final(worker, final)
        present = {_names(running.id) for running in inventory.running}
        present |= {_names(final.id) for final in inventory.finals}
        for key in worker.charges.keys() - present:
            rid, attempt, sample = key
            request = self._book.find(rid)
            is_current = request is not None and request.attempt == attempt
            if request is not None and is_current and request.unknown_to(worker, sample):
                continue
            worker.release(key)
            if request is None or request.attempt != attempt:
                continue
            gone = [p for p in request.parts.values() if p.worker is worker and p.sample == sample and not p.ended]
            for part in gone:
                self._never_arrived(request, part)

    def _still_running(self, worker: Worker, running: pb.Running, undecided: Container[str]) -> None:
        request, part = self._find(worker, running.id, running.phase)
        if request is not None and part is not None:
            if part.state in (PartState.SENT, PartState.LOST):
                part.state = PartState.ACCEPTED
                request.asked_gateway = False
                self._dispatcher.charge(request, part)
            if request.terminal or request.stop_requested:
                self._verdicts.stop_parts(request, "ended")
        elif rid_from_bytes(running.id.rid) not in undecided:
            self._registry.send(worker, pb.ControlCommand(abort=pb.Abort(id=running.id, reason="orphan")))

    def _never_arrived(self, request: Request, part: Part) -> None:
        """A submit got lost with the stream it was on: the worker never ran it, so nothing was streamed."""
        was_sent_only = part.state is PartState.SENT
        part.state = PartState.LOST
        if was_sent_only:
            self._verdicts.retry(request, "submit_lost")
        else:
            self._parts_lost(request, [part], "worker_forgot")

    # -- reports -----------------------------------------------------------------------------------

    def _find(self, worker: Worker, name: pb.AttemptId, phase: pb.Phase) -> tuple[Request | None, Part | None]:
        """Return the request and, if the message is about its current attempt on this worker, the part."""
        request = self._book.find(name.rid)
        if request is None or request.attempt != name.attempt:
            return request, None
        known = PHASE_FROM_PB.get(phase)
        part = request.parts.get((known, name.sample)) if known is not None else None
        if part is None or part.worker is not worker:
            return request, None
        return request, part

    def _accepted(self, worker: Worker, message: pb.Accepted) -> None:
        request, part = self._find(worker, message.id, message.phase)
        if part is None:
            if request is not None and message.id.attempt < request.attempt:
                self._registry.send(worker, pb.ControlCommand(abort=pb.Abort(id=message.id, reason="superseded")))
        elif part.state is PartState.SENT:
            part.state = PartState.ACCEPTED

    def _rejected(self, worker: Worker, message: pb.Rejected) -> None:
        worker.release(_names(message.id))
        if message.code == "stale_leader":
            log.warning("stale_leader", pool=self._pool, worker_id=worker.worker_id)
            self._stale_leader()
            return
        request, part = self._find(worker, message.id, message.phase)
        if message.code != "bad_request":
            worker.rejecting = True
            worker.touch()
        if request is None or part is None or part.ended:
            return
        part.state = PartState.LOST
        log.info(
            "rejected",
            pool=self._pool,
            rid=request.rid,
            attempt=request.attempt,
            worker_id=worker.worker_id,
            phase=part.phase,
            code=message.code,
            message=message.message,
        )
        if message.code == "bad_request":
            self._verdicts.stop_parts(request, "rejected")
            self._verdicts.refuse_bad(request, message.message or "The worker cannot run this request.")
        elif not request.terminal:
            self._verdicts.retry(request, f"rejected_{message.code}", announce=False)
            self._verdicts.end_if_stopped(request)

    def _prefill_done(self, worker: Worker, message: pb.PrefillDone) -> None:
        worker.prefill_computed(_names(message.id))
        self._waiting.stir()  # the worker may take another prompt
        request, part = self._find(worker, message.id, pb.PHASE_PREFILL)
        if request is None or part is None or part.ended:
            return
        part.state = PartState.COMPUTED
        part.counts = counts_from_pb(message.counts)
        part.stages = stages_from_pb(message.stages)
        if part.sample == request.samples[0]:
            self._retries.computed(request, part.counts)
        if not request.terminal:
            self._prefilled(request)
            if request.hand_off_now is HandOff.DIRECT:
                self._hand_offs.start(request, worker, self._now_s())
            else:
                self._dispatcher.prompt_stored(request)

    def _prefilled(self, request: Request) -> None:
        if request.state is RequestState.PREFILLING:
            request.move(RequestState.DECODING)

    def final(self, worker: Worker, message: pb.Final) -> None:
        """Take the last word on one engine request."""
        if worker.release(_names(message.id)):
            self._waiting.stir()
        request, part = self._find(worker, message.id, message.phase)
        if request is None:
            if self.caught_up:
                self._verdicts.settled(worker, message.id.rid)
            return
        if part is None or part.state is PartState.FINAL:
            return
        part.finish(message)
        assert part.reason is not None
        if part.phase is Phase.UNIFIED and part.counts is not None and part.sample == request.samples[0]:
            self._retries.computed(request, part.counts)
        if part.phase is Phase.PREFILL and part.reason.complete:
            self._handed_over(request, part)
        if request.terminal:
            return
        if part.phase is Phase.PREFILL:
            self._prefill_ended(request, part, part.reason)
        else:
            self._stream_ended(request, part, part.reason)
        self._verdicts.end_if_stopped(request)

    def _prefill_ended(self, request: Request, part: Part, reason: FinishReason) -> None:
        if reason.complete:
            self._prefilled(request)
            if request.hand_off_now is HandOff.STORE:
                self._dispatcher.prompt_stored(request)
            elif all(p.ended for p in request.side(Phase.PREFILL)):
                self._hand_offs.stop(request)
        elif request.decode_ended:
            pass
        elif request.hand_off_now is HandOff.STORE:
            self._stored_prefill_broke_off(request, part, reason)
        elif reason is FinishReason.HAND_OFF or (
            reason is FinishReason.ERROR and request.state is RequestState.DECODING
        ):
            self.hand_off_failed(request, reason)
        elif reason is FinishReason.ERROR:
            log.warning("engine_failed", rid=request.rid, worker_id=part.worker.worker_id, error=part.error)
            self._verdicts.retry(request, "engine_error", exclude=[part.worker.worker_id])
        # ABORTED, READER_LOST, DEADLINE: the decode side ends for the same cause and says so.

    def _handed_over(self, request: Request, part: Part) -> None:
        """Count the time of a hand-off for its link. A short answer may be over before its prompt is."""
        if request.hand_off_now is not HandOff.DIRECT or not part.stages.transfer_ms:
            return
        expected_ms = self._latency().transfer.ms(request.input_tokens)
        for decode in request.streaming_parts:
            if decode.sample == part.sample:
                self._links.handed_over(part.worker, decode.worker, ms=part.stages.transfer_ms, expected_ms=expected_ms)

    def _stored_prefill_broke_off(self, request: Request, part: Part, reason: FinishReason) -> None:
        """The decode side, which runs on its own with the store, hears of the request only when its prompt is done."""
        if request.state is not RequestState.PREFILLING or request.stop_requested or reason is FinishReason.DEADLINE:
            return  # it decodes already, or its gateway ends it
        log.warning("prefill_broke_off", rid=request.rid, worker_id=part.worker.worker_id, reason=reason)
        self._verdicts.retry(request, f"prefill_{reason}", exclude=[part.worker.worker_id])

    def _stream_ended(self, request: Request, part: Part, reason: FinishReason) -> None:
        if reason is FinishReason.HAND_OFF:
            self.hand_off_failed(request, reason)
        elif reason is FinishReason.ERROR:
            log.warning("engine_failed", rid=request.rid, worker_id=part.worker.worker_id, error=part.error)
            self._parts_lost(request, [part], "engine_error")
        elif reason.complete or reason is FinishReason.DEADLINE or request.stop_requested:
            self._finish_if_all_ended(request)
        else:
            # ABORTED or READER_LOST that nobody announced to us: the client may have left, or the worker is
            # stopping. The gateway knows which.
            self._hand_offs.stop(request)
            self._verdicts.ask_gateway(request, reason.value)

    def _finish_if_all_ended(self, request: Request) -> None:
        if not request.decode_ended:
            return
        self._hand_offs.stop(request)
        complete = all(p.reason is not None and p.reason.complete for p in request.streaming_parts)
        request.move(RequestState.FINISHED if complete else RequestState.ABORTED)
        request.ended_s = self._now_s()
        self._verdicts.generated(request, complete=complete)

    def _delivered(self, worker: Worker, message: pb.Delivered) -> None:
        _, part = self._find(worker, message.id, message.phase)
        if part is not None:
            part.delivered = True

    # -- faults ------------------------------------------------------------------------------------

    def _parts_lost(self, request: Request, lost: list[Part], cause: str) -> None:
        """Decide what becomes of a request some of whose parts are gone."""
        if request.terminal:
            return
        if request.stop_requested:
            self._verdicts.end_if_stopped(request)
            return
        stream_lost = any(part.phase is not Phase.PREFILL for part in lost)
        if request.state is RequestState.PREFILLING:
            self._verdicts.retry(request, cause, exclude={part.worker.worker_id for part in lost})
        elif stream_lost and request.state is RequestState.DECODING:
            self._hand_offs.stop(request)
            self._verdicts.ask_gateway(request, cause)
        # A prefill worker lost after its PrefillDone: the decode side may have the KV cache. It says HAND_OFF
        # if not, and the hand-off timer asks the gateway if it says nothing.

    def hand_off_failed(self, request: Request, reason: str) -> None:
        """End both sides and try once elsewhere, within the budget: the decode side never got its KV cache."""
        self._hand_offs.stop(request)
        if request.terminal:
            return
        if request.stop_requested:  # the other side was aborted: this one could not get its KV cache
            self._verdicts.stop_parts(request, reason)
            self._verdicts.end_if_stopped(request)
            return
        if len(request.samples) > 1 and request.state is RequestState.DECODING:
            self._verdicts.ask_gateway(request, "hand_off")  # other samples may be streaming
            return
        if request.hand_off_retries >= 1 or not self._retries.affordable(request, "hand_off"):
            self._verdicts.refuse(
                request, Interrupted.code, "The KV cache could not be handed from prefill to decode.", "hand_off"
            )
            return
        request.hand_off_retries += 1
        pair = {part.worker.worker_id for part in request.parts.values()}
        for prefill in request.side(Phase.PREFILL):
            for decode in request.streaming_parts:
                self._links.failed(prefill.worker, decode.worker, reason)
        log.warning("hand_off_failed", pool=self._pool, rid=request.rid, workers=sorted(pair), reason=reason)
        self._verdicts.retry(request, "hand_off", exclude=pair)

    def watch_hand_off(self, request: Request) -> None:
        """Start the timer of an adopted request whose prefill worker is gone."""
        self._hand_offs.start(request, None, self._now_s())

    def tick(self) -> None:
        """Act on hand-offs that took too long."""
        for request in self._hand_offs.due(self._now_s()):
            if request.rid not in self._book:
                continue
            if all(part.state is PartState.LOST for part in request.side(Phase.PREFILL)):
                self._verdicts.ask_gateway(request, "hand_off_unknown")
            else:
                self.hand_off_failed(request, "timer")


def _names(name: pb.AttemptId) -> ChargeKey:
    return name.rid, name.attempt, name.sample
