"""Batch lines that give way on unified workers: policy.yielding in production.

1. An interactive request finds no room, or would be late: `make_room` aborts as few batch lines as give it room. The
   worker drops them with its next step, and the request is placed when their Final frees the room.
2. The line's worker ends it as aborted. The gateway is asked as after any loss, and answers with the tokens it has.
3. `Retries` queues the line again: without spending the budget for losses, and on any worker.
"""

import time
from collections.abc import Callable

import structlog

from contracts.continuation import forbidden_by
from contracts.lifecycle import Phase, RequestState
from observability.metrics import Instruments
from scheduler.book import Book, Request
from scheduler.policy.cluster import ClusterView
from scheduler.policy.scoring import NotScored, Scored
from scheduler.policy.turns import BATCH_TIER
from scheduler.policy.yielding import Line, YieldLimits, who_yields, without
from scheduler.registry import WorkerRegistry
from scheduler.submits import abort

log = structlog.get_logger()

YIELDED = "yielded"
_LOOK_APART_S = 0.01


class Yields:
    """Sends batch lines of one pool away during one term."""

    def __init__(
        self,
        pool: str,
        *,
        book: Book,
        registry: WorkerRegistry,
        instruments: Instruments,
        limits: YieldLimits | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._book = book
        self._registry = registry
        self._instruments = instruments
        self._limits = limits or YieldLimits()
        self._now_s = now_s
        self._running: dict[str, Request] = {}  # batch lines placed on unified workers, by rid
        self._next_look_s = 0.0
        self._answer = False  # of the last look

    def placed(self, request: Request) -> None:
        """Take that a request was given to workers."""
        if request.tier == BATCH_TIER and request.prefill_ref is None:
            self._running[request.rid] = request

    def make_room(
        self, request: Request, cluster: ClusterView, place: Callable[[ClusterView], Scored | NotScored]
    ) -> bool:
        """Send away the batch lines in whose place a request would run; return whether room is on its way.

        Args:
            request: interactive, without room or late where it has some.
            cluster: the workers as they are.
            place: where the request goes in a cluster.
        """
        if request.tier == BATCH_TIER or not self._running:
            return False
        now_s = self._now_s()
        if now_s < self._next_look_s:
            return self._answer
        self._next_look_s = now_s + _LOOK_APART_S
        lines, leaving = self._lines()
        ttft_ms = request.submit.owner.slo.ttft_ms

        def fits(view: ClusterView) -> str | None:
            found = place(view)
            if isinstance(found, NotScored) or found.prefill is not None:
                return None
            late = ttft_ms is not None and found.predicted_ttft_ms > ttft_ms
            return None if late else found.decode.worker_id

        chosen = who_yields(cluster, lines, leaving, fits)
        for line in chosen:
            self._send_away(self._running[line.request])
        self._answer = bool(chosen) or (bool(leaving) and fits(without(cluster, leaving)) is not None)
        return self._answer

    def _send_away(self, request: Request) -> None:
        request.yielding = True
        request.num_yields += 1
        self._instruments.retries.add(1, {"pool": self._pool, "cause": YIELDED})
        log.info("batch_yields", pool=self._pool, rid=request.rid, attempt=request.attempt)
        for worker in {
            part.worker.worker_id: part.worker for part in request.parts.values() if not part.ended
        }.values():
            self._registry.send(worker, abort(request, YIELDED))

    def _lines(self) -> tuple[list[Line], list[Line]]:
        """Return what may be sent away, and what was and is still counted."""
        lines: list[Line] = []
        leaving: list[Line] = []
        for request in list(self._running.values()):
            part = next(request.side(Phase.UNIFIED), None)
            gone = request.rid not in self._book or request.state is not RequestState.DECODING
            if part is None or gone or request.decode_ended:
                if not request.placing and (gone or request.decode_ended):
                    del self._running[request.rid]
                continue
            charges = [part.worker.charges.get(request.key(sample)) for sample in request.samples]
            held = [charge for charge in charges if charge is not None]
            line = Line(
                request=request.rid,
                worker_id=part.worker.worker_id,
                num_requests=len(held),
                kv_tokens=sum(charge.kv_tokens for charge in held),
                decoding_kv_tokens=sum(charge.decoding_kv_tokens for charge in held),
                queued_prefill_tokens=sum(charge.prefill_tokens for charge in held),
                since_ms=request.placed_ms,
            )
            if request.yielding:
                leaving.append(line)
            elif request.num_yields < self._limits.most_yields and _goes_on(request):
                lines.append(line)
        return lines, leaving


def _goes_on(request: Request) -> bool:
    """Whether the line can run on elsewhere after any token."""
    submit = request.submit
    return not request.stop_requested and not forbidden_by(
        submit.sampling, submit.parsing, num_samples=submit.num_samples, num_delivered=0
    )
