"""Figures and tables of benches.autoscale: what its results say, and how docs/autoscaling.md shows them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "autoscale.json"
HELD_OUT = 100
"""Seeds from here on were not looked at while the policy was made."""


def figures_of(rows: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the results: sums over all seeds and over the held-out ones, then every row."""
    return {
        **{key: more[key] for key in ("day_hours", "boot_s")},
        "all": sum_of(rows),
        "held_out": sum_of([row for row in rows if row["seed"] >= HELD_OUT]),
        **{key: value for key, value in more.items() if key not in ("day_hours", "boot_s")},
        "days": list(rows),
    }


def sum_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what some days come to together."""
    requests = sum(row["requests"] for row in rows)
    compared = [row for row in rows if row["oracle_hours"] is not None]
    hours, oracle = (sum(row[key] for row in compared) for key in ("worker_hours", "oracle_hours"))
    return {
        "seeds": sorted({row["seed"] for row in rows}),
        "requests": requests,
        "attainment": round(sum(row["attainment"] * row["requests"] for row in rows) / max(1, requests), 4),
        "lowest_attainment": min((row["attainment"] for row in rows), default=None),
        "worker_hours": round(hours, 1),
        "oracle_hours": round(oracle, 1),
        "over_oracle": round(hours / oracle, 3) if oracle else None,
        "over_oracle_of_each_slot": round(hours / sum(row["hours_of_each_slot"] for row in compared), 3)
        if oracle
        else None,
        "highest_over_oracle": max((row["over_oracle"] for row in compared), default=None),
        "most_events_per_5min": max((row["events_per_5min"] for row in rows), default=None),
    }


def read() -> dict[str, Any]:
    """Return the results that are committed."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def table_of_days(figures: Mapping[str, Any]) -> str:
    """Return the days as a table: each model over all its seeds, the lowest and highest of them."""
    lines = [
        "| | Attainment | Worker-hours over the oracle's | over those with 95 % in each slot | Scale events in 5 min |",
        "|---|---|---|---|---|",
    ]
    for name in figures["played"]:
        rows = [row for row in figures["days"] if row["model"] == name]
        lines.append(
            f"| {name} | {span_of(rows, 'attainment', percent=True)} | {span_of(rows, 'over_oracle')}"
            f" | {span_of(rows, 'over_oracle_of_each_slot')} | {span_of(rows, 'events_per_5min')} |"
        )
    for name, of in (("all, every seed", figures["all"]), ("all, held-out seeds", figures["held_out"])):
        if not of["seeds"]:
            continue
        lines.append(
            f"| {name} ({', '.join(str(seed) for seed in of['seeds'])}) | {100 * of['attainment']:.1f} %"
            f" | {of['over_oracle']:.2f} | {of['over_oracle_of_each_slot']:.2f}"
            f" | at most {of['most_events_per_5min']:.2f} |"
        )
    return "\n".join(lines)


def table_of_steady_load(figures: Mapping[str, Any]) -> str:
    """Return what happens under one rate, as a table."""
    lines = ["| Steady load | Requests/s | Attainment | Scale events |", "|---|---|---|---|"]
    for name, steady in figures["steady"].items():
        lines.append(
            f"| {name} | {steady['rate_rps']:g} | {100 * steady['attainment']:.1f} %"
            f" | {steady['events']} in {steady['runs']} times {steady['hours'] - 0.5:g} h,"
            f" {steady['events_while_settling']} before |"
        )
    return "\n".join(lines)


def span_of(rows: Sequence[Mapping[str, Any]], key: str, *, percent: bool = False) -> str:
    """Return the lowest and the highest value of some rows, as a cell."""
    values = [row[key] for row in rows if row[key] is not None]
    if not values:
        return "not searched"
    low, high = min(values), max(values)
    if low == high:
        return f"{100 * low:.1f} %" if percent else f"{low:.2f}"
    if percent:
        return f"{100 * low:.1f} to {100 * high:.1f} %"
    return f"{low:.2f} to {high:.2f}"
