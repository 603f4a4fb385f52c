"""Attainment of prefill and decode pools in closed form. Pure.

Symbols as in the architecture page: prefill `S`, decode step `t(B, K) = d0 + d1*B + d2*K`, output tokens `O`, TPOT
target `tau`. One decode worker at rate `r` has the fixed point `t = d0 / (1 - r*E[d1*O + d2*(n*O + O^2/2)])`; its batch
and KV fluctuate like those of M/G/infinity. The scheduler admits to a decode worker only what its memory and the TPOT
target take, so a full pool costs waiting for a slot, not TPOT.
"""

import math
from collections.abc import Sequence

import msgspec

from contracts.perf import DecodeCost, LatencyModel
from contracts.slo import SloTarget
from pdgate.plan.queueing import NONE, UNSTABLE, Wait, Waits, normal_below, quantile_of_sum, wait
from pdgate.plan.traffic import DecodeMoments, Traffic
from pdgate.plan.workload import mean, squared_cv

MAX_LINK_LOAD = 0.95
MS = 1000.0


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Times from arrival to first token: waits plus one of the equally likely fixed parts."""

    waiting: Waits
    fixed_ms: tuple[float, ...]
    busy: float  # 0 to 1: share of the pool's time that prompts take

    def within(self, limit_ms: float) -> float:
        """Return the probability (0 to 1) of a first token within the limit."""
        if math.isinf(limit_ms):
            return float(self.waiting.stable)
        return self.waiting.within_all([limit_ms - f for f in self.fixed_ms])

    def quantile_ms(self, share: float) -> float:
        """Return the quantile, ms."""
        return quantile_of_sum(self.fixed_ms, self.waiting, share)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The decode step of one worker under load: mean and fluctuation; batch and KV that go with it."""

    mean_ms: float
    deviation_ms: float
    batch: float
    kv_tokens: float
    kv_capacity_tokens: int
    decode_only_ms: float  # a step without a chunk of a prompt; the mean of a decode worker
    mixed_ms: float = 0.0  # a step with one
    mixed_share: float = 0.0  # 0 to 1 of the time with such steps
    cap_ms: float = math.inf  # the scheduler admits no request beyond it

    def within(self, limit_ms: float) -> float:
        """Return the probability (0 to 1) of a TPOT within the limit.

        A request is taken to see either steps with chunks or steps without, as short answers do: long ones see the
        mean of both and fare better.
        """
        calm = normal_below(limit_ms, self.decode_only_ms, self.deviation_ms)
        if self.mixed_share <= 0:
            return calm
        return (
            self.mixed_share * normal_below(limit_ms, self.mixed_ms, self.deviation_ms) + (1 - self.mixed_share) * calm
        )

    def quantile_ms(self, share: float) -> float:
        """Return the quantile of TPOT, ms, by bisection."""
        if math.isinf(self.mean_ms):
            return math.inf
        low, high = 0.0, max(self.decode_only_ms, self.mixed_ms) + 8 * self.deviation_ms
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.within(middle) < share else (low, middle)
        return min(high, self.cap_ms)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool or a pair of pools does with its traffic."""

    first: FirstToken
    step: Step
    attainment: float  # 0 to 1: both targets met
    prefill_busy: float  # 0 to 1
    decode_busy: float  # 0 to 1 of what the targets allow
    link_busy: float  # 0 to 1


def decode_work_ms(cost: DecodeCost, moments: DecodeMoments) -> float:
    """Return E[d1*O + d2*(n*O + O^2/2)]: step time that one request adds over its life, ms."""
    return cost.per_request_ms * moments.o + cost.per_kv_token_ms * moments.kv


def decode_capacity_rps(
    latency: LatencyModel, moments: DecodeMoments, tau_ms: float | None, *, prefill_ms: float = 0.0
) -> float:
    """Return the requests per second at which a worker's mean step is `tau_ms`, or its memory or batch is full.

    The bounds on memory and batch take the step that the worker then has, `d0 / (1 - r*work)`, not `tau_ms`: a worker
    whose memory binds first runs faster steps and so serves more.

    Args:
        latency: the worker.
        moments: decode work of a request.
        tau_ms: TPOT target; None = as slow as memory allows.
        prefill_ms: prefill time that each request adds to the steps, ms.
    """
    cost = latency.decode
    work = decode_work_ms(cost, moments) + prefill_ms
    by_memory = latency.kv_capacity_tokens / (cost.fixed_ms * moments.kv + work * latency.kv_capacity_tokens)
    by_batch = latency.max_running / (cost.fixed_ms * moments.o + work * latency.max_running)
    by_time = math.inf if tau_ms is None else max(0.0, 1 - cost.fixed_ms / tau_ms) / max(work, 1e-12)
    return min(by_time, by_memory, by_batch) * MS


def prompt_ms(latency: LatencyModel, traffic: Traffic) -> list[float]:
    """Return the compute time of each stratum's prompt, ms."""
    cost = latency.prefill
    return [
        cost.fixed_ms
        + cost.per_token_ms * p.uncached_tokens
        + cost.per_token_pair_ms * p.uncached_tokens * (p.uncached_tokens + 2 * p.cached_tokens)
        for p in traffic.prompts
    ]


