"""`pdgate bench compare`: whether runs really differ."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pdgate.bench.compare import Comparison, Difference, NotComparable
from pdgate.bench.compare import compare as compare_runs
from pdgate.bench.records import RunError, read_run
from pdgate.output import show_json
from pdgate.preflight import CannotStart


def compare(
    files: Annotated[
        list[str], typer.Argument(help="Results; runs of one side joined by commas: A1.json,A2.json B.json")
    ],
    seed: Annotated[int, typer.Option(help="Of the resampling.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare each of the runs with the first one, and say which differences are real."""
    if len(files) < 2:
        raise CannotStart("give two or more results files")
    try:
        sides = [[read_run(Path(name)) for name in side.split(",")] for side in files]
        found = [one for side in sides[1:] for one in compare_runs(sides[0], side, seed=seed)]
    except (RunError, NotComparable) as error:
        raise CannotStart(str(error)) from None
    if as_json:
        show_json(found)
        return
    console = Console(highlight=False)
    for number, one in enumerate(found):
        console.print("\n" if number else "", end="")
        _print(one, console)


def _print(one: Comparison, console: Console) -> None:
    console.print(
        f"[bold]{one.second}[/bold] against [bold]{one.first}[/bold], {one.step} "
        f"({one.requests[1]:,} and {one.requests[0]:,} requests in {one.runs[1]} and {one.runs[0]} runs)"
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", one.first, one.second, "change", "difference, 95 %", ""):
        table.add_column(column, justify="left" if not column else "right")
    for found in one.differences:
        table.add_row(
            f"{found.measure}, {found.unit}" if found.unit else found.measure,
            _number(found.first),
            _number(found.second),
            "-" if found.change is None else f"{found.change:+.1%}",
            f"{_number(found.low, '+')} to {_number(found.high, '+')}",
            _verdict(found),
        )
    console.print(table)
    real = [found.measure for found in one.differences if found.real]
    console.print(f"real: {', '.join(real)}" if real else "no difference that these requests can show")
    for caution in one.cautions:
        console.print(f"[yellow]caution:[/yellow] {caution}")


def _verdict(found: Difference) -> str:
    if not found.real:
        return "not shown"
    return "[green]better[/green]" if found.better else "[red]worse[/red]"


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign},.1f}" if abs(value) >= 100 else f"{value:{sign},.3f}"
