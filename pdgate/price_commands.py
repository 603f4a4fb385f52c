"""`pdgate prices`."""

import asyncio
import datetime as dt
from typing import Annotated

import msgspec
import typer

from billing.prices import PriceVersion, list_prices
from contracts.catalog import NANO_PER_UNIT, read_catalog
from contracts.rating import Meter
from contracts.units import NanoPerMillion
from pdgate.connection import open_database
from pdgate.layout import catalog_file
from pdgate.output import AsJson, show

prices = typer.Typer(help="The price book: versions with dates, never changed.", no_args_is_help=True)


class PriceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A price version as it is printed: currency units per million tokens."""

    model: str
    version: int
    organisation: str | None
    currency: str
    prefill_computed: str
    prefill_cached: str
    decode: str
    effective_from: str | None
    effective_to: str | None
    source: str
    set_by: str


@prices.command("list")
def list_all(
    model: Annotated[str | None, typer.Option(help="Public name of a model; all if absent.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of the price book, newest first."""
    currency = read_catalog(catalog_file()).currency

    async def run() -> list[PriceVersion]:
        async with open_database() as database, database.begin() as connection:
            return await list_prices(connection, model)

    show([_row(version, currency) for version in asyncio.run(run())], as_json=as_json, empty="no prices yet")


def _row(version: PriceVersion, currency: str) -> PriceRow:
    return PriceRow(
        model=version.price.model,
        version=version.price.version,
        organisation=version.organisation,
        currency=currency,
        effective_from=_when(version.from_ms),
        effective_to=_when(version.to_ms),
        source=version.source,
        set_by=version.set_by,
        **{meter.value: _amount(version.price.of(meter)) for meter in Meter},
    )


def _amount(nano: NanoPerMillion) -> str:
    """Return a price as decimal text, exactly."""
    whole, rest = divmod(nano, NANO_PER_UNIT)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".")


def _when(unix_ms: int | None) -> str | None:
    """Return a moment in ISO 8601; None for one that was or will never be."""
    if not unix_ms:  # a model's first price starts at the epoch
        return None
    return dt.datetime.fromtimestamp(unix_ms / 1000, dt.UTC).isoformat(timespec="seconds")