def decode_step_ms(latency: LatencyModel, moments: DecodeMoments, rate_rps: float) -> float:
    """Return the mean step of a decode worker at so many requests per second, ms; infinite beyond its capacity."""
    free = 1 - rate_rps / MS * decode_work_ms(latency.decode, moments)
    return latency.decode.fixed_ms / free if free > 0 else math.inf


def decode_step(latency: LatencyModel, traffic: Traffic, rate_rps: float) -> Step:
    """Return the step of one decode worker at its share of the traffic.

    Args:
        latency: the worker.
        traffic: lengths and burstiness; its rate is not used.
        rate_rps: requests per second of this worker.
    """
    return loaded_step(latency, traffic, rate_rps / MS, decode_step_ms(latency, traffic.decode, rate_rps))


def split_outcome(
    *,
    prefill: LatencyModel,
    decode: LatencyModel,
    num_prefill: int,
    num_decode: int,
    traffic: Traffic,
    target: SloTarget,
    layers: int,
    through_store: bool = False,
) -> Outcome:
    """Return what prefill and decode pools do with the traffic.

    Args:
        prefill: a prefill worker.
        decode: a decode worker.
        num_prefill: prefill workers.
        num_decode: decode workers.
        traffic: at its own rate.
        target: TTFT and TPOT targets.
        layers: layers of the model; the hand-off pushes them one by one.
        through_store: the KV cache is written to and read from a store, and cached prefixes are read from it.
    """
    service = prompt_ms(prefill, traffic)
    hand_off, link_busy = _hand_off_ms(prefill, service, num_prefill, traffic, layers, through_store=through_store)
    if link_busy >= MAX_LINK_LOAD:
        first = FirstToken(waiting=Waits(first=UNSTABLE, second=NONE), fixed_ms=tuple(service), busy=1.0)
    else:
        first = first_token(prefill, service, hand_off, num_prefill, traffic)
    step = decode_step(decode, traffic, traffic.rate_rps / num_decode)
    slots = num_decode * slots_of(decode, traffic.decode, target.tpot_ms)
    first = msgspec.structs.replace(
        first, waiting=Waits(first=first.waiting.first, second=slot_wait(slots, traffic, step))
    )
    capacity = decode_capacity_rps(decode, traffic.decode, target.tpot_ms)
    return Outcome(
        first=first,
        step=msgspec.structs.replace(step, cap_ms=target.tpot_ms or math.inf),
        attainment=first.within(target.ttft_ms or math.inf),
        prefill_busy=min(1.0, first.busy),
        decode_busy=min(1.0, traffic.rate_rps / num_decode / capacity) if capacity > 0 else 1.0,
        link_busy=min(1.0, link_busy),
    )


