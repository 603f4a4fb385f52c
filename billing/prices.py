"""The price book: versions with dates, never changed, so that any request can be rated again.

1. A version covers [effective_from, effective_to). Of the versions that cover a moment, the newest wins;
   an organisation's own version goes before the list price.
2. A version may not start in the past: what was rated stays rated right. Only a model's first list price
   starts at the epoch, since nothing could be rated before it.
   Of both, a version for the request's tier goes before one for every tier.
3. Setting a price holds the book's lock; reading the whole book shares it. So a book read at R knows every
   version that can ever cover a moment up to R, and PriceCache reads again only for later requests.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import tables as t
from billing.moments import moment, unix_ms
from contracts.catalog import Catalog
from contracts.rating import PPM, Meter, Price
from contracts.units import Nano, NanoPerMillion

_LOCK: Final = 0x70646761_74650003  # advisory lock of the book

HONOURED_MS: Final = 600_000  # as long as gateways may serve from what they read (gateway/prices.py:STALE_S)

CATALOGUE: Final = "catalogue"
ADMIN: Final = "admin"


class PriceError(ValueError):
    """A price that may not be set; the message says what would be right."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a price says beside its three meters; contracts.rating.Price explains each."""

    tier: str | None = None
    prefill_shared: NanoPerMillion | None = None
    batch_ppm: int = PPM
    minimum: Nano = Nano(0)


NO_TERMS: Final = Terms()


class PriceVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the book. `from_ms` inclusive, `to_ms` exclusive; None = until a later version."""

    price: Price
    organisation: str | None
    from_ms: int
    to_ms: int | None
    source: str
    set_by: str

    def covers(self, at_ms: int) -> bool:
        """Return whether the version speaks for this moment."""
        return self.from_ms <= at_ms and (self.to_ms is None or at_ms < self.to_ms)


class PriceBook:
    """All versions as they were known at `read_at_ms`; complete for every moment up to then."""

    def __init__(self, versions: Iterable[PriceVersion], read_at_ms: int) -> None:
        self.read_at_ms = read_at_ms
        self._versions: dict[tuple[str, str | None], list[PriceVersion]] = {}
        for version in sorted(versions, key=lambda v: -v.price.version):
            self._versions.setdefault((version.price.model, version.organisation), []).append(version)

    def in_force(
        self, model: str, at_ms: int, organisation: str | None = None, tier: str | None = None
    ) -> Price | None:
        """Return the price at a moment for an organisation (None = list price) and tier; None = not priced."""
        for payer in (organisation, None) if organisation is not None else (None,):
            of_all_tiers: Price | None = None
            for version in self._versions.get((model, payer), ()):
                if not version.covers(at_ms):
                    continue
                if version.price.tier is None:
                    of_all_tiers = of_all_tiers or version.price
                elif version.price.tier == tier:
                    return version.price
            if of_all_tiers is not None:
                return of_all_tiers
        return None

    def honoured(self, told: int, model: str, at_ms: int, organisation: str, tier: str) -> Price | None:
        """Return the version that the client was told if it was in force up to HONOURED_MS before, else in_force."""
        price = self.in_force(model, at_ms, organisation, tier)
        if price is None or price.version == told:
            return price
        since_ms = at_ms - HONOURED_MS
        changes = {since_ms}
        for payer in (organisation, None):
            for version in self._versions.get((model, payer), ()):
                changes |= {ms for ms in (version.from_ms, version.to_ms) if ms is not None and since_ms < ms < at_ms}
        for moment_ms in changes:
            then = self.in_force(model, moment_ms, organisation, tier)
            if then is not None and then.version == told:
                return then
        return price


class PriceCache:
    """Keeps one PriceBook and reads it again when a request is newer than it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._book: PriceBook | None = None

    async def covering(self, at_ms: int) -> PriceBook:
        """Return a book that is complete up to `at_ms`, as far as clocks agree."""
        if self._book is None or at_ms > self._book.read_at_ms:
            return await self.fresh()
        return self._book

    async def fresh(self) -> PriceBook:
        """Read the book again."""
        async with self._engine.begin() as conn:
            self._book = await read_book(conn)
        return self._book


async def read_book(conn: AsyncConnection) -> PriceBook:
    """Return all versions."""
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock_shared(_LOCK)))
    read_at = await conn.scalar(sa.select(sa.func.clock_timestamp()))
    assert isinstance(read_at, datetime)
    rows = await conn.execute(sa.select(t.price))
    return PriceBook([map_version(row) for row in rows], unix_ms(read_at))


async def list_prices(conn: AsyncConnection, model: str | None = None) -> list[PriceVersion]:
    """Return the versions of one model or of all, newest first."""
    query = sa.select(t.price).order_by(t.price.c.model, t.price.c.version.desc())
    rows = await conn.execute(query if model is None else query.where(t.price.c.model == model))
    return [map_version(row) for row in rows]


