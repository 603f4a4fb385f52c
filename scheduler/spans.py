"""The scheduler's span of a sampled request: from the inbox to a placement, with its reason."""

from observability.tracing import TraceContext, Tracer, child_id, read
from scheduler.book import Request
from scheduler.boot import Boot


class Spans:
    """Emits one span for each placement."""

    def __init__(self, tracer: Tracer, *, pool: str) -> None:
        self._tracer = tracer
        self._pool = pool

    def placed(self, request: Request, *, now_unix_ms: float, cold: Boot | None = None) -> None:
        """Emit the placement of a request's current attempt; nothing unless its trace is sampled.

        `cold`: the start that last woke the pool. If the request waited for it, its parts become spans, too.
        """
        if not self._tracer.enabled or not request.submit.owner.traceparent:
            return
        context = read(request.submit.owner.traceparent)
        if context is None or not context.sampled:
            return
        decode, prefill = request.decode_ref, request.prefill_ref
        self._tracer.emit(
            "schedule",
            TraceContext(
                trace_id=context.trace_id, span_id=child_id(context, f"schedule-{request.attempt}"), sampled=True
            ),
            parent_id=context.span_id,
            start_unix_ms=float(request.entry_id.partition(b"-")[0]) if request.attempt == 1 else now_unix_ms,
            end_unix_ms=now_unix_ms,
            attributes={
                "pdgate.request.id": request.rid,
                "pdgate.attempt": request.attempt,
                "pdgate.pool": self._pool,
                "pdgate.tier": request.submit.owner.tier,
                "pdgate.path": request.path,
                "pdgate.placement.reason": request.reason,
                "pdgate.worker.decode": decode.worker_id if decode is not None else None,
                "pdgate.worker.prefill": prefill.worker_id if prefill is not None else None,
            },
        )
        entered_unix_ms = float(request.entry_id.partition(b"-")[0])
        if cold is not None and request.attempt == 1 and entered_unix_ms < cold.ready_unix_ms:
            self._cold_start(context, cold)

    def _cold_start(self, context: TraceContext, cold: Boot) -> None:
        """Emit the parts of a start that a request waited for, as siblings of its placement."""
        for phase, began_unix_ms, ended_unix_ms in cold.parts:
            name = f"cold_start_{phase}"
            self._tracer.emit(
                name,
                TraceContext(trace_id=context.trace_id, span_id=child_id(context, name), sampled=True),
                parent_id=context.span_id,
                start_unix_ms=began_unix_ms,
                end_unix_ms=ended_unix_ms,
                attributes={"pdgate.pool": self._pool, "pdgate.worker": cold.worker_id},
            )
