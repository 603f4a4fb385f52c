"""Spans of requests, made when something has ended, with ids that were agreed before it began.

1. The gateway gives each request a trace context at arrival (the caller's trace, if it sent one) and decides
   whether it is sampled. The context travels as W3C `traceparent` through the inbox, Control and the usage event.
2. Each process that ends its part of a sampled request emits one finished span below that context.
3. A request that was not sampled but missed its targets or failed is emitted by the gateway alone, phase by
   phase, from the stage durations that it has anyway.

So an unsampled request costs 24 random bytes and a text, and no span is open while a request runs.
Attributes follow OpenTelemetry's GenAI conventions where they have a name. Prompts and answers are never in them.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Self

import msgspec
from opentelemetry.trace import SpanKind

if TYPE_CHECKING:
    from observability.span_export import SpanExport, Value

__all__ = ["Ratios", "SpanKind", "TraceContext", "Tracer", "begin", "child_id", "read"]

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 1


class TraceContext(msgspec.Struct, frozen=True, kw_only=True):
    """Who a span is: its trace, itself, and whether the trace is sampled."""

    trace_id: int
    span_id: int
    sampled: bool

    @property
    def traceparent(self) -> str:
        """W3C form, for children."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if self.sampled else '00'}"

    @property
    def trace_hex(self) -> str:
        """Trace id as people and exemplars write it."""
        return f"{self.trace_id:032x}"


def read(traceparent: str) -> TraceContext | None:
    """Return the context in a W3C traceparent, or None when it is none."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or match[1] == "ff":
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id=trace_id, span_id=span_id, sampled=bool(int(match[4], 16) & _SAMPLED))


def begin(parent: TraceContext | None, *, ratio: float) -> TraceContext:
    """Return the context of a new request: in the caller's trace if it has one, else in one of its own.

    Args:
        parent: the caller's; its decision to sample holds.
        ratio: share of own traces to sample, 0 to 1.
    """
    fresh = os.urandom(24)
    span_id = int.from_bytes(fresh[16:]) or 1
    if parent is not None:
        return TraceContext(trace_id=parent.trace_id, span_id=span_id, sampled=parent.sampled)
    trace_id = int.from_bytes(fresh[:16]) or 1
    # The lower 64 bits decide, as W3C's consistent sampling does: equal in every process that asks.
    return TraceContext(trace_id=trace_id, span_id=span_id, sampled=(trace_id & (2**64 - 1)) < ratio * 2**64)


def child_id(parent: TraceContext, name: str) -> int:
    """Return the span id of a named part of a request: processes that cannot talk agree on it, for links."""
    mixed = parent.span_id
    for byte in name.encode():  # FNV-1a over the parent's id
        mixed = ((mixed ^ byte) * 0x100000001B3) & (2**64 - 1)
    return mixed or 1


class Ratios(msgspec.Struct, frozen=True, kw_only=True):
    """Share of traces to sample, 0 to 1, by tier."""

    otherwise: float
    by_tier: Mapping[str, float]

    def of(self, tier: str) -> float:
        """Return the share of one tier."""
        return self.by_tier.get(tier, self.otherwise)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shares in text such as `0.01,priority=0.1,batch=0`.

        Raises:
            ValueError: not a number between 0 and 1, or no share for the other tiers.
        """
        shares: dict[str, float] = {}
        for part in text.split(","):
            tier, _, number = part.strip().rpartition("=")
            try:
                share = float(number)
            except ValueError:
                share = -1.0
            if not 0 <= share <= 1:
                raise ValueError(f"{part.strip()!r} is no share between 0 and 1")
            shares[tier] = share
        if "" not in shares:
            raise ValueError("give the share of the other tiers first, as in 0.01,priority=0.1")
        return cls(otherwise=shares.pop(""), by_tier=shares)


class Tracer:
    """Sends finished spans to an OTLP collector; without an endpoint it does nothing."""

    def __init__(self, service: str, instance: str, *, endpoint: str = "") -> None:
        self.enabled = bool(endpoint)
        self._export: SpanExport | None = None
        if endpoint:
            # Here and not at the top: who traces nothing has no use for the SDK, which is large.
            from observability.span_export import SpanExport as Export  # noqa: PLC0415

            self._export = Export(service, instance, endpoint=endpoint)

    def emit(
        self,
        name: str,
        own: TraceContext,
        *,
        parent_id: int | None,
        start_unix_ms: float,
        end_unix_ms: float,
        attributes: "Mapping[str, Value | None]",
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[TraceContext] = (),
        error: str = "",
    ) -> None:
        """Send one finished span.

        Args:
            name: what it is, bounded in number.
            own: its ids.
            parent_id: the span above it; None for the first of a trace.
            start_unix_ms: when it began; a clock that went backwards makes it empty, not negative.
            end_unix_ms: when it ended.
            attributes: None values are left out.
            kind: OpenTelemetry's kind.
            links: spans of other parts of the request that it belongs with.
            error: a code, when it failed.
        """
        if self._export is not None:
            self._export.emit(
                name,
                (own.trace_id, own.span_id),
                parent_id=parent_id,
                start_unix_ms=start_unix_ms,
                end_unix_ms=end_unix_ms,
                attributes=attributes,
                kind=kind,
                links=[(link.trace_id, link.span_id) for link in links],
                error=error,
            )

    def close(self) -> None:
        """Send what is left, within two seconds. Blocks."""
        if self._export is not None:
            self._export.close()
