"""`pdgate prices`."""

import asyncio
import datetime as dt
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from billing.moments import moment
from billing.periods import month_before
from billing.price_preview import Proposal, preview_price
from billing.prices import PriceError, PriceVersion, Terms, check_price, list_prices, price_of
from billing.rerating import Change, RerateError, Rerating, preview
from contracts.catalog import read_catalog
from contracts.rating import PPM, Meter
from contracts.units import Nano, NanoPerMillion
from contracts.v1 import billing_pb2 as pb
from pdgate.billing_admin import call, nano_of, ppm_of, who
from pdgate.connection import open_database
from pdgate.layout import catalog_file
from pdgate.output import AsJson, show
from pdgate.usage import money

prices = typer.Typer(help="The price book: versions with dates, never changed.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="Public name of the model.")]
From = Annotated[dt.datetime, typer.Option("--from", help="UTC moment, inclusive.")]
To = Annotated[dt.datetime, typer.Option("--to", help="UTC moment, exclusive.")]
Version = Annotated[int, typer.Option("--version", help="Price version to rate by: see `pdgate prices list`.")]
Tier = Annotated[str, typer.Option(help="Only for this tier.")]
Shared = Annotated[str, typer.Option(help="Cached tokens of a share group; as --cached if absent.")]
Batch = Annotated[str, typer.Option(help="What batch requests pay of it, for example 50%.")]
Minimum = Annotated[str, typer.Option(help="The least that a request costs.")]
OrgOrAll = Annotated[str, typer.Option("--org", help="Id of an organisation; all if absent.")]


class PriceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A price version as it is printed: currency units per million tokens; `minimum` per request."""

    model: str
    version: int
    organisation: str | None
    tier: str | None
    currency: str
    prefill_computed: str
    prefill_cached: str
    prefill_shared: str | None
    decode: str
    batch: str
    minimum: str
    effective_from: str | None
    effective_to: str | None
    source: str
    set_by: str


class ChangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a re-rating, or a price, changes; currency units."""

    organisation: str
    meter: str
    requests: int
    old: str
    new: str
    difference: str


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


@prices.command("set")
def set_one(  # noqa: PLR0917 - options have names
    model: Model,
    computed: Annotated[str, typer.Option(help="Currency units per million computed prompt tokens.")],
    cached: Annotated[str, typer.Option(help="The same for cached ones.")],
    decode: Annotated[str, typer.Option(help="The same for generated ones.")],
    org: Annotated[str, typer.Option("--org", help="Only for this organisation.")] = "",
    tier: Tier = "",
    shared: Shared = "",
    batch: Batch = "100%",
    minimum: Minimum = "0",
    begin: Annotated[dt.datetime | None, typer.Option("--from", help="UTC moment; now if absent.")] = None,
    end: Annotated[dt.datetime | None, typer.Option("--to", help="UTC moment; for ever if absent.")] = None,
    as_json: AsJson = False,
) -> None:
    """Add a version. It cannot start in the past: re-rate the period instead."""
    request = pb.PriceVersion(
        model=model,
        organisation=org,
        tier=tier,
        prefill_computed=nano_of(computed),
        prefill_cached=nano_of(cached),
        decode=nano_of(decode),
        batch_ppm=ppm_of(batch),
        minimum=nano_of(minimum),
        from_ms=_ms(begin),
        to_ms=_ms(end),
        by=who(),
    )
    if shared:
        request.prefill_shared = nano_of(shared)
    made = call("SetPrice", request)
    currency = read_catalog(catalog_file()).currency

    async def run() -> list[PriceVersion]:
        async with open_database() as database, database.begin() as connection:
            return await list_prices(connection, model)

    rows = [_row(one, currency) for one in asyncio.run(run()) if one.price.version == made.version]
    show(rows, as_json=as_json)


@prices.command("preview")
def show_preview(  # noqa: PLR0917 - options have names
    model: Model,
    computed: Annotated[str, typer.Option(help="A price that is not set: units per million computed tokens.")] = "",
    cached: Annotated[str, typer.Option(help="The same for cached ones.")] = "",
    decode: Annotated[str, typer.Option(help="The same for generated ones.")] = "",
    version: Annotated[int, typer.Option("--version", help="Instead: a version that is in the book.")] = 0,
    org: Annotated[str, typer.Option("--org", help="Only for this organisation.")] = "",
    tier: Tier = "",
    shared: Shared = "",
    batch: Batch = "100%",
    minimum: Minimum = "0",
    begin: Annotated[dt.datetime | None, typer.Option("--from", help="Of the usage; last month if absent.")] = None,
    end: Annotated[dt.datetime | None, typer.Option("--to", help="UTC moment, exclusive.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play a price on usage of the past, last month's by default: old, new, difference. Changes nothing."""
    month = month_before(dt.datetime.now(dt.UTC))
    if (begin is None) != (end is None):
        raise typer.BadParameter("a period needs both --from and --to")
    from_at, to_at = (moment(_ms(begin)), moment(_ms(end))) if begin else (month.start, month.end)
    if bool(version) == bool(computed and cached and decode):
        raise typer.BadParameter("give --computed, --cached and --decode, or --version")

    async def run() -> Sequence[Change]:
        async with open_database() as database, database.connect() as connection:
            await connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            if version:
                wanted = Rerating(
                    id=uuid.uuid4(),
                    model=model,
                    price_version=version,
                    organisation=org or None,
                    from_at=from_at,
                    to_at=to_at,
                    reason="preview",
                )
                return await preview(connection, wanted)
            meters = {
                meter: NanoPerMillion(nano_of(text))
                for meter, text in zip(Meter, (computed, cached, decode), strict=True)
            }
            terms = Terms(
                tier=tier or None,
                prefill_shared=NanoPerMillion(nano_of(shared)) if shared else None,
                batch_ppm=ppm_of(batch),
                minimum=Nano(nano_of(minimum)),
            )
            check_price(meters, terms)
            proposed = Proposal(
                price=price_of(model, meters, terms, version=0),
                organisation=org or None,
                from_at=from_at,
                to_at=to_at,
            )
            return await preview_price(connection, proposed)

    try:
        changes = asyncio.run(run())
    except (RerateError, PriceError) as error:
        raise typer.BadParameter(str(error)) from None
    show([_change(one) for one in changes], as_json=as_json, empty="nothing would change")


@prices.command("rerate")
def rerate(
    model: Model,
    version: Version,
    begin: From,
    end: To,
    reason: Annotated[str, typer.Option(help="Kept in the audit trail and printed on the invoice.")],
    org: OrgOrAll = "",
    key: Annotated[str, typer.Option(help="UUID of the re-rating: the same one again changes nothing.")] = "",
    as_json: AsJson = False,
) -> None:
    """Rate usage of a period again; the difference is posted as adjustments."""
    request = pb.Rerating(
        id=key or str(uuid.uuid4()),
        model=model,
        price_version=version,
        organisation=org,
        from_ms=_ms(begin),
        to_ms=_ms(end),
        reason=reason,
        by=who(),
    )
    done = call("Rerate", request, timeout_s=3600.0)
    show([_change(one) for one in done.changes], as_json=as_json, empty="nothing changed")


def _row(version: PriceVersion, currency: str) -> PriceRow:
    price = version.price
    return PriceRow(
        model=price.model,
        version=price.version,
        organisation=version.organisation,
        tier=price.tier,
        currency=currency,
        prefill_shared=None if price.prefill_shared is None else money(price.prefill_shared),
        batch=f"{100 * price.batch_ppm / PPM:g}%",
        minimum=money(price.minimum),
        effective_from=_when(version.from_ms),
        effective_to=_when(version.to_ms),
        source=version.source,
        set_by=version.set_by,
        **{meter.value: money(price.of(meter)) for meter in Meter},
    )


def _change(one: Any) -> ChangeRow:
    return ChangeRow(
        organisation=one.organisation,
        meter=one.meter,
        requests=one.requests,
        old=money(one.old_cost),
        new=money(one.new_cost),
        difference=money(one.new_cost - one.old_cost),
    )


def _ms(given: dt.datetime | None) -> int:
    return 0 if given is None else int(given.replace(tzinfo=dt.UTC).timestamp() * 1000)


def _when(unix_ms: int | None) -> str | None:
    """Return a moment in ISO 8601; None for one that was or will never be."""
    if not unix_ms:  # a model's first price starts at the epoch
        return None
    return dt.datetime.fromtimestamp(unix_ms / 1000, dt.UTC).isoformat(timespec="seconds")
