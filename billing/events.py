"""From the bytes of a usage event to what is written: pure, so that rating can be tested and repeated."""

import uuid
from datetime import datetime
from typing import Final

import msgspec
from asyncpg.pgproto.pgproto import UUID  # uuid.UUID's subclass in C: made in an eighth of the time

from billing.moments import moment
from billing.prices import PriceBook
from contracts.rating import Meter, Price, rate, top_up
from contracts.units import MAX_EXACT_NANO, Nano
from contracts.usage import UsageEvent

NO_PRICE: Final = "no_price"

_LAST_MS: Final = 253_402_300_799_999  # the end of the year 9999
_decoder: Final = msgspec.msgpack.Decoder(UsageEvent)


class Poison(ValueError):
    """An event that can never be posted as it is. `reason` is machine readable."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Record(msgspec.Struct, frozen=True):
    """One meter of one request, rated. `price` with its discounts; `cost` in nano-units, 0 when not billable."""

    meter: Meter
    tokens: int
    price: int  # nano-units per million tokens
    cost: int


class Rated(msgspec.Struct, frozen=True):
    """One request as billing will write it."""

    event: UsageEvent
    request_id: uuid.UUID
    at: datetime
    billable: bool
    price: Price
    records: tuple[Record, ...]
    top_up: int  # nano-units that the minimum charge adds to the records
    cost: int  # nano-units, the sum of the records and the top-up


class Decoded(msgspec.Struct, frozen=True):
    """A usage event and what its request id says. `at_ms` is the request's arrival, Unix ms."""

    event: UsageEvent
    request_id: uuid.UUID
    at_ms: int


def decode_event(raw: bytes) -> Decoded:
    """Return a usage event. Raises Poison on garbage."""
    try:
        event = _decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise Poison("undecodable", str(error)) from None
    request_id = decode_request_id(event.rid)
    tokens = event.tokens
    if min(tokens.prefill_computed, tokens.prefill_cached, tokens.decode, event.reasoning_tokens) < 0:
        raise Poison("negative_tokens", f"{tokens} of request {event.rid}")
    return Decoded(event, request_id, request_id.int >> 80)


def decode_request_id(rid: str) -> uuid.UUID:
    """Return a request id. Raises Poison when it is no UUIDv7 in its one canonical form."""
    try:
        request_id: uuid.UUID | None = UUID(rid)
    except ValueError:
        request_id = None
    if request_id is None or str(request_id) != rid or request_id.version != 7:
        raise Poison("bad_request_id", repr(rid))
    if request_id.int >> 80 > _LAST_MS:
        raise Poison("bad_request_id", f"{rid!r} is of a year that no calendar has")
    return request_id


def rate_event(decoded: Decoded, book: PriceBook) -> Rated:
    """Return the event rated by the price that the client was told, or else by the one in force at its arrival.

    A gateway knows the book as it was a moment ago, ten minutes at most (billing.prices.HONOURED_MS). What it told a
    client within that time is kept; any other version in an event is a mistake, and the book decides. Raises Poison
    when the model had no price then, or the cost is too large to be exact everywhere.
    """
    event = decoded.event
    at = moment(decoded.at_ms)
    price = book.honoured(event.price.version, event.model, decoded.at_ms, event.org, event.tier)
    if price is None:
        raise Poison(NO_PRICE, f"model {event.model!r} had no price at {at}")
    billable = event.billable
    tokens = event.tokens

    def record(meter: Meter, counted: int) -> Record:
        each = price.of(meter, batch=event.batch, scope=event.cache_scope)
        return Record(meter, counted, each, rate(counted, each) if billable else Nano(0))

    records = (
        record(Meter.PREFILL_COMPUTED, tokens.prefill_computed),
        record(Meter.PREFILL_CACHED, tokens.prefill_cached),
        record(Meter.DECODE, tokens.decode),
    )
    cost = sum(one.cost for one in records)
    added = top_up(tokens, price, cost) if billable else Nano(0)
    if cost + added > MAX_EXACT_NANO:
        raise Poison("cost_too_large", f"{cost + added} nano-units for request {event.rid}")
    return Rated(event, decoded.request_id, at, billable, price, records, added, cost + added)
