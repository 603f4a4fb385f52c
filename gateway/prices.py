"""What each model costs now, read from billing and kept for when Postgres is away.

List prices are read every few seconds; they say whether a model may be served at all. An
organisation's own price is asked for when one of its requests arrives, and kept as long.
"""

import time
from collections.abc import Mapping
from typing import Final

import msgspec
import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import queries
from contracts.beat import beat
from contracts.errors import DependencyDown
from contracts.rating import Price
from gateway.auth import DATABASE_ERRORS
from gateway.single_flight import SingleFlight

log = structlog.get_logger()

REFRESH_S: Final = 3.0
STALE_S: Final = 600.0
MAX_SKEW_MS: Final = 300_000
_MAX_OWN_PRICES: Final = 50_000


class _Own(msgspec.Struct, frozen=True):
    price: Price
    read_s: float  # monotonic


class Prices:
    """The price book as this gateway knows it, and the database's clock. `run` until cancelled."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._list: Mapping[str, Price] = {}
        self._read_s = float("-inf")
        self._own: dict[tuple[str, str, str], _Own] = {}
        self._reads: SingleFlight[tuple[str, str, str], Price] = SingleFlight()
        self._database_ahead_ms = 0.0
        self.database_up = False

    @property
    def list_prices(self) -> Mapping[str, Price]:
        """Return list prices by model; none when the last reading is too old to be trusted."""
        return self._list if time.monotonic() - self._read_s < STALE_S else {}

    def now_ms(self) -> int:
        """Return Unix ms for a request id: this clock, held within 5 minutes of the database's."""
        here = time.time() * 1000
        there = here + self._database_ahead_ms
        return int(min(max(here, there - MAX_SKEW_MS), there + MAX_SKEW_MS))

    async def of(self, model: str, org: str, at_ms: int, tier: str = "default") -> Price:
        """Return the price of a model for an organisation and tier. Raises DependencyDown when none can be known."""
        who = (model, org, tier)
        known = self._own.get(who)
        if known is not None and time.monotonic() - known.read_s < REFRESH_S:
            return known.price
        return await self._reads.run(who, lambda: self._read_own(who, at_ms, known))

    async def _read_own(self, who: tuple[str, str, str], at_ms: int, known: _Own | None) -> Price:
        model, org, tier = who
        now_s = time.monotonic()
        try:
            async with self._engine.connect() as db:
                price = await queries.price_in_force(db, model, at_ms, org, tier)
        except DATABASE_ERRORS:
            if known is not None and now_s - known.read_s < STALE_S:
                return known.price
            price = self.list_prices.get(model)
        if price is None:
            raise DependencyDown(f"The price of '{model}' cannot be read right now.", retry_after_s=5)
        if len(self._own) >= _MAX_OWN_PRICES:
            self._own.clear()
        self._own[who] = _Own(price, now_s)
        return price

    async def refresh(self) -> None:
        """Read list prices and the database's clock once. Raises one of DATABASE_ERRORS."""
        async with self._engine.connect() as db:
            prices = await queries.current_prices(db)
            sent_ms = time.time() * 1000
            there: float = (await db.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())"))).scalar_one()
        self._database_ahead_ms = float(there) * 1000 - (sent_ms + time.time() * 1000) / 2
        self._list = prices
        self._read_s = time.monotonic()

    async def run(self) -> None:
        """Refresh again and again."""
        while True:
            try:
                await self.refresh()
                self.database_up = True
            except DATABASE_ERRORS as error:
                if self.database_up:
                    log.warning("database_unavailable", error=str(error))
                self.database_up = False
            await beat(REFRESH_S if self.database_up else 1.0)
