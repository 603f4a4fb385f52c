"""Medians and spreads over the rounds, as JSON and as a table whose first lines are where pdgate loses."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from benches.__main__ import percentile
from benches.peers.loads import Cost, Round

LESS_IS_BETTER = {
    "cpu_us_per_token": True,
    "cpu_us_per_token_common": True,
    "cpu_us_per_request": True,
    "added_ttfb_p50_ms": True,
    "added_ttfb_p99_ms": True,
    "added_ttfb_p50_ms_quick_ack": True,
    "added_ttfb_p99_ms_quick_ack": True,
    "tokens_per_s": False,
    "requests_per_s": False,
}
TITLES = {
    "cpu_us_per_token": "CPU us a token, 70 % load",
    "cpu_us_per_token_common": "CPU us a token, 64 streams at 20 ms",
    "cpu_us_per_request": "CPU us a request, 70 % load",
    "added_ttfb_p50_ms": "added first byte P50, ms",
    "added_ttfb_p99_ms": "added first byte P99, ms",
    "added_ttfb_p50_ms_quick_ack": "the same P50, client acknowledges at once",
    "added_ttfb_p99_ms_quick_ack": "the same P99, client acknowledges at once",
    "tokens_per_s": "tokens/s at saturation",
    "requests_per_s": "requests/s of one token, 16 at once",
}


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return a system's figures: the median of its rounds, with the lowest and the highest."""
    added = [_added(r, "delayed ack") for r in rounds]
    quick = [_added(r, "quick ack") for r in rounds]
    common = [r.common for r in rounds if r.common is not None]
    return {
        "rounds": len(rounds),
        "cpu_us_per_token": _spread([r.loaded.system_us for r in rounds]),
        "cpu_us_per_token_common": _spread([one.system_us for one in common]) if common else None,
        "cpu_us_per_request": _spread([r.requests_loaded.system_us for r in rounds]),
        "added_ttfb_p50_ms": _spread([a["p50"] for a in added]),
        "added_ttfb_p99_ms": _spread([a["p99"] for a in added]),
        "added_ttfb_p50_ms_quick_ack": _spread([a["p50"] for a in quick]),
        "added_ttfb_p99_ms_quick_ack": _spread([a["p99"] for a in quick]),
        "tokens_per_s": _spread([r.saturated.per_s for r in rounds]),
        "requests_per_s": _spread([r.requests_saturated.per_s for r in rounds]),
        "worker_us_per_token": _spread([r.loaded.worker_us for r in rounds]),
        "client_us_per_token": _spread([r.loaded.client_us for r in rounds]),
        "worker_us_per_request": _spread([r.requests_loaded.worker_us for r in rounds]),
        "cpu_us_per_token_saturated": _spread([r.saturated.system_us for r in rounds]),
        "loaded": _load([r.loaded for r in rounds]),
        "requests_loaded_per_s": _spread([r.requests_loaded.per_s for r in rounds]),
        "us_per_token_by_process": rounds[-1].loaded.by_process_us,
        "us_per_request_by_process": rounds[-1].requests_loaded.by_process_us,
        "straight_ttfb_ms": {name: _shares(one.straight_ms) for name, one in rounds[-1].first_byte.items()},
        "through_ttfb_ms": {name: _shares(one.through_ms) for name, one in rounds[-1].first_byte.items()},
    }


def _added(one: Round, how: str) -> dict[str, float]:
    seen = one.first_byte[how]
    through, straight = _shares(seen.through_ms), _shares(seen.straight_ms)
    return {share: through[share] - straight[share] for share in through}


def _shares(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": round(percentile(list(values), share / 100), 3) for share in (50, 99)}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "low": round(min(values), 3), "high": round(max(values), 3)}


def _load(costs: Sequence[Cost]) -> dict[str, Any]:
    return {"streams": [one.connections for one in costs], "tokens_per_s": [round(one.per_s) for one in costs]}


def losses(found: Mapping[str, dict[str, Any]], ours: str) -> list[str]:
    """Return a line for each measure in which another system is better, the worst ratio first."""
    lines: list[tuple[float, str]] = []
    for measure, less in LESS_IS_BETTER.items():
        own = found[ours].get(measure)
        if own is None:
            continue
        for name, figures_ in found.items():
            other = figures_.get(measure)
            if name == ours or other is None:
                continue
            mine, theirs = own["median"], other["median"]
            if mine == theirs or (mine < theirs) == less:
                continue
            better, worse = (theirs, mine) if less else (mine, theirs)
            ratio = worse / better if better > 0 else float("inf")
            lines.append(
                (ratio, f"{TITLES[measure]}: {_number(mine)} against {_number(theirs)} of {name} ({ratio:.1f}x)")
            )
    return [line for _, line in sorted(lines, key=lambda pair: -pair[0])]


def table(found: Mapping[str, dict[str, Any]]) -> Table:
    """Return one column per system."""
    made = Table(title="medians (lowest to highest of the rounds)", title_justify="left")
    made.add_column("")
    for name in found:
        made.add_column(name, justify="right")
    for measure, title in {**TITLES, "worker_us_per_token": "worker's CPU us a token, apart"}.items():
        made.add_row(title, *(_cell(figures_.get(measure)) for figures_ in found.values()))
    return made


def markdown(found: Mapping[str, dict[str, Any]]) -> str:
    """Return the table for docs/performance.md."""
    names = list(found)
    rows = [f"| | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for measure, title in {**TITLES, "worker_us_per_token": "worker's CPU us a token, apart"}.items():
        rows.append(f"| {title} | " + " | ".join(_cell(found[name].get(measure)) for name in names) + " |")
    return "\n".join(rows)


def _cell(values: Mapping[str, float] | None) -> str:
    if values is None:
        return "-"
    return f"{_number(values['median'])} ({_number(values['low'])} to {_number(values['high'])})"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
