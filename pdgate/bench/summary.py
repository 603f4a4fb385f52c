"""The figures of a step, from its records."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from contracts.slo import SloTarget
from pdgate.bench.records import Client, Record, Run, Step
from pdgate.plan.workload import mean, percentile

SHARES: Final = (50, 90, 95, 99)
PARTS: Final = 20  # of the course over time


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose intended time falls into one part of the step."""

    from_s: float
    requests: int
    met: int
    ttft_p95_ms: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a step found."""

    name: str
    requests: int
    errors: dict[str, int]
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    attainment: float  # share of all requests answered whole and within every target, 0.0 to 1.0
    goodput_rps: float
    requests_per_s: float  # answered whole
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    cached_share: float | None  # of prompt tokens, by the server's usage
    counted_by_server: float  # share of the answers
    cost_nano: int | None
    cost_per_million_output: float | None
    over_time: list[Part]
    client: Client


def summary_of(step: Step, target: SloTarget) -> Summary:
    """Return the figures of a step.

    Rates: goodput is per second of the arrivals' window under an open loop (what is answered after its end was asked
    within it) and of the whole step under a closed loop; tokens are per second until the last answer.
    """
    records = step.records
    whole = [record for record in records if record.error is None]
    num_met = sum(record.meets(target) for record in records)
    output = sum(record.output_tokens for record in whole)
    prompts = [record.prompt_tokens or 0 for record in whole]
    told = [record for record in whole if record.counted_by_server]
    costs = [record.cost_nano for record in records if record.cost_nano is not None]
    cost = sum(costs) if costs else None
    wall_s = max(step.wall_s, 1e-9)
    return Summary(
        name=step.name,
        requests=len(records),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        ttft_ms=_percentiles([r.ttft_ms for r in whole]),
        tpot_ms=_percentiles([r.tpot_ms for r in whole]),
        itl_ms=step.gaps_ms,
        e2e_ms=_percentiles([r.e2e_ms for r in whole]),
        attainment=num_met / len(records) if records else 0.0,
        goodput_rps=num_met / window_s(step),
        requests_per_s=len(whole) / wall_s,
        output_tokens_per_s=output / wall_s,
        prompt_tokens_per_s=sum(prompts) / wall_s,
        mean_prompt_tokens=mean(prompts),
        mean_output_tokens=mean([record.output_tokens for record in whole]),
        cached_share=sum(r.cached_tokens or 0 for r in told) / sum(r.prompt_tokens or 0 for r in told)
        if any(r.prompt_tokens for r in told)
        else None,
        counted_by_server=len(told) / len(whole) if whole else 0.0,
        cost_nano=cost,
        cost_per_million_output=cost / 1e9 / output * 1e6 if cost is not None and output else None,
        over_time=_over_time(step, target),
        client=step.client,
    )


def summaries_of(run: Run) -> list[Summary]:
    """Return the figures of all steps."""
    return [summary_of(step, run.target) for step in run.steps]


def window_s(step: Step) -> float:
    """Seconds in which the step's requests were asked for."""
    records = step.records
    if step.concurrency is not None or len(records) < 2:
        return max(step.wall_s, 1e-9)
    span_s = records[-1].intended_s - records[0].intended_s
    return max(span_s * len(records) / (len(records) - 1), 1e-9)


def _percentiles(values: Sequence[float | None]) -> dict[str, float]:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return {}
    return {f"p{share}": percentile(ordered, share / 100) for share in SHARES} | {"mean": mean(ordered)}


def _over_time(step: Step, target: SloTarget) -> list[Part]:
    if not step.records:
        return []
    last_s = step.records[-1].intended_s
    width_s = max(1.0, (last_s + 1e-9) / PARTS)
    parts: dict[int, list[Record]] = {}
    for record in step.records:
        parts.setdefault(int(record.intended_s / width_s), []).append(record)
    found = []
    for number, members in sorted(parts.items()):
        ttft_ms = sorted(r.ttft_ms for r in members if r.ttft_ms is not None)
        found.append(
            Part(
                from_s=number * width_s,
                requests=len(members),
                met=sum(r.meets(target) for r in members),
                ttft_p95_ms=percentile(ttft_ms, 0.95) if ttft_ms else None,
            )
        )
    return found
