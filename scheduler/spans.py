"""The scheduler's span of a sampled request: from the inbox to a placement, with its reason."""

from observability.tracing import TraceContext, Tracer, child_id, read
from scheduler.book import Request


class Spans:
    """Emits one span for each placement."""

    def __init__(self, tracer: Tracer, *, pool: str) -> None:
        self._tracer = tracer
        self._pool = pool

    def placed(self, request: Request, *, now_unix_ms: float) -> None:
        """Emit the placement of a request's current attempt; nothing unless its trace is sampled."""
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