def slots_of(latency: LatencyModel, moments: DecodeMoments, tau_ms: float | None) -> int:
    """Return how many requests of mean context a worker decodes at once within its memory and, if given, a step.

    The scheduler admits no more, so TPOT holds and what is beyond waits for a slot, on TTFT's account.
    """
    cost, context = latency.decode, moments.kv / moments.o
    by_memory = latency.kv_capacity_tokens / context
    one = cost.per_request_ms + cost.per_kv_token_ms * context
    by_time = math.inf if tau_ms is None else (tau_ms - cost.fixed_ms) / max(one, 1e-12)
    return max(0, int(min(by_memory, by_time, latency.max_running)))


def slot_wait(slots: int, traffic: Traffic, step: Step) -> Wait:
    """Return the wait for one of so many decode slots, each held for an answer's length of steps."""
    if slots < 1 or math.isinf(step.mean_ms):
        return UNSTABLE
    moments = traffic.decode
    return wait(
        servers=slots,
        rate_rps=traffic.rate_rps,
        mean_service_ms=moments.o * step.mean_ms,
        service_squared_cv=max(0.0, moments.o_squared / moments.o**2 - 1),
        dispersion=traffic.answer_dispersion,
    )


def loaded_step(latency: LatencyModel, traffic: Traffic, rate: float, step_ms: float) -> Step:
    """Return the step of a worker at so many requests per ms, given its mean step."""
    cost, moments = latency.decode, traffic.decode
    if math.isinf(step_ms):
        batch = kv = math.inf
        deviation = 0.0
    else:
        batch, kv = rate * step_ms * moments.o, rate * step_ms * moments.kv
        clumps = max(1.0, traffic.answer_dispersion)
        squared = (
            cost.per_request_ms**2 * moments.o
            + 2 * cost.per_request_ms * cost.per_kv_token_ms * moments.kv
            + cost.per_kv_token_ms**2 * moments.kv_squared
        )
        deviation = math.sqrt(rate * step_ms * squared * clumps)
    return Step(
        mean_ms=step_ms,
        deviation_ms=deviation,
        batch=batch,
        kv_tokens=kv,
        kv_capacity_tokens=latency.kv_capacity_tokens,
        decode_only_ms=step_ms,
    )


def first_token(
    latency: LatencyModel, service: Sequence[float], after: Sequence[float], servers: int, traffic: Traffic
) -> FirstToken:
    """Return the times to first token of a pool whose prompts take `service` ms, and `after` ms elsewhere."""
    mean_service = mean(service)
    waiting = wait(
        servers=servers,
        rate_rps=traffic.rate_rps,
        mean_service_ms=mean_service,
        service_squared_cv=squared_cv(service),
        dispersion=traffic.prompt_dispersion,
    )
    return FirstToken(
        waiting=Waits(first=waiting, second=NONE),
        fixed_ms=tuple(latency.front_ms + s + a for s, a in zip(service, after, strict=True)),
        busy=traffic.rate_rps * mean_service / MS / servers,
    )


def _hand_off_ms(
    prefill: LatencyModel,
    service: Sequence[float],
    num_prefill: int,
    traffic: Traffic,
    layers: int,
    *,
    through_store: bool,
) -> tuple[list[float], float]:
    """Visible hand-off time of each stratum, and the load of the prefill workers' links (0 to 1 and above)."""
    link = prefill.transfer
    tokens = [p.uncached_tokens + p.cached_tokens for p in traffic.prompts]
    moved = [t + p.uncached_tokens for t, p in zip(tokens, traffic.prompts, strict=True)] if through_store else tokens
    busy = traffic.rate_rps / MS * mean(moved) * link.kv_bytes_per_token / link.bytes_per_ms / num_prefill
    if busy >= MAX_LINK_LOAD:
        return [math.inf] * len(tokens), busy
    slower = 1 / (1 - busy)
    if through_store:
        # the write of the last page and the read of everything are visible, and so is the read of cached prefixes
        return [
            slower * (link.ms(round(t)) + link.ms(round(t)) / layers + link.ms(round(p.cached_tokens)))
            for t, p in zip(tokens, traffic.prompts, strict=True)
        ], busy
    return [slower * link.exposed_ms(round(t), s, layers) for t, s in zip(tokens, service, strict=True)], busy
