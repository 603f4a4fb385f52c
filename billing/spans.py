"""Billing's span of a sampled request: its usage event is in the database and in the ledger."""

import time
from collections.abc import Sequence

from billing.consumer import UsageSink
from billing.events import Poison, Rated
from observability.tracing import TraceContext, Tracer, child_id, read


class TracedUsageSink:
    """A usage sink that emits one span for each sampled request that it wrote."""

    def __init__(self, sink: UsageSink, tracer: Tracer) -> None:
        self._sink = sink
        self._tracer = tracer

    async def prepare(self, raws: Sequence[bytes]) -> list[Rated | Poison]:
        """Return what each entry becomes, in order."""
        return await self._sink.prepare(raws)

    async def write(self, things: Sequence[Rated]) -> int:
        """Write all in one transaction; return how many were not there before."""
        started_ms = time.time() * 1000
        written = await self._sink.write(things)
        if self._tracer.enabled:
            ended_ms = time.time() * 1000
            for rated in things:
                if rated.event.traceparent:
                    self._emit(rated, started_ms, ended_ms, batch=len(things))
        return written

    def _emit(self, rated: Rated, started_ms: float, ended_ms: float, *, batch: int) -> None:
        request = read(rated.event.traceparent)
        if request is None or not request.sampled:
            return
        self._tracer.emit(
            "bill",
            TraceContext(trace_id=request.trace_id, span_id=child_id(request, "bill"), sampled=True),
            parent_id=request.span_id,
            start_unix_ms=started_ms,
            end_unix_ms=ended_ms,
            attributes={
                "pdgate.request.id": rated.event.rid,
                "pdgate.cost_nano": rated.cost,
                "pdgate.billable": rated.billable,
                "pdgate.batch_size": batch,
            },
        )
