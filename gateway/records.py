"""Metrics and the one log line of a settled request."""

import time

import structlog

from contracts.rating import Meter
from contracts.settlement import Settled
from gateway.talkers import TopTalkers
from gateway.terms import Closed
from gateway.traces import Traces
from observability.metrics import Instruments

log = structlog.get_logger()


class Records:
    """Counts and logs requests when they are settled. Prompts and completions are never logged."""

    def __init__(self, instruments: Instruments, traces: Traces) -> None:
        self._instruments = instruments
        self._traces = traces
        self._talkers = TopTalkers()
        instruments.usage_restored.add(0, {"source": "gateway"})  # so that its first increase is one
        instruments.observe("pdgate_tenant_token_share", self._talkers.shares)

    def restored(self, closed: Closed, settled: Settled) -> None:
        """Take one whose settlement, or reservation, Redis acknowledged and lost."""
        self._instruments.usage_restored.add(1, {"source": "gateway"})
        event = closed.event
        log.warning("usage_restored", rid=event.rid, org=event.org, cost_nano=event.cost, lost=settled.name.lower())

    def settled(self, closed: Closed, *, lag_ms: float) -> None:
        """Take one request that this gateway settled, `lag_ms` after its end."""
        event, instruments = closed.event, self._instruments
        timings, tokens = event.timings, event.tokens
        trace_id = self._traces.ended(closed)
        self._talkers.add(event.org, tokens.prompt + tokens.decode, now_s=time.monotonic())
        instruments.settlement_lag(lag_ms, model=event.model)
        for meter in Meter:
            instruments.tokens.add(tokens.of(meter), {"meter": meter.value, "model": event.model})
        phases: dict[str, float] = {}
        if timings is not None:
            instruments.ttft(timings.ttft_ms, trace_id=trace_id, model=event.model, tier=event.tier)
            if timings.decode_tokens > 1:
                instruments.tpot(timings.tpot_ms, trace_id=trace_id, model=event.model, tier=event.tier)
            instruments.duration(timings.total_ms, trace_id=trace_id, model=event.model, tier=event.tier)
            phases = {
                "queue": timings.queue_ms,
                "prefill": timings.prefill_ms,
                "transfer": timings.transfer_ms,
                "decode": timings.decode_ms,
            }
            for phase, lasted_ms in phases.items():
                instruments.phase(lasted_ms, model=event.model, phase=phase)
        log.info(
            "request_finished",
            rid=event.rid,
            org=event.org,
            model=event.model,
            outcome=event.outcome.value,
            cause=event.cause,
            finish_reason=event.finish_reason,
            path=event.path,
            attempts=event.attempts,
            stream=event.stream,
            prefill_worker=event.prefill_worker,
            decode_worker=event.decode_worker,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.prefill_cached,
            decode_tokens=tokens.decode,
            cost_nano=event.cost,
            ttft_ms=None if timings is None else round(timings.ttft_ms, 3),
            tpot_ms=None if timings is None else round(timings.tpot_ms, 3),
            total_ms=None if timings is None else round(timings.total_ms, 3),
            **{f"{phase}_ms": round(lasted_ms, 3) for phase, lasted_ms in phases.items()},
            settlement_lag_ms=round(lag_ms, 3),
            estimated=event.estimated,
            trace_id=trace_id or None,
        )
