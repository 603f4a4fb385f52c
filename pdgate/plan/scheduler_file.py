"""A plan as the scheduler's starting configuration, TOML."""

from typing import Any

import msgspec

from pdgate.plan.plan import Plan


def scheduler_toml(plan: Plan) -> str:
    """Return the roles, targets and cost coefficients that a scheduler starts from."""
    lines = [
        "# Starting configuration written by `pdgate plan`. Coefficients are those of contracts.perf (ms, tokens,",
        "# bytes); the scheduler refines them online within 50 % of these values.",
        f"# {plan.model} on {plan.fleet}: {plan.verdict}. {plan.reason}.",
        "",
        "[pool]",
        f"prefill = {plan.prefill}",
        f"decode = {plan.decode}",
        f"unified = {plan.unified}",
        f"hand_off = {_text(plan.hand_off or 'direct')}",
        f"short_prompt_tokens = {plan.short_prompt_tokens}  # up to so many uncached tokens go to unified workers",
        "",
        "[parallelism]",
        f"prefill = {plan.parallelism.prefill}",
        f"decode = {plan.parallelism.decode}",
        f"unified = {plan.parallelism.unified}",
        "",
        "[target]",
        f"attainment = {plan.attainment:g}",
    ]
    if plan.target.ttft_ms is not None:
        lines.append(f"ttft_ms = {plan.target.ttft_ms:g}")
    if plan.target.tpot_ms is not None:
        lines.append(f"tpot_ms = {plan.target.tpot_ms:g}")
    for role, latency in plan.latency.items():
        lines += _table(f"latency.{role}", msgspec.to_builtins(latency))
    return "\n".join([*lines, *_catalogue(plan)]) + "\n"


def _catalogue(plan: Plan) -> list[str]:
    """The part that goes into the catalogue, which gateway and scheduler read."""
    if not plan.latency:
        return []
    first = plan.latency.get("prefill") or plan.latency["unified"]
    then = plan.latency.get("decode") or plan.latency["unified"]
    costs = msgspec.structs.replace(then, prefill=first.prefill, transfer=first.transfer, front_ms=first.front_ms)
    model = f"models.{_text(plan.model)}"
    target = {name: getattr(plan.target, name) for name in ("ttft_ms", "tpot_ms")}
    lines = [
        "",
        "# For models.toml, under the model's own name: what gateway and scheduler start from. The pool's one set of",
        "# costs has the prefill workers' prefill and the decode workers' decode. To run it on one machine:",
        f"# pdgate up --prefill {plan.prefill} --decode {plan.decode} --unified {plan.unified}",
        *_steering(plan),
        f"[{model}]",
        f"hand_off = {_text(plan.hand_off or 'direct')}",
    ]
    kept = {name: value for name, value in target.items() if value is not None}
    if kept:
        lines += _table(f"{model}.tiers.default", kept)
    return lines + _table(f"{model}.latency", msgspec.to_builtins(costs))


def _steering(plan: Plan) -> list[str]:
    if plan.mixture is None or plan.mixture.flips:
        return []
    return ["# Roles do not flip with expert parallelism: SCHEDULER_RATIO_MODE=manual"]


def _table(name: str, values: dict[str, Any]) -> list[str]:
    lines = ["", f"[{name}]"]
    nested = []
    for key, value in values.items():
        if isinstance(value, dict):
            nested += _table(f"{name}.{key}", value)
        elif value is not None:  # TOML has no null
            lines.append(f"{key} = {value!r}")
    return lines + nested


def _text(value: str) -> str:
    return msgspec.json.encode(value).decode()
