"""What came of a run, as figures."""

from collections.abc import Iterable, Sequence

import msgspec

from contracts.slo import SloTarget
from scheduler.policy.queueing import Split
from scheduler.simulator.job import Job


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The pool at one instant, and what ended since the sample before."""

    at_s: float
    split: Split
    num_waiting: int
    waiting_work_ms: float
    """Prefill work of the requests that wait."""
    kv_used: float
    """KV tokens in use on decode and unified workers, 0.0 to 1.0."""
    ended: int
    met: int


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of a latency, ms."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        """Return the nearest-rank percentiles; zeros when there is nothing."""
        ordered = sorted(values)
        if not ordered:
            return cls(p50=0.0, p95=0.0, p99=0.0)

        def at(share: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)

        return cls(p50=at(0.50), p95=at(0.95), p99=at(0.99))


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Batch requests count only in `batch_tokens_per_s`."""

    requests: int
    feasible: int
    """Requests that an idle machine would serve within the targets."""
    attainment: float
    """Met / (met + missed) over feasible requests that were not refused, 0.0 to 1.0."""
    attainment_total: float
    """The same with refused requests counted as missed."""
    goodput_rps: float
    """Requests per second that met their targets, feasible or not."""
    refused: int
    lost: int
    retracted: int
    flips: int
    cancelled_flips: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    missed_by_stage: dict[str, int]
    batch_tokens_per_s: float
    """Prompt and output tokens of batch requests that ended before the last arrival."""
    duration_s: float


def met_targets(job: Job, target: SloTarget) -> bool:
    """Whether a request met its targets; an unfinished one did not."""
    if not job.done:
        return False
    ttft_ok = target.ttft_ms is None or job.ttft_ms <= target.ttft_ms
    return ttft_ok and (target.tpot_ms is None or job.tpot_ms <= target.tpot_ms)


def summarise(
    jobs: Sequence[Job],
    target: SloTarget,
    *,
    duration_s: float,
    flips: int = 0,
    cancelled_flips: int = 0,
    retracted: int = 0,
) -> Result:
    """Return the figures of a run."""
    interactive = [job for job in jobs if not job.batch]
    done = [job for job in interactive if job.done]
    feasible = [job for job in interactive if job.feasible]
    met = sum(1 for job in feasible if met_targets(job, target))
    admitted = [job for job in feasible if not job.refused]
    stages: dict[str, int] = {}
    for job in feasible:
        if not met_targets(job, target):
            name = job.refused or ("unfinished" if not job.done and job.stage == "none" else job.stage.value)
            stages[name] = stages.get(name, 0) + 1
    batch_tokens = sum(
        job.arrival.output_tokens + job.arrival.prompt_tokens
        for job in jobs
        if job.batch and job.done and job.end_ms <= duration_s * 1000
    )
    return Result(
        requests=len(interactive),
        feasible=len(feasible),
        attainment=met / len(admitted) if admitted else 1.0,
        attainment_total=met / len(feasible) if feasible else 1.0,
        goodput_rps=sum(1 for job in interactive if met_targets(job, target)) / duration_s if duration_s else 0.0,
        refused=sum(1 for job in interactive if job.refused),
        lost=sum(1 for job in interactive if job.stage == "lost"),
        retracted=retracted,
        flips=flips,
        cancelled_flips=cancelled_flips,
        ttft_ms=Percentiles.of(job.ttft_ms for job in done),
        tpot_ms=Percentiles.of(job.tpot_ms for job in done if job.arrival.output_tokens > 1),
        missed_by_stage=dict(sorted(stages.items())),
        batch_tokens_per_s=batch_tokens / duration_s if duration_s else 0.0,
        duration_s=duration_s,
    )
