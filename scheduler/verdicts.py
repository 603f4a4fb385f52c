"""What becomes of a request after a fault, and every end that is not its answer's.

`retry` queues another attempt, `ask_gateway` lets the gateway decide, `refuse` and `abort` end a request,
`forget` drops it once it is settled. Each tells the workers and the gateway what they must know.
"""

import time
from collections.abc import Callable, Iterable

import structlog

from contracts.errors import BadRequest, ContextTooLong, DeadlineExceeded, Interrupted, NoCapacity, RateLimited
from contracts.lifecycle import RequestState, Role
from contracts.v1 import worker_pb2 as pb
from contracts.wire import AttemptLost, Refused, RequestOutcome
from observability.metrics import Instruments
from scheduler.book import Book, PartState, Request
from scheduler.helm import Helm
from scheduler.outbox import Outbox
from scheduler.policy.admission import QueueView, Refusal, retry_after_s
from scheduler.policy.cluster import Limits
from scheduler.registry import WorkerRegistry
from scheduler.submits import abort
from scheduler.waiting import WaitingQueue
from scheduler.worker import Worker

log = structlog.get_logger()

_REFUSAL_CODE = {
    Refusal.QUEUE_FULL: NoCapacity.code,
    Refusal.NO_WORKER: NoCapacity.code,
    Refusal.DEADLINE: DeadlineExceeded.code,
    Refusal.TOO_LONG: ContextTooLong.code,
    Refusal.TENANT_SHARE: RateLimited.code,
    Refusal.OVERLOADED: NoCapacity.code,
    Refusal.SHED: NoCapacity.code,
    Refusal.UNAVAILABLE: NoCapacity.code,
}
_REFUSAL_TEXT = {
    Refusal.QUEUE_FULL: "Too many requests are waiting for this model. Try again shortly.",
    Refusal.NO_WORKER: "No worker serves this model at the moment. Try again shortly.",
    Refusal.DEADLINE: "The request's deadline passed before a worker was free.",
    Refusal.TOO_LONG: "The prompt and the tokens asked for fit no worker of this model.",
    Refusal.TENANT_SHARE: "Too many of your requests are waiting for this model. Send fewer at once.",
    Refusal.OVERLOADED: "What waits for this model already takes longer than the request's deadline. Try again later.",
    Refusal.SHED: "This model is short of capacity, and requests of this service tier give way. Try again later.",
    Refusal.UNAVAILABLE: "This model is overloaded. Try again later.",
}
_WAIT_HELPS_NOT = (Refusal.DEADLINE, Refusal.TOO_LONG)