async def set_price(
    conn: AsyncConnection,
    *,
    model: str,
    meters: Mapping[Meter, NanoPerMillion],
    from_ms: int | None = None,
    to_ms: int | None = None,
    organisation: str | None = None,
    terms: Terms = NO_TERMS,
    source: str = ADMIN,
    set_by: str = "",
) -> PriceVersion:
    """Add a version of a model's price, nano-units per million tokens; `from_ms` None = from now on.

    Raises:
        PriceError: it would start in the past, end before it starts, not price all three meters, or has bad terms.
    """
    check_price(meters, terms)
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    now = await conn.scalar(sa.select(sa.func.clock_timestamp()))
    assert isinstance(now, datetime)
    soonest_ms = unix_ms(now) + 1
    known = await list_prices(conn, model)
    first = organisation is None and terms.tier is None and not any(map(_is_list_price, known))
    start_ms = from_ms if from_ms is not None else soonest_ms
    if start_ms < soonest_ms and not first:
        raise PriceError(
            f"a price of {model} cannot start in the past ({moment(start_ms)}): re-rate the period instead"
        )
    if to_ms is not None and to_ms <= start_ms:
        raise PriceError(f"a price must end ({moment(to_ms)}) after it starts ({moment(start_ms)})")
    number = max((version.price.version for version in known), default=0) + 1
    price = price_of(model, meters, terms, version=number)
    version = PriceVersion(
        price=price, organisation=organisation, from_ms=start_ms, to_ms=to_ms, source=source, set_by=set_by
    )
    await conn.execute(
        t.price.insert().values(
            model=model,
            version=price.version,
            organisation=organisation,
            **{meter.value: price.of(meter) for meter in Meter},
            **msgspec.structs.asdict(terms),
            effective_from=moment(start_ms),
            effective_to=None if to_ms is None else moment(to_ms),
            source=source,
            set_by=set_by,
        )
    )
    return version


def check_price(meters: Mapping[Meter, NanoPerMillion], terms: Terms) -> None:
    """Raise PriceError unless all three meters have a price and the terms make sense."""
    if set(meters) != set(Meter) or min(meters.values()) < 0:
        raise PriceError(f"a price needs {', '.join(Meter)}, each >= 0; got {dict(meters)}")
    if not 0 <= terms.batch_ppm <= PPM or terms.minimum < 0 or (terms.prefill_shared or 0) < 0:
        raise PriceError(f"batch_ppm must be 0 to {PPM}, minimum and prefill_shared >= 0; got {terms}")


def price_of(model: str, meters: Mapping[Meter, NanoPerMillion], terms: Terms, *, version: int) -> Price:
    """Return the contract's form of a price that is in the book or proposed for it."""
    return Price(
        version=version,
        model=model,
        prefill_computed=NanoPerMillion(meters[Meter.PREFILL_COMPUTED]),
        prefill_cached=NanoPerMillion(meters[Meter.PREFILL_CACHED]),
        decode=NanoPerMillion(meters[Meter.DECODE]),
        tier=terms.tier,
        prefill_shared=terms.prefill_shared,
        batch_ppm=terms.batch_ppm,
        minimum=terms.minimum,
    )


async def sync_catalog(conn: AsyncConnection, catalog: Catalog) -> list[PriceVersion]:
    """Bring the catalogue's prices into the book; return the versions that were added.

    A model without a list price gets version 1 from the epoch on. Otherwise a price that differs from the
    last one *from the catalogue* takes effect now; an unchanged file never undoes what an admin set.
    """
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    added: list[PriceVersion] = []
    for name, model in catalog.models.items():
        written = {meter: model.price.nano(meter.value) for meter in Meter}
        listed = [version for version in await list_prices(conn, name) if _is_list_price(version)]
        from_file = next((version.price for version in listed if version.source == CATALOGUE), None)
        if listed and (from_file is None or all(from_file.of(meter) == written[meter] for meter in Meter)):
            continue
        added.append(
            await set_price(
                conn,
                model=name,
                meters=written,
                from_ms=None if listed else 0,
                source=CATALOGUE,
                set_by=f"models.toml {catalog.revision}",
            )
        )
    return added


def map_price(row: sa.Row[tuple[object, ...]]) -> Price:
    """Return the contract's form of one row."""
    return Price(
        version=row.version,
        model=row.model,
        prefill_computed=NanoPerMillion(row.prefill_computed),
        prefill_cached=NanoPerMillion(row.prefill_cached),
        decode=NanoPerMillion(row.decode),
        tier=row.tier,
        prefill_shared=None if row.prefill_shared is None else NanoPerMillion(row.prefill_shared),
        batch_ppm=row.batch_ppm,
        minimum=Nano(row.minimum),
    )


def _is_list_price(version: PriceVersion) -> bool:
    return version.organisation is None and version.price.tier is None


def map_version(row: sa.Row[tuple[object, ...]]) -> PriceVersion:
    """Return one row with its dates."""
    return PriceVersion(
        price=map_price(row),
        organisation=row.organisation,
        from_ms=unix_ms(row.effective_from),
        to_ms=None if row.effective_to is None else unix_ms(row.effective_to),
        source=row.source,
        set_by=row.set_by,
    )
