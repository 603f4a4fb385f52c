"""A plan as one screen of text."""

import math

from rich.console import Console
from rich.table import Table

from pdgate.plan.decide import Percentiles
from pdgate.plan.plan import Plan
from pdgate.plan.played import Agreement
from pdgate.plan.sharing import price

HEADLINES = {
    "split": "SPLIT prefill and decode",
    "unified": "DO NOT SPLIT: unified workers",
    "mixed": "MIX: split for long prompts, unified workers for short ones",
    "infeasible": "INFEASIBLE on this fleet",
}


def print_plan(plan: Plan, console: Console) -> None:
    """Print the verdict, the fleet, the options, the money and what would change the answer."""
    console.print(f"[bold]{HEADLINES[plan.verdict]}[/bold]: {plan.reason}.")
    console.print(f"{plan.model} on {plan.fleet}, {targets(plan)}, {plan.planned_rps:.2f} requests/s. {traffic(plan)}")
    if plan.expected is not None:
        lead = "the cheapest fleet that works" if plan.verdict == "infeasible" else "run"
        console.print(f"\n{lead}: [bold]{workers(plan)}[/bold], good for {plan.capacity_rps:.2f} requests/s")
        seen = plan.expected
        console.print(
            f"expected: {seen.attainment:.1%} meet both targets, goodput {seen.goodput_rps:.2f} requests/s; TTFT "
            f"{_row(seen.ttft_ms)}, TPOT {_row(seen.tpot_ms)} (P50 / P95 / P99); prefix hit {seen.prefix_hit:.0%}"
        )
    console.print()
    console.print(_options(plan))
    for option in plan.options:
        if option.note and option.capacity_rps:
            console.print(f"{option.name}: {option.note}")
    console.print(f"runs out first: {plan.binding}")
    if plan.rule is not None:
        sign = ">" if plan.rule.pays else "<="
        console.print(
            f"rule of thumb: prefill load that keeps TTFT {plan.rule.rho:.2f} {sign} (1 - d0/TPOT)/kappa "
            f"{plan.rule.limit:.2f}: a split {'pays' if plan.rule.pays else 'does not pay'}, whole workers aside"
        )
    if plan.simulation is not None:
        console.print(simulation(plan.simulation))
    if plan.goodput_gain is not None and plan.sensitivity is not None:
        low, high = share(plan.goodput_gain_low), share(plan.goodput_gain_high)
        console.print(
            f"goodput gain of the best split {plan.goodput_gain:+.0%}, {low} to {high} within the fit's errors"
        )
        changes = plan.sensitivity.would_change
        console.print(f"would change the answer: {'; '.join(changes) if changes else 'none of the inputs tried'}")
        if plan.sensitivity.network_needed_gb is not None:
            console.print(f"network: {plan.sensitivity.network_needed_gb:g} GB/s per prefill worker is enough")
    for line in [*mixture_lines(plan), *money_lines(plan)]:
        console.print(line)
    console.print("\n[dim]" + "; ".join(plan.assumptions) + "[/dim]")


def simulation(found: Agreement) -> str:
    """What the simulation says, in words."""
    if not found.fleets:
        return f"simulation: not played ({found.why})"
    if not found.agree:
        return f"simulation and closed form differ: {found.why}"
    seen = "; ".join(f"{f.workers} {f.simulated:.1%} (closed form {f.closed_form:.1%})" for f in found.fleets)
    gain = f", gain {share(found.gain_simulated)}" if found.gain_simulated is not None else ""
    return f"simulation of {found.requests} requests under the production policy agrees: {seen}{gain}"


def targets(plan: Plan) -> str:
    """The targets in words."""
    parts = []
    if plan.target.ttft_ms is not None:
        parts.append(f"TTFT <= {plan.target.ttft_ms:g} ms")
    if plan.target.tpot_ms is not None:
        parts.append(f"TPOT <= {plan.target.tpot_ms:g} ms")
    return f"{' and '.join(parts)} for {plan.attainment:.0%}" if parts else "no latency targets"


def traffic(plan: Plan) -> str:
    """The traffic in words."""
    seen = plan.workload
    lengths = f"prompts {seen.prompt.mean:.0f} (P99 {seen.prompt.p99:.0f}), answers {seen.output.mean:.0f} tokens"
    parts = [
        f"Traffic: {seen.name}, {lengths}, at most 512 tokens {seen.short_share:.0%}",
        f"input:output {seen.input_per_output:.1f}{_drift(plan)}",
        f"arrival CV {seen.arrival_cv:.1f} (variance over mean of a second's arrivals {seen.bursts[0].dispersion:.1f})",
    ]
    curve = [f"{p.hit:.0%} at {_tokens(p.cache_tokens)}" for p in seen.prefix_hits]
    parts.append("prefix hit " + (", ".join(curve) if len(curve) > 1 else "none known"))
    if seen.sessions is not None:
        parts.append(f"{seen.sessions.count} sessions of {seen.sessions.turns:.1f} turns")
    if seen.hourly:
        parts.append(f"busiest hour {max(seen.hourly):.1f} x the mean")
    return "; ".join(parts)


