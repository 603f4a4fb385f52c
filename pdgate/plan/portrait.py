"""What a workload is like: lengths, input:output ratio and its drift, burstiness, prefix reuse, short prompts."""

import itertools

import msgspec

from pdgate.plan.prefix import HitPoint, hit_curve
from pdgate.plan.traffic import dispersion
from pdgate.plan.workload import Workload, mean, percentile, squared_cv

SHORT_PROMPT_TOKENS = 512
WINDOWS_S = (60.0, 300.0)
BURST_WINDOWS_S = (1.0, 10.0, 60.0)


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of one length in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    squared_cv: float


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """How much the input:output ratio of whole windows moves."""

    window_s: float
    p95_over_p5: float | None  # None = fewer than five windows


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Burstiness as a queue of one memory sees it."""

    window_s: float
    dispersion: float  # variance over mean of arrivals per window; 1 = Poisson


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations of more than one request, where the trace names them."""

    count: int
    turns: float  # mean requests of one


class Portrait(msgspec.Struct, frozen=True, kw_only=True):
    """The workload's report. Ratios are of tokens."""

    name: str
    source: str
    requests: int
    span_s: float
    rate_rps: float
    arrival_cv: float  # coefficient of variation of inter-arrival times; 1 = Poisson
    bursts: list[Burst]
    prompt: Lengths
    output: Lengths
    input_per_output: float
    drift: list[Drift]
    short_share: float  # 0 to 1: prompts of at most 512 tokens
    prefix_hits: list[HitPoint]
    sessions: Sessions | None  # None = not recorded
    hourly: list[float]  # mean rate of each hour of the day over the trace's mean; empty = under six hours


def portray(workload: Workload) -> Portrait:
    """Return the report of a workload."""
    requests = workload.requests
    prompts = [float(r.prompt_tokens) for r in requests]
    outputs = [float(r.output_tokens) for r in requests]
    return Portrait(
        name=workload.name,
        source=workload.source,
        requests=len(requests),
        span_s=workload.span_s,
        rate_rps=workload.rate_rps,
        arrival_cv=arrival_cv(workload),
        bursts=[Burst(window_s=w, dispersion=dispersion(workload, w)) for w in BURST_WINDOWS_S],
        prompt=_lengths(prompts),
        output=_lengths(outputs),
        input_per_output=sum(prompts) / max(1.0, sum(outputs)),
        drift=[_drift(workload, window_s) for window_s in WINDOWS_S],
        short_share=mean([float(p <= SHORT_PROMPT_TOKENS) for p in prompts]),
        prefix_hits=hit_curve(workload),
        sessions=_sessions(workload),
        hourly=list(workload.hourly),
    )


def _sessions(workload: Workload) -> Sessions | None:
    named = [r.session for r in workload.requests if r.session]
    if not named:
        return None
    count = len(set(named))
    return Sessions(count=count, turns=len(named) / count)


def arrival_cv(workload: Workload) -> float:
    """Return the coefficient of variation of inter-arrival times."""
    times = [r.arrival_s for r in workload.requests]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return float(squared_cv(gaps) ** 0.5)


def _lengths(values: list[float]) -> Lengths:
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Lengths(mean=mean(ordered), p50=p50, p90=p90, p99=p99, squared_cv=squared_cv(ordered))


def _drift(workload: Workload, window_s: float) -> Drift:
    totals: dict[int, tuple[int, int]] = {}
    for request in workload.requests:
        window = int(request.arrival_s // window_s)
        prompt, output = totals.get(window, (0, 0))
        totals[window] = prompt + request.prompt_tokens, output + request.output_tokens
    ratios = sorted(prompt / output for prompt, output in totals.values() if output)
    if len(ratios) < 5:
        return Drift(window_s=window_s, p95_over_p5=None)
    return Drift(window_s=window_s, p95_over_p5=percentile(ratios, 0.95) / percentile(ratios, 0.05))