class Verdicts:
    """Decides about requests of one pool during one term."""

    def __init__(
        self,
        pool: str,
        *,
        book: Book,
        waiting: WaitingQueue,
        registry: WorkerRegistry,
        outbox: Outbox,
        helm: Helm,
        limits: Limits,
        instruments: Instruments,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._book = book
        self._waiting = waiting
        self._registry = registry
        self._outbox = outbox
        self._helm = helm
        self._limits = limits
        self._instruments = instruments
        self._now_s = now_s
        self._settled: dict[str, tuple[Worker, list[bytes]]] = {}

    # -- after a fault -----------------------------------------------------------------------------

    def retry(self, request: Request, cause: str, *, exclude: Iterable[str] = (), announce: bool = True) -> None:
        """Give up the current attempt and queue another one. `announce`: the gateway hears AttemptLost."""
        if request.delivered is None:  # a former leader continued it: only the gateway knows from where
            self.ask_gateway(request, cause)
            return
        self.stop_parts(request, cause)
        if request.stop_requested or request.terminal:
            return
        request.excluded.update(exclude)
        request.asked_gateway = False
        yielded, request.yielding = request.yielding, False
        if request.attempt >= self._limits.max_attempts + request.num_yields:
            self.refuse(
                request, Interrupted.code, f"{request.attempt} attempts failed, the last one by {cause}.", cause
            )
            return
        log.info("retrying", pool=self._pool, rid=request.rid, attempt=request.attempt, cause=cause)
        if not yielded:
            self._instruments.retries.add(1, {"pool": self._pool, "cause": cause})
        if announce:
            self._outbox.notify(
                request.submit.gateway_id,
                AttemptLost(rid=request.rid, attempt=request.attempt, cause=cause, retrying=True),
            )
        request.parts = {}  # what is still heard of them is about a past attempt
        if request.state is not RequestState.QUEUED:
            request.move(RequestState.QUEUED)
        self._waiting.push(request, self._now_s())

    def ask_gateway(self, request: Request, cause: str) -> None:
        """Tell the gateway that the attempt is lost; it knows whether a token was accepted, so it decides."""
        if request.asked_gateway or request.stop_requested or request.terminal:
            return
        request.asked_gateway = True
        log.info("attempt_lost", pool=self._pool, rid=request.rid, attempt=request.attempt, cause=cause)
        self._outbox.notify(
            request.submit.gateway_id,
            AttemptLost(rid=request.rid, attempt=request.attempt, cause=cause, retrying=False),
        )

    # -- ends --------------------------------------------------------------------------------------

    def abort(self, rid: str, reason: str) -> None:
        """Stop a request for its gateway, in whatever state it is."""
        request = self._book.get(rid)
        if request is None or request.stop_requested:
            return
        request.stop_requested = True
        if request.terminal:
            return
        if request.state is RequestState.QUEUED:
            self._waiting.remove(request)
            request.move(RequestState.ABORTED)
            request.ended_s = self._now_s()
            self._outbox.notify(
                request.submit.gateway_id,
                Refused(rid=rid, code=Interrupted.code, message="aborted before placement"),
            )
        else:
            self.stop_parts(request, reason)
            self.end_if_stopped(request)

    def generated(self, request: Request, *, complete: bool) -> None:
        """Take that no worker makes tokens for a request any more; only its settlement is missing."""
        self._helm.generated(request, complete=complete)

    def end_if_stopped(self, request: Request) -> None:
        """A request that must not be tried again ends with its last part."""
        if request.stop_requested and not request.terminal and request.ended:
            request.move(RequestState.ABORTED)
            request.ended_s = self._now_s()

    def give_up(self, request: Request, reason: str) -> None:
        """Stop waiting for the last words of a request's workers."""
        self.stop_parts(request, reason)
        for part in request.parts.values():
            if not part.ended:
                part.state = PartState.LOST

    def refuse_for(self, request: Request, why: Refusal) -> None:
        """Refuse by policy."""
        after_s = None if why in _WAIT_HELPS_NOT else retry_after_s(self.queue_for(request), self._limits)
        if after_s is not None:
            after_s = max(after_s, self._helm.retry_after_s())
        self.refuse(
            request,
            _REFUSAL_CODE[why],
            _REFUSAL_TEXT[why],
            why,
            retry_after_s=after_s,
            for_capacity=why.for_capacity,
        )

    def queue_for(self, request: Request) -> QueueView:
        """Return the queue as a newcomer finds it."""
        tenant = request.submit.owner.org
        own = self._waiting.num_of(tenant)
        workers = self._registry.workers()
        return QueueView(
            num_waiting=len(self._waiting),
            num_of_tenant=own,
            num_tenants=self._waiting.num_tenants + (own == 0),
            work_ms=self._waiting.work_ms,
            num_computing=sum(1 for worker in workers if worker.ready and worker.role is not Role.DECODE),
        )

    def refuse_bad(self, request: Request, message: str) -> None:
        """Refuse what no worker will ever take."""
        self.refuse(request, BadRequest.code, message, "bad_request")

    def refuse(
        self,
        request: Request,
        code: str,
        message: str,
        reason: str,
        *,
        retry_after_s: float | None = None,
        for_capacity: bool = False,
    ) -> None:
        """End a request as FAILED; its gateway answers the client and settles."""
        if request.terminal:
            return
        self._waiting.remove(request)
        self.stop_parts(request, reason)
        request.move(RequestState.FAILED)
        request.ended_s = self._now_s()
        self._outbox.notify(
            request.submit.gateway_id,
            Refused(rid=request.rid, code=code, message=message, retry_after_s=retry_after_s),
        )
        self._helm.refused(request, reason, retry_after_s=retry_after_s, for_capacity=for_capacity)
        self._instruments.refusals.add(1, {"pool": self._pool, "reason": reason})
        log.info("refused", pool=self._pool, rid=request.rid, attempt=request.attempt, code=code, reason=reason)

    def stop_parts(self, request: Request, reason: str) -> None:
        """Abort whatever workers still run of the current attempt."""
        if request.placing:
            return
        for part in request.parts.values():
            if part.state is PartState.HELD:
                part.state = PartState.LOST
                part.worker.release(request.key(part.sample))
        running = {part.worker.worker_id: part.worker for part in request.parts.values() if not part.ended}
        for worker in running.values():
            self._registry.send(worker, abort(request, reason))

    def forget(self, rid: str, outcome: RequestOutcome | None = None) -> None:
        """Drop a settled request; its workers may drop their counts."""
        request = self._book.remove(rid)
        if request is None:
            return
        self._helm.ended(request, outcome)
        self._waiting.remove(request)
        self.stop_parts(request, "settled")
        if request.attempt > 1 or request.claimed or request.state is RequestState.QUEUED:
            self._outbox.delete_record(rid)  # the settler may have deleted an older one, or none as yet
        for worker in request.workers:
            self.settled(worker, request.rid_bytes)

    def settled(self, worker: Worker, rid: bytes) -> None:
        """Let a worker forget a request's counts, with the next tick."""
        self._settled.setdefault(worker.worker_id, (worker, []))[1].append(rid)

    def tick(self) -> None:
        """Tell workers what is settled."""
        settled, self._settled = self._settled, {}
        for worker, rids in settled.values():
            for rid in rids:
                self._registry.send(worker, pb.ControlCommand(settled=pb.Settled(rid=rid)))
