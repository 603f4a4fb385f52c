"""The trace of a request: begun at arrival, emitted when the request is settled."""

from typing import Final

from contracts.identity import at_ms
from contracts.rating import Meter
from contracts.slo import Timings
from contracts.usage import Outcome
from gateway.terms import Closed
from observability.tracing import Ratios, SpanKind, TraceContext, Tracer, begin, child_id, read

_FAILED: Final = frozenset({Outcome.INTERRUPTED, Outcome.LOST})


class Traces:
    """Decides which requests are traced, and emits the gateway's spans."""

    def __init__(self, tracer: Tracer, ratios: Ratios) -> None:
        self._tracer = tracer
        self._ratios = ratios

    def begin(self, traceparent: str, tier: str) -> tuple[str, str]:
        """Return the traceparent of a new request and the id of the caller's span, both empty when not traced.

        Args:
            traceparent: the caller's, W3C form or anything else.
            tier: of the request; decides how often a trace of our own is sampled.
        """
        if not self._tracer.enabled:
            return "", ""
        parent = read(traceparent)
        own = begin(parent, ratio=self._ratios.of(tier))
        return own.traceparent, f"{parent.span_id:016x}" if parent is not None else ""

    def ended(self, closed: Closed) -> str:
        """Emit what this gateway knows of a settled request; return its trace id, empty when it is not kept.

        A request that was not sampled is kept when it failed or missed its targets.
        """
        event = closed.event
        own = read(event.traceparent) if event.traceparent else None
        if own is None or not self._tracer.enabled:
            return ""
        failed = event.outcome in _FAILED
        if not (own.sampled or failed or event.slo_met is False):
            return ""
        began_ms = float(at_ms(event.rid))
        timings = event.timings
        self._tracer.emit(
            f"chat {event.model}",
            own,
            parent_id=int(event.trace_parent_id, 16) if event.trace_parent_id else None,
            start_unix_ms=began_ms,
            end_unix_ms=began_ms + timings.total_ms if timings is not None else closed.ended_unix_ms,
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "pdgate",
                "gen_ai.request.model": event.model,
                "gen_ai.response.finish_reasons": event.finish_reason or None,
                "gen_ai.usage.input_tokens": event.tokens.prompt,
                "gen_ai.usage.output_tokens": event.tokens.decode,
                "gen_ai.usage.cache_read.input_tokens": event.tokens.of(Meter.PREFILL_CACHED),
                "pdgate.request.id": event.rid,
                "pdgate.organisation.id": event.org,
                "pdgate.project.id": event.project,
                "pdgate.tier": event.tier,
                "pdgate.path": event.path,
                "pdgate.hand_off": event.hand_off,
                "pdgate.attempts": event.attempts,
                "pdgate.outcome": event.outcome.value,
                "pdgate.cause": event.cause or None,
                "pdgate.slo.met": event.slo_met,
                "pdgate.slo.phase_blamed": closed.phase_blamed,
                "pdgate.ttft_ms": timings.ttft_ms if timings is not None else None,
                "pdgate.tpot_ms": timings.tpot_ms if timings is not None else None,
                "pdgate.cost_nano": event.cost,
                "pdgate.sampled": "head" if own.sampled else "tail",
            },
            error=event.cause or event.outcome.value if failed else "",
        )
        if timings is not None and not own.sampled:
            self._phases(own, timings, began_ms)
        return own.trace_hex

    def _phases(self, own: TraceContext, timings: Timings, began_ms: float) -> None:
        """Emit the phases as the gateway knows them: nobody else was told to."""
        at_ms = began_ms
        phases = (("queue", timings.queue_ms), ("prefill", timings.prefill_ms), ("kv_transfer", timings.transfer_ms))
        for name, lasted_ms in phases:
            if lasted_ms > 0:
                self._phase(own, name, at_ms, at_ms + lasted_ms)
                at_ms += lasted_ms
        first_token_ms = began_ms + timings.ttft_ms
        self._phase(own, "decode", first_token_ms, first_token_ms + timings.decode_ms)

    def _phase(self, own: TraceContext, name: str, start_ms: float, end_ms: float) -> None:
        span = TraceContext(trace_id=own.trace_id, span_id=child_id(own, f"{name}-gateway"), sampled=True)
        self._tracer.emit(
            name,
            span,
            parent_id=own.span_id,
            start_unix_ms=start_ms,
            end_unix_ms=end_ms,
            attributes={"pdgate.source": "gateway"},
        )
