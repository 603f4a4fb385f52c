"""Usage events: decoded, rated by the price in force at each request's `at`, posted. Delivery: billing.delivery."""

from collections.abc import Sequence
from datetime import date

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.database import driver_connection
from billing.events import NO_PRICE, Decoded, Poison, Rated, decode_event, rate_event
from billing.ledger import Ledger
from billing.partitions import Partitions
from billing.posting import post
from billing.prices import PriceBook, PriceCache
from contracts import keys
from contracts.identity import NUM_SHARDS


def usage_streams() -> dict[str, str]:
    """Return every shard's usage stream and its dead-letter stream."""
    return {keys.usage_stream(shard): keys.dead_letters(shard) for shard in range(NUM_SHARDS)}


class UsageSink:
    """Turns usage events into rated requests and posts them."""

    def __init__(self, engine: AsyncEngine, partitions: Partitions) -> None:
        self._engine = engine
        self._partitions = partitions
        self._prices = PriceCache(engine)
        self._ledger = Ledger()

    async def prepare(self, raws: Sequence[bytes]) -> list[Rated | Poison]:
        """Return each event rated, or why it can never be posted."""
        decoded = [_decoded(raw) for raw in raws]
        newest_ms = max((one.at_ms for one in decoded if isinstance(one, Decoded)), default=0)
        book = await self._prices.covering(newest_ms)
        rated = [_rated(one, book) for one in decoded]
        if any(isinstance(one, Poison) and one.reason == NO_PRICE for one in rated):
            book = await self._prices.fresh()  # a model's first price may start before the book was read
            rated = [_rated(one, book) for one in decoded]
        days = {one.at.date() for one in rated if isinstance(one, Rated)}
        missing = days - await self._partitions.writable(days)
        return [_unless_missing(one, missing) for one in rated] if missing else rated

    async def write(self, things: Sequence[Rated]) -> int:
        """Post the requests that are not there yet."""
        async with driver_connection(self._engine) as connection:
            try:
                return len(await post(connection, self._ledger, things))
            except asyncpg.CheckViolationError:
                self._partitions.forget()  # maybe a partition was dropped after `prepare`
                raise


def _decoded(raw: bytes) -> Decoded | Poison:
    try:
        return decode_event(raw)
    except Poison as poison:
        return poison


def _rated(one: Decoded | Poison, book: PriceBook) -> Rated | Poison:
    if isinstance(one, Poison):
        return one
    try:
        return rate_event(one, book)
    except Poison as poison:
        return poison


def _unless_missing(one: Rated | Poison, missing: set[date]) -> Rated | Poison:
    if isinstance(one, Rated) and one.at.date() in missing:
        return Poison("outside_partitions", f"request {one.request_id} of {one.at}")
    return one
