"""How well the planner's latency model predicts systems it never saw: `python -m benches.plan_fit`.

Each group (model and GPU) is predicted by a fit on all the others. `--write` stores the fit over all rows as the
planner's defaults.
"""

import argparse
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from contracts.roofline import Efficiency
from pdgate.plan.fit import (
    CLAIM_ROWS,
    FITTED,
    HeldOut,
    efficiency,
    fit,
    fit_transfer,
    held_out,
    held_out_transfer,
)
from pdgate.plan.measured import Measured, read_silicon, read_transfers
from pdgate.plan.workload import mean, percentile

BARS = {"TTFT, unloaded": 0.20, "TPOT": 0.12, "TPOT, 3 points calibrated": 0.12, "KV transfer": 0.08}
HEADER = """# Factors between the roofline and measurements, fitted by `python -m benches.plan_fit --write`.
# Their errors on held-out groups: docs/planner.md. Your own: `pdgate plan --fit FILE` with a file like this one.
"""


def main() -> None:
    """Print the errors per held-out group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the fit in {FITTED.name}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows, dropped = read_silicon()
    transfers = read_transfers()
    found_errors = held_out(rows)
    reports = {
        "TTFT, unloaded": found_errors.ttft,
        "TPOT": found_errors.tpot,
        "TPOT, 3 points calibrated": found_errors.tpot_calibrated,
        "KV transfer": held_out_transfer(transfers),
    }
    found = efficiency(fit(rows), fit_transfer(transfers))
    floor, apart = floor_of(rows), spreads_of(rows)
    if options.json:
        whole = {"dropped": dropped, "held_out": reports, "tpot_floor": floor, "tpot_spread": apart, "fit": found}
        print(msgspec.json.format(msgspec.json.encode(whole)).decode())
    else:
        _print(rows, dropped, reports)
        print(
            f"TPOT, what is left: {floor.unseen:.1%} for unseen groups, {floor.seen:.1%} with nothing held out,\n"
            f"{floor.scaled_by_group:.1%} unseen but with the best factor for each model and GPU,\n"
            f"{floor.scaled_by_release:.1%} with the best factor for each model, GPU, engine release and format\n\n"
            f"TPOT, with one measured row of the group (not held out): {floor.one_row_of_group:.1%} on the others\n"
            f"of the model and GPU, {floor.one_row_of_release:.1%} on the others of its engine release and format\n"
        )
        for name, spread in apart.items():
            print(
                f"one figure for all {name}: {spread.mape:.1%} at best (median {spread.median:.1%}, P90 "
                f"{spread.p90:.1%}; {spread.settings} settings, {spread.values} figures)"
            )
        print()
    if options.write:
        FITTED.write_text(HEADER + to_toml(found))
    elif not options.json:
        same = tomllib.loads(FITTED.read_text()) == tomllib.loads(to_toml(found))
        print(f"{FITTED.name} is {'this fit' if same else 'another fit: run with --write'}")


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps TPOT's error up, MAPE: from the figure for unseen groups down to what no feature could remove."""

    unseen: float  # each group by a fit without it
    seen: float  # by the fit over all rows: nothing held out
    scaled_by_group: float  # unseen, then the best single factor for each model and GPU, known only afterwards
    scaled_by_release: float  # unseen, then the best single factor for each model, GPU, engine release and format
    one_row_of_group: float  # unseen, then scaled by one measured row of the model and GPU, the mean over its choices
    one_row_of_release: float  # the same within an engine release and format


def floor_of(rows: Sequence[Measured]) -> Floor:
    """Return the error under ever more knowledge of the group in question."""
    whole = fit(rows)
    ratios: dict[int, float] = {}
    for group in sorted({r.group for r in rows}):
        found = fit([r for r in rows if r.group != group])
        ratios |= {i: found.tpot_ms(r) / r.tpot_ms for i, r in enumerate(rows) if r.group == group}

    def sets_of(key: Callable[[Measured], object]) -> list[list[float]]:
        sets: dict[object, list[float]] = defaultdict(list)
        for i, row in enumerate(rows):
            sets[key(row)].append(ratios[i])
        return list(sets.values())

    def scaled(key: Callable[[Measured], object]) -> float:
        return mean([abs(r / percentile(sorted(s), 0.5) - 1) for s in sets_of(key) for r in s])

    return Floor(
        unseen=mean([abs(r - 1) for r in ratios.values()]),
        seen=mean([abs(whole.tpot_ms(r) / r.tpot_ms - 1) for r in rows]),
        scaled_by_group=scaled(lambda r: r.group),
        scaled_by_release=scaled(_release),
        one_row_of_group=one_row_error(sets_of(lambda r: r.group)),
        one_row_of_release=one_row_error(sets_of(_release)),
    )


