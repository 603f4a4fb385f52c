"""Attainment of workers that do both phases, in chunks, in closed form. Pure.

A unified worker at `r` requests a second spends `kappa*S` of step time on each prompt, so its mean step is
`t = d0 / (1 - r*(kappa*S + Dc))`, however the prompts are cut. Chunks fill a step up to the budget `b` (the TPOT
target less some headroom), so a prompt's service stretches by `1/(1 - t_decode/b)`; the worker keeps up as long as
`r*(kappa*S + Dc) <= 1 - d0/b` if it always decodes; with few answers at once it often does not. While a prompt is
worked on, steps last `b`; the rest of the time only `t_decode`.
"""

import math
from collections.abc import Sequence

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
from pdgate.plan.queueing import NONE, UNSTABLE, Waits
from pdgate.plan.traffic import Traffic
from pdgate.plan.workload import mean

OPEN_CHUNK_TOKENS = 8192  # chunk of an engine that has no TPOT target to keep
HEADROOMS = (1.0, 1.4, 1.8, 2.4)  # standard deviations of the decode step kept free in a mixed step


def unified_outcome(
    *, latency: LatencyModel, num_workers: int, traffic: Traffic, target: SloTarget, mixing: float
) -> Outcome:
    """Return what workers that do both, in chunks, do with the traffic.

    The step budget keeps some headroom under the TPOT target for the batch's fluctuation; the best headroom is taken.

    Args:
        latency: a worker.
        num_workers: how many.
        traffic: at its own rate.
        target: TTFT and TPOT targets.
        mixing: kappa >= 1, cost of a prompt mixed into decode steps over its cost alone.
    """
    service = [mixing * s for s in prompt_ms(latency, traffic)]
    capacity = decode_capacity_rps(latency, traffic.decode, target.tpot_ms, prefill_ms=mean(service))
    rate = traffic.rate_rps / num_workers
    slots = num_workers * slots_of(latency, traffic.decode, None)
    found: Outcome | None = None
    for headroom in HEADROOMS if target.tpot_ms else (0.0,):
        step, share = _mixed_step(latency, service, rate, traffic, target.tpot_ms, headroom)
        if share <= 0:
            first = FirstToken(waiting=Waits(first=UNSTABLE, second=NONE), fixed_ms=tuple(service), busy=1.0)
        else:
            first = first_token(latency, [s / share for s in service], [0.0] * len(service), num_workers, traffic)
            waiting = Waits(first=first.waiting.first, second=slot_wait(slots, traffic, step))
            first = msgspec.structs.replace(first, waiting=waiting)
        step = msgspec.structs.replace(step, mixed_share=min(1.0, first.busy))
        attainment = first.within(target.ttft_ms or math.inf) * step.within(target.tpot_ms or math.inf)
        if found is None or attainment > found.attainment:
            found = Outcome(
                first=first,
                step=step,
                attainment=attainment,
                prefill_busy=min(1.0, rate / MS * mean(service)),
                decode_busy=min(1.0, rate / capacity) if capacity > 0 else 1.0,
                link_busy=0.0,
            )
    assert found is not None
    return found


def _mixed_step(
    latency: LatencyModel,
    service: Sequence[float],
    rate_rps: float,
    traffic: Traffic,
    tau_ms: float | None,
    headroom: float,
) -> tuple[Step, float]:
    """The steps of a unified worker, and the share (0 to 1) of a step with a chunk that is the chunk's."""
    cost, rate = latency.decode, rate_rps / MS
    work = decode_work_ms(cost, traffic.decode)
    free = 1 - rate * (work + mean(service))
    step = loaded_step(latency, traffic, rate, cost.fixed_ms / free if free > 0 else math.inf)
    if math.isinf(step.mean_ms):
        return step, 0.0
    decode_only = cost.fixed_ms + work * rate * step.mean_ms
    if tau_ms is None:
        budget = decode_only + latency.prefill.ms(OPEN_CHUNK_TOKENS)
    else:
        budget = tau_ms - headroom * step.deviation_ms
    # a worker without a running answer spends its steps on prompts alone
    idle = math.exp(-step.batch)
    share = idle + (1 - idle) * (1 - decode_only / budget) if budget > decode_only else 0.0
    return msgspec.structs.replace(step, decode_only_ms=decode_only, mixed_ms=budget), share
