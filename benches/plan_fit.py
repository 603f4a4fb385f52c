"""How well the planner's latency model predicts systems it never saw: `python -m benches.plan_fit`.

Each group (model and GPU) is predicted by a fit on all the others. `--write` stores the fit over all rows as the
planner's defaults.
"""

import argparse
import tomllib
from collections.abc import Sequence

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
    if options.json:
        print(
            msgspec.json.format(msgspec.json.encode({"dropped": dropped, "held_out": reports, "fit": found})).decode()
        )
    else:
        _print(rows, dropped, reports)
    if options.write:
        FITTED.write_text(HEADER + to_toml(found))
    elif not options.json:
        same = tomllib.loads(FITTED.read_text()) == tomllib.loads(to_toml(found))
        print(f"{FITTED.name} is {'this fit' if same else 'another fit: run with --write'}")


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
        for column in ("held-out group", "rows", "MAPE", "median", "bias", ""):
            table.add_column(column, justify="left" if column in ("held-out group", "") else "right")
        for g in report.groups:
            verdict = "" if not g.claimed else ("within" if g.mape <= BARS[name] else "beyond the bar")
            note = verdict or f"under {CLAIM_ROWS} rows: not claimed"
            table.add_row(g.group, str(g.rows), f"{g.mape:.1%}", f"{g.median:.1%}", f"{g.bias:+.1%}", note)
        claimed = [g.mape <= BARS[name] for g in report.groups if g.claimed]
        within = f"{sum(claimed)} of {len(claimed)} claimed groups within"
        table.add_row("all", str(report.rows), f"{report.mape:.1%}", f"{report.median:.1%}", "", within)
        console.print(table)
        console.print()


if __name__ == "__main__":
    main()
