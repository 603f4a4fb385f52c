"""`pdgate reconcile`: compare what was billed with the ledger and with the workers' own counts."""

import asyncio
import time
from datetime import UTC, date, datetime, timedelta
from typing import Annotated

import typer
from rich.table import Table

from billing.reconcile import GRACE_S, Reconciliation, reconcile_database
from contracts.catalog import read_catalog
from pdgate.connection import database_url
from pdgate.layout import catalog_file
from pdgate.output import AsJson, show_json
from pdgate.usage import money, wide_console

EXIT_DRIFT = 1
_LISTED = 50


def reconcile(
    day: Annotated[str | None, typer.Option(help="UTC day, YYYY-MM-DD; yesterday and today if absent.")] = None,
    org: Annotated[str | None, typer.Option(help="Id of an organisation; all if absent.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that records may still be under way.")] = GRACE_S,
    as_json: AsJson = False,
) -> None:
    """Compare usage, ledger, prices, answers and workers' counts by tenant and day; exit 1 on drift."""
    today = datetime.now(UTC).date()
    first, last = (today - timedelta(days=1), today) if day is None else (_day(day),) * 2
    found = asyncio.run(
        reconcile_database(
            database_url(),
            from_day=first,
            to_day=last,
            now_ms=int(time.time() * 1000),
            organisation=org,
            grace_s=grace,
        )
    )
    if as_json:
        show_json(found)
    else:
        _print(found, read_catalog(catalog_file()).currency)
    if found.drift:
        raise typer.Exit(EXIT_DRIFT)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a day: write YYYY-MM-DD", param_hint="--day") from None


def _print(found: Reconciliation, currency: str) -> None:
    console = wide_console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("organisation", "day"):
        table.add_column(heading)
    for heading in (
        "requests",
        "tokens",
        "billed",
        "confirmed",
        f"usage {currency}",
        f"ledger {currency}",
        f"rollup {currency}",
    ):
        table.add_column(heading, justify="right")
    table.add_column("agrees")
    for row in found.days:
        table.add_row(
            row.organisation,
            row.day.isoformat(),
            f"{row.requests:,}",
            f"{row.tokens:,}",
            f"{row.billed_tokens:,}",
            f"{row.confirmed_tokens:,}",
            *(money(nano) for nano in (row.usage_cost, row.ledger_cost, row.rollup_cost)),
            "yes" if row.agrees else "NO",
        )
    console.print(table if found.days else f"nothing metered from {found.from_day} to {found.to_day}")
    for one in found.differences[:_LISTED]:
        console.print(f"{one.kind}: {one.request_id} {one.organisation} {one.detail}", markup=False)
    if len(found.differences) > _LISTED:
        console.print(f"... and {len(found.differences) - _LISTED} more: --json lists them")
    console.print("[red]drift[/red]" if found.drift else "no drift")