def one_row_error(sets: Iterable[Sequence[float]]) -> float:
    """Return the MAPE of all rows but one of a set, scaled so that the one is right: the mean over each choice of it.

    Args:
        sets: predicted over measured, set by set; sets of one row have no others.
    """
    errors = []
    for ratios in sets:
        others = len(ratios) - 1
        if others:
            errors += [sum(abs(r / one - 1) for one in ratios) / others for r in ratios]
    return mean(errors)


def _release(row: Measured) -> tuple[str, ...]:
    return row.group, row.engine, row.version, row.use.weights


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How far measurements of one setting lie from their median: no model that gives one figure does better."""

    settings: int
    values: int
    mape: float
    median: float
    p90: float


def spreads_of(rows: Sequence[Measured]) -> dict[str, Spread]:
    """Return the spread of TPOT between runs, releases and engines that share lengths, GPUs, format and load."""

    def setting(row: Measured) -> tuple[object, ...]:
        use = row.use.gpus, row.use.attention_dp, row.use.weights  # the cache's format is the engine's own
        return row.group, use, row.concurrency, row.prompt_tokens, row.output_tokens

    runs = [((*setting(r), r.engine, r.version), r.tpot_ms) for r in rows]
    releases = _medians(runs)
    engines = _medians((key[:-1], tpot) for key, tpot in releases)
    return {
        "runs of one release": spread_of(runs),
        "releases of one engine": spread_of((key[:-1], tpot) for key, tpot in releases),
        "engines": spread_of((key[:-1], tpot) for key, tpot in engines),
    }


def spread_of(figures: Iterable[tuple[tuple[object, ...], float]]) -> Spread:
    """Return the spread within each setting that has more than one figure."""
    several = [figures for figures in _by_setting(figures).values() if len(figures) > 1]
    errors = sorted(abs(percentile(sorted(s), 0.5) / value - 1) for s in several for value in s)
    return Spread(
        settings=len(several),
        values=len(errors),
        mape=mean(errors),
        median=percentile(errors, 0.5),
        p90=percentile(errors, 0.9),
    )


def _medians(figures: Iterable[tuple[tuple[object, ...], float]]) -> list[tuple[tuple[object, ...], float]]:
    return [(key, percentile(sorted(values), 0.5)) for key, values in _by_setting(figures).items()]


def _by_setting(figures: Iterable[tuple[tuple[object, ...], float]]) -> dict[tuple[object, ...], list[float]]:
    found: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for key, value in figures:
        found[key].append(value)
    return found


def to_toml(found: Efficiency) -> str:
    """Return the factors as TOML with five significant digits."""
    values = msgspec.to_builtins(found)
    fronts = values.pop("front_ms")
    lines = [f"{name} = {value:.5g}" for name, value in values.items()]
    lines.append("[front_ms]")
    lines += [f"{name} = {value:.5g}" for name, value in fronts.items()]
    return "\n".join(line.replace("= 0\n", "= 0.0\n") for line in lines) + "\n"


def _print(rows: Sequence[Measured], dropped: msgspec.Struct, reports: dict[str, HeldOut]) -> None:
    console = Console(width=110)
    left_out = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in msgspec.to_builtins(dropped).items())
    console.print(f"{len(rows)} measured runs; left out: {left_out}\n")
    for name, report in reports.items():
        table = Table(title=f"{name} (bar: {BARS[name]:.0%} MAPE)", title_justify="left", box=None)
        for column in ("held-out group", "rows", "MAPE", "median", "bias", "without bias", ""):
            table.add_column(column, justify="left" if column in ("held-out group", "") else "right")
        for g in report.groups:
            verdict = "" if not g.claimed else ("within" if g.mape <= BARS[name] else "beyond the bar")
            note = verdict or f"under {CLAIM_ROWS} rows: not claimed"
            errors = (f"{g.mape:.1%}", f"{g.median:.1%}", f"{g.bias:+.1%}", f"{g.mape_without_bias:.1%}")
            table.add_row(g.group, str(g.rows), *errors, note)
        claimed = [g.mape <= BARS[name] for g in report.groups if g.claimed]
        within = f"{sum(claimed)} of {len(claimed)} claimed groups within"
        table.add_row("all", str(report.rows), f"{report.mape:.1%}", f"{report.median:.1%}", "", "", within)
        console.print(table)
        console.print()


if __name__ == "__main__":
    main()
