"""Finished spans on their way to an OTLP collector, by OpenTelemetry's SDK. Imported by processes that trace."""

import threading
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.context import Context as OtelContext
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

Value = str | bool | int | float
Ids = tuple[int, int]
"""Trace and span."""

_FLUSH_S: Final = 2.0


class _GivenIds(IdGenerator):
    """Hands out the ids that were set just before: spans are made one at a time, already finished."""

    def __init__(self) -> None:
        self.trace_id = 1
        self.span_id = 1

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id


class SpanExport:
    """Sends spans in batches from a thread of its own."""

    def __init__(self, service: str, instance: str, *, endpoint: str) -> None:
        """`endpoint`: the collector, http://host:4317."""
        self._ids = _GivenIds()
        resource = Resource.create({"service.name": f"pdgate-{service}", "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, sampler=ALWAYS_ON)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("pdgate")

    def emit(
        self,
        name: str,
        own: Ids,
        *,
        parent_id: int | None,
        start_unix_ms: float,
        end_unix_ms: float,
        attributes: Mapping[str, Value | None],
        kind: SpanKind,
        links: Sequence[Ids],
        error: str,
    ) -> None:
        """Send one span; see observability.tracing.Tracer.emit."""
        self._ids.trace_id, self._ids.span_id = own
        span = self._tracer.start_span(
            name,
            context=_below(own[0], parent_id),
            kind=kind,
            attributes={key: value for key, value in attributes.items() if value is not None},
            links=[Link(_span_context(*link)) for link in links],
            start_time=int(start_unix_ms * 1_000_000),
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(int(max(start_unix_ms, end_unix_ms) * 1_000_000))

    def close(self) -> None:
        """Send what is left, within two seconds. Blocks."""
        # The SDK's own timeouts do not reach an export that is being tried again; closing the exporter ends it.
        give_up = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()


def _span_context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _below(trace_id: int, parent_id: int | None) -> OtelContext:
    if parent_id is None:
        return OtelContext()
    return set_span_in_context(NonRecordingSpan(_span_context(trace_id, parent_id)), OtelContext())
