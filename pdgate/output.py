"""How the command line prints data: a table for people, JSON for programs."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

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
        table = Table(*rows[0].__struct_fields__, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*(_cell(getattr(row, field)) for field in row.__struct_fields__))
        Console(soft_wrap=True, highlight=False).print(table)


def show_json(value: Any) -> None:
    """Print one value as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
