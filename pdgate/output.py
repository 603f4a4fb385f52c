"""How the command line prints data: a table for people, JSON for programs."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

_WIDE: Final = 4096

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def show(rows: Sequence[msgspec.Struct], *, as_json: bool, empty: str = "nothing to show") -> None:
    """Print records of one kind.

    Args:
        rows: one line each; the fields are the columns.
        as_json: print a JSON list.
        empty: what to say to people when there are none.
    """
    if as_json:
        show_json(rows)
    elif not rows:
        typer.echo(empty)
    else:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for field in rows[0].__struct_fields__:
            table.add_column(field, overflow="fold")
        for row in rows:
            table.add_row(*(_cell(getattr(row, field)) for field in row.__struct_fields__))
        data_console().print(table)


def data_console() -> Console:
    """Return a console that folds long values on a terminal and leaves them whole elsewhere."""
    width = None if sys.stdout.isatty() else _WIDE
    return Console(width=width, highlight=False)


def show_json(value: Any) -> None:
    """Print one value as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
