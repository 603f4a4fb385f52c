"""What one request asks for, as far as it can be told when it arrives: work, output, deadline. Pure."""

import math
from collections.abc import Hashable

import msgspec

from contracts.perf import LatencyModel
from contracts.slo import SloTarget
from scheduler.policy.demand import DemandSample, OutputMoments
from scheduler.policy.fairness import Ticket, TokenWeights
from scheduler.policy.growing import GrowingAnswers
from scheduler.policy.lengths import LengthKey, LengthModel

PROMISED_QUANTILE = 0.7
"""KV memory is kept free for the output that so many answers (0 to 1) do not exceed."""
GENEROUS_QUANTILE = 0.9


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it arrives."""

    model: str
    tenant: str
    tier: str
    target: SloTarget
    arrived_ms: float
    prompt_tokens: int
    max_tokens: int
    num_samples: int = 1
    cached_tokens: int = 0
    """The best prefix hit on any worker."""
    prefix: Hashable = None
    """What batch lines that should run one after the other share; None = nothing."""
    batch: bool = False


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """What is forecast for a request."""

    key: LengthKey
    expected_output: float
    """Tokens per sample."""
    generous_output: int
    """Tokens that nine in ten such answers do not exceed."""
    promised_output: int
    """Tokens for which KV memory is kept free."""
    uncached_tokens: int
    work_ms: float
    """Computing its uncached prompt, alone on a worker."""
    feasible: bool
    """An idle machine would meet its targets."""
    ticket: Ticket
    sample: DemandSample


def size_up(
    asked: Asked,
    lengths: LengthModel,
    latency: LatencyModel,
    weights: TokenWeights,
    growing: GrowingAnswers | None = None,
) -> Sized:
    """Return the forecast of a request, its place in the order, and what it adds to the demand.

    `growing`: answers under way, where they are watched: if they have outgrown what finished ones taught, so will this.
    """
    key = LengthKey.of(model=asked.model, tenant=asked.tenant, prompt_tokens=asked.prompt_tokens)
    output = lengths.forecast(key)
    prompt, cached = asked.prompt_tokens, asked.cached_tokens
    longer = 1.0
    if growing is not None and output.mean > 0:
        longer = growing.moments(key, OutputMoments(output.mean, output.mean_square)).mean / output.mean
    expected = min(longer * output.mean, asked.max_tokens)
    step_ms = latency.decode.step_ms(1, prompt)
    work_ms = latency.prefill.ms(prompt - cached, cached) * asked.num_samples
    besides_ms = latency.front_ms + latency.transfer.ms(prompt) + step_ms
    budget_ms = _first_token_budget_ms(asked.target, decode_ms=expected * step_ms)
    step_limit_ms = min(asked.target.tpot_ms or math.inf, asked.target.itl_p99_ms or math.inf)
    alone_ms = latency.prefill.ms(prompt) + besides_ms
    feasible = alone_ms <= budget_ms and step_ms <= step_limit_ms
    deadline_ms = asked.arrived_ms + budget_ms
    group = (asked.prefix, prompt.bit_length()) if asked.batch and asked.prefix is not None else None
    return Sized(
        key=key,
        expected_output=expected,
        generous_output=min(int(longer * output.quantile(GENEROUS_QUANTILE)), asked.max_tokens),
        promised_output=int(longer * output.quantile(PROMISED_QUANTILE)),
        uncached_tokens=prompt - cached,
        work_ms=work_ms,
        feasible=feasible,
        ticket=Ticket(
            tier=asked.tier,
            tenant=asked.tenant,
            deadline_ms=deadline_ms,
            latest_start_ms=deadline_ms - work_ms - besides_ms,
            cost=asked.num_samples
            * weights.cost(uncached_tokens=prompt - cached, cached_tokens=cached, output_tokens=expected),
            group=group,
        ),
        sample=DemandSample(kind=key, prompt_tokens=prompt, prefill_ms=work_ms, feasible=feasible),
    )


def moments(lengths: LengthModel, kind: Hashable) -> OutputMoments:
    """Return what a kind of request is expected to answer: the forecast that `DemandWindow` asks for."""
    assert isinstance(kind, LengthKey)
    output = lengths.forecast(kind)
    return OutputMoments(output.mean, output.mean_square)


def _first_token_budget_ms(target: SloTarget, *, decode_ms: float) -> float:
    """Return the time to the first token that leaves the targets within reach; infinite without any."""
    ttft_ms = target.ttft_ms if target.ttft_ms is not None else math.inf
    return min(ttft_ms, target.e2e_ms - decode_ms) if target.e2e_ms is not None else ttft_ms
