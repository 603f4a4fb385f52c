"""The table of a run: what is printed, written to benches/results/chaos.json, and shown in docs/chaos.md."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.chaos.rounds import Round

RESULTS = Path(__file__).parents[1] / "results" / "chaos.json"
PAGE = Path(__file__).parents[2] / "docs" / "chaos.md"
BEGIN, END = "<!-- chaos: begin (python -m benches.chaos.report) -->", "<!-- chaos: end -->"
HARM = ("lost", "refused", "wrong", "stuck", "uncharged", "doubled", "unbalanced", "kept", "unwell")
_COLUMNS = "{:<44} {:>5} {:>9} {:>9} {:>7}  {}"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of them do not exceed; 0 without any."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3) if ordered else 0.0


def head() -> str:
    """Return the heading of the printed table."""
    return _COLUMNS.format("fault", "calls", "detected", "recovered", "whole", "harm")


def line(done: Round) -> str:
    """Return a round as a line of the printed table."""
    harm = ", ".join(f"{name} {count}" for name in HARM if (count := getattr(done.account, name)))
    detected = "-" if done.detected_s is None else f"{done.detected_s:.2f} s"
    told = ", ".join(f"{count} {what}" for what, count in sorted(done.account.told.items()) if what != "done")
    return _COLUMNS.format(
        done.fault,
        done.calls,
        detected,
        f"{done.recovered_s:.2f} s",
        f"{done.whole_s:.1f} s",
        (f"HARM {harm}" if harm else "none")
        + (f"  ({done.void} void)" if done.void else "")
        + (f"  (clients saw: {told})" if told else ""),
    )


def summary(rounds: Sequence[Round], *, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written: totals, and one row for each fault of the plan that was done."""
    by_fault: dict[str, list[Round]] = {}
    for done in rounds:
        by_fault.setdefault(done.fault, []).append(done)
    totals = {name: sum(getattr(done.account, name) for done in rounds) for name in HARM}
    deaths = [done.recovered_s for done in rounds if done.death]
    return {
        "faults": len(rounds),
        "lost": totals["lost"] + totals["stuck"] + totals["refused"] + totals["uncharged"],
        "doubled": totals["doubled"] + totals["unbalanced"],
        "wrong": totals["wrong"],
        "kept": totals["kept"],
        "unwell": totals["unwell"],
        "void": sum(done.void for done in rounds),
        "calls": sum(done.calls for done in rounds),
        "recovery_s": {"p50": quantile(deaths, 0.5), "p99": quantile(deaths, 0.99), "of": "single-process deaths"},
        **about,
        "rows": [_row(name, done) for name, done in sorted(by_fault.items())],
        "rounds": [_kept(done) for done in rounds],
    }


def text_of(result: Mapping[str, Any]) -> str:
    """Return the file of a result: one line for each row and each round."""
    lists = {name: result[name] for name in ("runs", "rows", "rounds")}
    head = json.dumps({name: value for name, value in result.items() if name not in lists}, ensure_ascii=False)
    parts = [head[:-1]]
    for name, rows in lists.items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        parts.append(f', "{name}": [\n{lines}\n]')
    return "".join(parts) + "}\n"


def _kept(done: Round) -> dict[str, Any]:
    """Return a round without what a good one need not tell."""
    account = {name: n for name in HARM if (n := getattr(done.account, name))} | {"told": done.account.told}
    if done.account.bad:
        account["notes"] = done.account.notes[:5]
    return {
        "fault": done.fault,
        "calls": done.calls,
        "detected_s": None if done.detected_s is None else round(done.detected_s, 3),
        "recovered_s": round(done.recovered_s, 3),
        "whole_s": round(done.whole_s, 2),
        "account": account,
        "death": done.death,
        **({"void": done.void} if done.void else {}),
    }


def _row(name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    detected = [done.detected_s for done in rounds if done.detected_s is not None]
    recovered = [done.recovered_s for done in rounds]
    told: dict[str, int] = {}
    for done in rounds:
        for what, count in done.account.told.items():
            told[what] = told.get(what, 0) + count
    return {
        "fault": name,
        "times": len(rounds),
        "calls": sum(done.calls for done in rounds),
        "clients_saw": told,
        "detected_s": {"p50": quantile(detected, 0.5), "max": quantile(detected, 1)} if detected else None,
        "recovered_s": {"p50": quantile(recovered, 0.5), "max": quantile(recovered, 1)},
        "harm": {what: n for what in HARM if (n := sum(getattr(done.account, what) for done in rounds))},
        "notes": [note for done in rounds if done.account.bad for note in done.account.notes][:10],
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the table of docs/chaos.md."""
    told = result["recovery_s"]
    commands = " and ".join(f"`{run['command']}`" for run in result["runs"])
    loads = " and ".join(run["machine"].rpartition(" ")[2] for run in result["runs"])
    totals = (
        f"{result['faults']} faults, {result['calls']:,} calls: {result['wrong']} wrong, {result['lost']} lost,"
        f" {result['doubled']} doubled, {result['kept']} things kept, {result['unwell']} things not ready again."
        f" Recovery after the death of one process: p50 {told['p50']} s, p99 {told['p99']} s."
        f" {result['void']} rounds were void and done again."
        f" Printed by {commands}; the machine was shared: load average {loads} on its cores."
    )
    lines = [
        totals,
        "",
        "| Fault | Times | Calls | Clients saw | Detected, s (max) | Recovered, s (max) | Harm |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        saw = ", ".join(f"{n} {what}" for what, n in sorted(row["clients_saw"].items()) if what != "done") or "nothing"
        detected = f"{row['detected_s']['p50']:g} ({row['detected_s']['max']:g})" if row["detected_s"] else "-"
        recovered = f"{row['recovered_s']['p50']:g} ({row['recovered_s']['max']:g})"
        harm = ", ".join(f"{n} {what}" for what, n in row["harm"].items()) or "none"
        lines.append(
            f"| {row['fault']} | {row['times']} | {row['calls']} | {saw} | {detected} | {recovered} | {harm} |"
        )
    if result["skipped"]:
        lines += ["", "Left out on that machine: " + "; ".join(f"{n} ({why})" for n, why in result["skipped"].items())]
    return "\n".join(lines)


def page(text: str, result: Mapping[str, Any]) -> str:
    """Return the page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(result)}\n\n{END}{after}"


def main() -> None:
    """Write the table of the committed result into docs/chaos.md."""
    PAGE.write_text(page(PAGE.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