def workers(plan: Plan) -> str:
    """The chosen workers in words."""
    parts = []
    for role in ("prefill", "decode", "unified"):
        count = getattr(plan, role)
        if count:
            parts.append(f"{count} {role} x {plan.layout[role]}")
    text = " + ".join(parts)
    if plan.short_prompt_tokens:
        text += f" (unified: prompts of up to {plan.short_prompt_tokens} uncached tokens)"
    elif plan.unified and plan.prefill:
        text += " (unified: fallback)"
    return text + (f", hand-off {plan.hand_off}" if plan.hand_off else "")


def mixture_lines(plan: Plan) -> list[str]:
    """The experts in words; no lines for a dense model."""
    if plan.mixture is None:
        return []
    parts = []
    for seen in plan.mixture.roles:
        text = f"{seen.role} " + (f"EP{seen.degree}" if seen.degree > 1 else "experts cut over the worker's GPUs")
        if seen.degree > 1:
            text += (
                f" ({seen.experts_per_gpu:.3g} experts a GPU, busiest {seen.imbalance:.2f} x the mean, all-to-all "
                f"{seen.exchange_ms:.2g} ms = {seen.exchange_share:.0%} of a "
                f"{'prompt' if seen.role == 'prefill' else 'step'})"
            )
        if seen.touched_share is not None:
            text += f", a step reads {seen.touched_share:.0%} of the experts"
        parts.append(text)
    hits = "recorded hits" if plan.mixture.recorded_hits else "all experts hit alike (--expert-hits FILE for yours)"
    lines = [f"experts, {hits}: " + "; ".join(parts)]
    return lines if plan.mixture.flips else [*lines, plan.mixture.instead]


def money_lines(plan: Plan) -> list[str]:
    """The cost in words; no lines without workers."""
    if plan.money is None:
        return []
    hour, million, unit = plan.money.per_hour, plan.money.per_million, plan.money.currency
    parts = (
        f"prefill {hour.prefill:.2f}, decode {hour.decode:.2f}, transfer {hour.transfer:.2f}, "
        f"scheduling and idle {hour.scheduling_and_idle:.2f}"
    )
    meters = (
        f"prefill computed {million.prefill_computed:.3f}, cached {million.prefill_cached:.3f}, "
        f"decode {million.decode:.3f}"
    )
    lines = [f"cost per hour {hour.total:.2f} {unit}: {parts}", f"cost per million tokens: {meters} {unit}"]
    if plan.day is not None:
        least = min(plan.day.levels, key=lambda level: level.price_per_hour)
        lines.append(
            f"over the day: {plan.day.fixed:.2f} {unit} fixed for the busiest hour, {plan.day.following:.2f} with the "
            f"curve ({plan.day.following / plan.day.fixed - 1:+.0%}; down to {least.workers} for {least.hours:g} h)"
        )
    if plan.money.margin is not None and plan.money.revenue_per_hour is not None:
        lines.append(f"revenue per hour {plan.money.revenue_per_hour:.2f} {unit}, margin {plan.money.margin:.0%}")
    if plan.smallest_unified and plan.smallest_split:
        lines.append(
            f"smallest fleets for this rate: {plan.smallest_unified.workers} at "
            f"{plan.smallest_unified.price_per_hour:.2f}, {plan.smallest_split.workers} at "
            f"{plan.smallest_split.price_per_hour:.2f} {unit}/h"
        )
    return lines


def share(value: float | None) -> str:
    """A gain in words."""
    return "unbounded" if value is None or math.isinf(value) else f"{value:+.0%}"


def _options(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("option", "workers", "requests/s", "gain", "attained", "per hour"):
        table.add_column(column, justify="left" if column in ("option", "workers") else "right")
    one = "" if "," in plan.fleet else " on " + plan.fleet.partition("x")[2]
    for option in plan.options:
        if not option.capacity_rps:
            table.add_row(option.name, option.note, "-", "-", "-", "-")
            continue
        table.add_row(
            option.name,
            option.workers.replace(one, "") if one else option.workers,
            f"{option.capacity_rps:.2f}",
            share(option.gain),
            f"{option.attainment:.0%}",
            price(option),
        )
    return table


def _drift(plan: Plan) -> str:
    known = [d for d in plan.workload.drift if d.p95_over_p5 is not None]
    return f" (P95 of {known[-1].window_s:.0f} s windows {known[-1].p95_over_p5:.1f} x P5)" if known else ""


def _tokens(size: int | None) -> str:
    return "any size" if size is None else f"{size / 1e6:g}M"


def _row(of: Percentiles) -> str:
    return f"{of.p50:.0f} / {of.p95:.0f} / {of.p99:.0f} ms"
