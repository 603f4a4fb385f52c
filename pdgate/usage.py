"""`pdgate usage`: what was metered lately, by organisation and model, and the newest requests."""

import asyncio
import re
import time
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from billing.database import create_engine
from billing.moments import moment
from billing.queries import (
    RequestRow,
    UsageTotal,
    recent_requests,
    recent_requests_across_tenants,
    usage_totals,
    usage_totals_across_tenants,
)
from contracts.catalog import NANO_PER_UNIT, read_catalog
from contracts.rating import Meter
from pdgate.connection import database_url
from pdgate.layout import catalog_file
from pdgate.output import AsJson, show_json

_WIDE_COLUMNS: Final = 250
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class ModelUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one organisation and model. Tokens include what was not billed; `cost_nano` in nano-units."""

    organisation: str
    model: str
    requests: int
    prefill_computed: int
    prefill_cached: int
    decode: int
    cost_nano: int


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `pdgate usage --json` prints."""

    since: str
    models: tuple[ModelUsage, ...]
    requests: tuple[RequestRow, ...]


usage_app = typer.Typer(
    help="Metered tokens and cost by organisation and model, and the newest requests.", invoke_without_command=True
)


@usage_app.callback()
def usage(
    context: typer.Context,
    since: Annotated[str, typer.Option(help="How far back: 90s, 15m, 1h, 7d.")] = "1h",
    org: Annotated[str | None, typer.Option(help="Id of an organisation; all if absent.")] = None,
    requests: Annotated[int, typer.Option(min=0, max=1000, help="How many of the newest requests to list.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show metered tokens and cost by organisation and model, and the newest requests."""
    if context.invoked_subcommand is not None:
        return
    try:
        since_s = parse_span_s(since)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--since") from None
    report = asyncio.run(usage_report(database_url(), since_s, org, num_requests=requests))
    print_usage(report, currency=read_catalog(catalog_file()).currency, as_json=as_json)


def parse_span_s(text: str) -> float:
    """Return the seconds of a span such as 90s, 15m, 1h or 7d. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a span: write 90s, 15m, 1h or 7d")
    return float(found[1]) * _UNIT_S[found[2]]


async def usage_report(url: str, since_s: float, org: str | None = None, *, num_requests: int = 20) -> UsageReport:
    """Return what was metered in the last `since_s` seconds, for one organisation or for all."""
    since_ms = int((time.time() - since_s) * 1000)
    engine = create_engine(url, pool_size=1)
    try:
        async with engine.connect() as conn:
            if org is None:
                totals = await usage_totals_across_tenants(conn, since_ms)
                newest = await recent_requests_across_tenants(conn, since_ms, num_requests)
            else:
                totals = await usage_totals(conn, org, since_ms)
                newest = await recent_requests(conn, org, since_ms, num_requests)
    finally:
        await engine.dispose()
    return UsageReport(since=moment(since_ms).isoformat(), models=_by_model(totals), requests=tuple(newest))


def print_usage(report: UsageReport, *, currency: str, as_json: bool = False) -> None:
    """Print a report: JSON for programs, two tables for people."""
    if as_json:
        show_json(report)
        return
    console = wide_console()
    if not report.models:
        console.print(f"nothing metered since {report.since}")
        return
    console.print(_models_table(report, currency))
    console.print()
    console.print(_requests_table(report, currency))


def _by_model(totals: list[UsageTotal]) -> tuple[ModelUsage, ...]:
    groups: dict[tuple[str, str], dict[str, UsageTotal]] = {}
    for total in totals:
        groups.setdefault((total.organisation, total.model), {})[total.meter] = total
    return tuple(
        ModelUsage(
            organisation=organisation,
            model=model,
            requests=max(total.requests for total in meters.values()),
            cost_nano=sum(total.cost for total in meters.values()),
            **{meter.value: meters[meter].tokens if meter in meters else 0 for meter in Meter},
        )
        for (organisation, model), meters in groups.items()
    )


def _models_table(report: UsageReport, currency: str) -> Table:
    table = Table(title=f"since {report.since}", box=None, header_style="bold", pad_edge=False, title_justify="left")
    table.add_column("organisation")
    table.add_column("model")
    for heading in ("requests", *Meter, f"cost {currency}"):
        table.add_column(heading, justify="right")
    for row in report.models:
        table.add_row(
            row.organisation,
            row.model,
            *(f"{number:,}" for number in (row.requests, row.prefill_computed, row.prefill_cached, row.decode)),
            money(row.cost_nano),
        )
    return table


def _requests_table(report: UsageReport, currency: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("request", no_wrap=True, min_width=36)
    for heading in ("at", "model", "path", "hand-off", "outcome"):
        table.add_column(heading)
    for heading in ("computed", "cached", "decode", currency, "TTFT ms", "TPOT ms"):
        table.add_column(heading, justify="right")
    for row in report.requests:
        tokens = {record.meter: record.tokens for record in row.meters}
        marks = "".join(mark for mark, is_so in ((" ~", row.estimated), (" sim", row.simulated)) if is_so)
        table.add_row(
            row.request_id,
            moment(row.at_ms).strftime("%H:%M:%S"),
            row.model,
            row.path or "-",
            row.hand_off or "-",
            f"{row.outcome}{f' ({row.cause})' if row.cause else ''}{marks}",
            *(str(tokens.get(meter, "-")) for meter in Meter),
            money(row.cost),
            "-" if row.timings is None else f"{row.timings.ttft_ms:.0f}",
            "-" if row.timings is None else f"{row.timings.tpot_ms:.1f}",
        )
    return table


def wide_console() -> Console:
    """Return a console that cuts nothing short when it writes to a file or a pipe."""
    return Console(highlight=False, width=None if Console().is_terminal else _WIDE_COLUMNS)


def money(nano: int) -> str:
    """Return nano-units as currency units, exactly."""
    sign, (whole, rest) = "-" if nano < 0 else "", divmod(abs(nano), NANO_PER_UNIT)
    return f"{sign}{whole}.{rest:09d}".rstrip("0").rstrip(".")
