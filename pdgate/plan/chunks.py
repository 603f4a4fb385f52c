"""Attainment of unified workers whose engine cuts prompts in chunks of one fixed size. Pure.

Each chunk takes a step of its own length: it delays every running answer by its whole time, and a prompt of several
chunks pays the fixed part of a prefill for each. An answer of `g` gaps keeps its TPOT target `tau` if the `N` chunks
that it meets leave room, `g*t_d + N*s <= g*tau`, with `t_d` the step without a chunk, `s` a chunk's time, `N` Poisson.
That takes the batch as even, which is too calm. If the batch follows the chunks at once, which is too nervous, the room
is `N*(s + w) <= g*(tau - d0)` with `w` the decode work of one chunk's share of a request. The mean of both is taken.
"""

import math

import msgspec

from contracts.perf import LatencyModel
from contracts.slo import SloTarget
from pdgate.plan.pools import (
    MS,
    FirstToken,
    Outcome,
    Step,
    decode_capacity_rps,
    decode_work_ms,
    first_token,
    loaded_step,
    prompt_ms,
    slot_wait,
    slots_of,
)
from pdgate.plan.queueing import NONE, UNSTABLE, Waits, normal_below
from pdgate.plan.traffic import DecodeMoments, Traffic
from pdgate.plan.workload import mean

ANSWERS = 24  # strata of answer length, lognormal by its two moments
NORMAL_FROM = 60.0  # expected chunks from which their number is taken as normal
DEVIATIONS = (-1.645, -0.675, 0.0, 0.675, 1.645)  # of the step without a chunk, at equal weights but for the ends
WEIGHTS = (0.1, 0.2, 0.4, 0.2, 0.1)


def chunked_outcome(
    *, latency: LatencyModel, num_workers: int, traffic: Traffic, target: SloTarget, mixing: float, chunk_tokens: int
) -> Outcome:
    """Return what workers that do both do with the traffic, prompts cut in chunks of `chunk_tokens`.

    Args:
        latency: a worker.
        num_workers: how many.
        traffic: at its own rate.
        target: TTFT and TPOT targets.
        mixing: kappa >= 1, cost of a prompt mixed into decode steps over its cost alone.
        chunk_tokens: most prompt tokens of one step.
    """
    counts = [max(1, math.ceil(p.uncached_tokens / chunk_tokens)) for p in traffic.prompts]
    again_ms = latency.prefill.fixed_ms
    service = [mixing * (s + (k - 1) * again_ms) for s, k in zip(prompt_ms(latency, traffic), counts, strict=True)]
    capacity = decode_capacity_rps(latency, traffic.decode, target.tpot_ms, prefill_ms=mean(service))
    rate = traffic.rate_rps / num_workers / MS
    work = decode_work_ms(latency.decode, traffic.decode)
    free = 1 - rate * (work + mean(service))
    step = loaded_step(latency, traffic, rate, latency.decode.fixed_ms / free if free > 0 else math.inf)
    if math.isinf(step.mean_ms):
        first = FirstToken(waiting=Waits(first=UNSTABLE, second=NONE), fixed_ms=tuple(service), busy=1.0)
        within = 0.0
    else:
        alone_ms = latency.decode.fixed_ms + work * rate * step.mean_ms
        running = 1 - math.exp(-step.batch)
        slowed = [s + k * running * alone_ms for s, k in zip(service, counts, strict=True)]
        first = first_token(latency, slowed, [0.0] * len(slowed), num_workers, traffic)
        slots = num_workers * slots_of(latency, traffic.decode, None)
        waiting = Waits(first=first.waiting.first, second=slot_wait(slots, traffic, step))
        first = msgspec.structs.replace(first, waiting=waiting)
        chunk_ms = mean(service) / mean(counts)
        step = msgspec.structs.replace(
            step, decode_only_ms=alone_ms, mixed_ms=alone_ms + chunk_ms, mixed_share=min(1.0, first.busy)
        )
        within = _within_all(latency, traffic.decode, target.tpot_ms, step, chunk_ms, rate * mean(counts), mean(counts))
    return Outcome(
        first=first,
        step=step,
        attainment=first.within(target.ttft_ms or math.inf) * within,
        prefill_busy=min(1.0, rate * mean(service)),
        decode_busy=min(1.0, rate * MS / capacity) if capacity > 0 else 1.0,
        link_busy=0.0,
    )


def answers_of(moments: DecodeMoments) -> list[float]:
    """Return answer lengths, equally likely: strata of a lognormal of the given mean and spread, at least one token."""
    sigma = math.sqrt(math.log(max(1.0, moments.o_squared / moments.o**2)))
    lengths = [math.exp(sigma * _normal_quantile((i + 0.5) / ANSWERS)) for i in range(ANSWERS)]
    scale = moments.o / mean(lengths)
    return [max(1.0, scale * length) for length in lengths]


def _within_all(
    latency: LatencyModel,
    moments: DecodeMoments,
    tau_ms: float | None,
    step: Step,
    chunk_ms: float,
    chunks_per_ms: float,
    chunks_per_prompt: float,
) -> float:
    """Probability that an answer keeps its TPOT target, over all lengths."""
    if tau_ms is None:
        return 1.0
    room = (tau_ms - latency.decode.fixed_ms) / (chunk_ms + decode_work_ms(latency.decode, moments) / chunks_per_prompt)
    shares = []
    for length in answers_of(moments):
        gaps = length - 1
        if gaps < 0.5:
            shares.append(1.0)
            continue
        even = _within(gaps, tau_ms, step, chunk_ms, gaps * chunks_per_ms * step.mean_ms)
        following = _poisson_below(gaps * room, gaps * tau_ms * chunks_per_ms)
        shares.append((even + following) / 2)
    return mean(shares)


def _within(gaps: float, tau_ms: float, step: Step, chunk_ms: float, expected: float) -> float:
    """Probability that so many expected chunks leave an answer's mean gap within the target, the batch being even."""
    return sum(
        weight * _poisson_below(gaps * (tau_ms - step.decode_only_ms - d * step.deviation_ms) / chunk_ms, expected)
        for d, weight in zip(DEVIATIONS, WEIGHTS, strict=True)
    )


def _poisson_below(most: float, expected: float) -> float:
    """Probability of at most so many events."""
    if most < 0:
        return 0.0
    if expected >= NORMAL_FROM:
        return normal_below(math.floor(most) + 0.5, expected, math.sqrt(expected))
    term = total = math.exp(-expected)
    for i in range(1, min(math.floor(most), 400) + 1):
        term *= expected / i
        total += term
    return min(1.0, total)


def _normal_quantile(share: float) -> float:
    """By bisection."""
    low, high = -6.0, 6.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if normal_below(middle, 0.0, 1.0) < share else (low, middle)
    return low
