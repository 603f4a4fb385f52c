"""The worker's spans of a sampled request: prefill with its KV transfer, decode linked to its prefill."""

from contracts.identity import at_ms
from contracts.lifecycle import FinishReason, Phase
from observability.tracing import TraceContext, Tracer, child_id, read
from workers.engine import End, Job


class Spans:
    """Emits spans when engine requests end. Durations are the engine's; only the end is read off the clock."""

    def __init__(self, tracer: Tracer, *, worker_id: str, pool: str) -> None:
        self._tracer = tracer
        self._worker_id = worker_id
        self._pool = pool

    def ended(self, job: Job, end: End, reason: FinishReason, *, now_unix_ms: float) -> None:
        """Emit one engine request that ended; nothing unless its trace is sampled."""
        request = read(job.traceparent) if job.traceparent else None
        if request is None or not request.sampled or not self._tracer.enabled:
            return
        stages = end.stages
        if job.phase is Phase.PREFILL:
            lasted_ms = stages.queue_ms + stages.compute_ms + stages.transfer_ms
        else:
            lasted_ms = stages.first_token_ms + stages.compute_ms
        own = _part(request, job, job.phase)
        started_ms = max(float(at_ms(job.attempt.rid)), now_unix_ms - lasted_ms)
        self._tracer.emit(
            job.phase.value,
            own,
            parent_id=request.span_id,
            start_unix_ms=started_ms,
            end_unix_ms=now_unix_ms,
            attributes={
                "pdgate.request.id": job.attempt.rid,
                "pdgate.attempt": job.attempt.attempt,
                "pdgate.sample": job.attempt.sample,
                "pdgate.pool": self._pool,
                "pdgate.worker.id": self._worker_id,
                "pdgate.hand_off": job.hand_off,
                "pdgate.queue_ms": stages.queue_ms,
                "pdgate.first_token_ms": stages.first_token_ms,
                "gen_ai.usage.input_tokens": end.counts.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": end.counts.cached_tokens,
                "gen_ai.usage.output_tokens": end.counts.completion_tokens,
                "gen_ai.response.finish_reasons": reason.value,
            },
            links=[_part(request, job, Phase.PREFILL)] if job.phase is Phase.DECODE else (),
            error="" if reason.complete or reason is FinishReason.ABORTED else end.error or reason.value,
        )
        if stages.transfer_ms > 0:
            ends_ms = now_unix_ms if job.phase is Phase.PREFILL else now_unix_ms - stages.compute_ms
            self._tracer.emit(
                "kv_transfer",
                TraceContext(trace_id=own.trace_id, span_id=child_id(own, "kv_transfer"), sampled=True),
                parent_id=own.span_id,
                start_unix_ms=max(started_ms, ends_ms - stages.transfer_ms),
                end_unix_ms=ends_ms,
                attributes={"pdgate.side": job.phase.value, "pdgate.hand_off": job.hand_off},
            )


def _part(request: TraceContext, job: Job, phase: Phase) -> TraceContext:
    name = f"{phase.value}-{job.attempt.attempt}-{job.attempt.sample}"
    return TraceContext(trace_id=request.trace_id, span_id=child_id(request, name), sampled=True)
