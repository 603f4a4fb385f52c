"""Writes rated requests: requests, usage records, rollup and ledger, in the caller's one transaction.

Whether a request is new is decided once, by the insert into `request`; everything else is written only for
those rows. So a batch may be written again, by anybody, at any time, and changes nothing.
Rows and groups go in sorted order, so that two consumers with the same entries wait instead of deadlocking.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, Final

import asyncpg

from billing.events import Rated
from billing.ledger import Ledger
from contracts.rating import Meter

_REQUEST_COLUMNS: Final[Mapping[str, str]] = {
    "request_id": "uuid",
    "at": "timestamptz",
    "organisation": "text",
    "project": "text",
    "key_id": "text",
    "model": "text",
    "pool": "text",
    "tier": "text",
    "path": "text",
    "hand_off": "text",
    "attempts": "integer",
    "batch": "boolean",
    "stream": "boolean",
    "prefill_worker": "text",
    "decode_worker": "text",
    "outcome": "text",
    "cause": "text",
    "finish_reason": "text",
    "reasoning_tokens": "bigint",
    "ttft_ms": "double precision",
    "decode_ms": "double precision",
    "decode_tokens": "bigint",
    "queue_ms": "double precision",
    "prefill_ms": "double precision",
    "transfer_ms": "double precision",
    "total_ms": "double precision",
    "slo_met": "boolean",
    "estimated": "boolean",
    "simulated": "boolean",
    "settled_by": "text",
    "billable": "boolean",
    "price_version": "integer",
    "cost": "bigint",
    "answered_cost": "bigint",
}
_RECORD_COLUMNS: Final[Mapping[str, str]] = {
    "request_id": "uuid",
    "meter": "text",
    "at": "timestamptz",
    "organisation": "text",
    "project": "text",
    "key_id": "text",
    "model": "text",
    "tier": "text",
    "pool": "text",
    "worker": "text",
    "path": "text",
    "hand_off": "text",
    "attempts": "integer",
    "batch": "boolean",
    "tokens": "bigint",
    "price_version": "integer",
    "price": "bigint",
    "cost": "bigint",
    "billable": "boolean",
}
_HOURLY_COLUMNS: Final[Mapping[str, str]] = {
    "organisation": "text",
    "hour": "timestamptz",
    "project": "text",
    "key_id": "text",
    "model": "text",
    "tier": "text",
    "batch": "boolean",
    "billable": "boolean",
    "meter": "text",
    "tokens": "bigint",
    "cost": "bigint",
    "requests": "bigint",
}


def _insert(table: str, columns: Mapping[str, str]) -> str:
    """Return an insert of whole columns: one array per column, one row per position."""
    arrays = ", ".join(f"${n}::{kind}[]" for n, kind in enumerate(columns.values(), 1))
    values = ", ".join(f"{name}::billing.meter" if name == "meter" else name for name in columns)
    names = ", ".join(columns)
    return f"INSERT INTO billing.{table} ({names}) SELECT {values} FROM unnest({arrays}) AS new ({names})"  # noqa: S608 - our own names


_REQUESTS: Final = _insert("request", _REQUEST_COLUMNS) + " ON CONFLICT DO NOTHING RETURNING request_id"
_RECORDS: Final = _insert("usage_record", _RECORD_COLUMNS)
_HOURLY: Final = (
    _insert("usage_hourly AS old", _HOURLY_COLUMNS)
    + " ON CONFLICT (organisation, hour, project, key_id, model, tier, batch, billable, meter) DO UPDATE SET"
    " tokens = old.tokens + excluded.tokens, cost = old.cost + excluded.cost,"
    " requests = old.requests + excluded.requests"
)

_by_id = attrgetter("request_id")


async def post(connection: asyncpg.Connection, ledger: Ledger, batch: Sequence[Rated]) -> list[Rated]:
    """Write the requests that are not there yet, all or nothing; return them.

    Opens its own transaction. Raises asyncpg.PostgresError, also for values that Postgres does not take.
    """
    unique = sorted({one.request_id: one for one in batch}.values(), key=_by_id)
    await ledger.open_accounts(connection, {one.event.org for one in unique if one.cost})
    async with connection.transaction():
        inserted = await connection.fetch(_REQUESTS, *_columns(_request_row(one) for one in unique))
        ids = {row["request_id"] for row in inserted}
        new = [one for one in unique if one.request_id in ids]
        if new:
            await connection.execute(_RECORDS, *_columns(row for one in new for row in _record_rows(one)))
            await connection.execute(_HOURLY, *_columns(_hourly_rows(new)))
            await ledger.post_usage(connection, new)
    return new


def _columns(rows: Any) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True))


def _request_row(one: Rated) -> tuple[Any, ...]:
    event, seen = one.event, one.event.timings
    return (
        one.request_id,
        one.at,
        event.org,
        event.project,
        event.key_id,
        event.model,
        event.pool,
        event.tier,
        event.path,
        event.hand_off,
        event.attempts,
        event.batch,
        event.stream,
        event.prefill_worker,
        event.decode_worker,
        event.outcome,
        event.cause,
        event.finish_reason,
        event.reasoning_tokens,
        *(
            (None,) * 7
            if seen is None
            else (
                seen.ttft_ms,
                seen.decode_ms,
                seen.decode_tokens,
                seen.queue_ms,
                seen.prefill_ms,
                seen.transfer_ms,
                seen.total_ms,
            )
        ),
        event.slo_met,
        event.estimated,
        event.simulated,
        event.settled_by,
        one.billable,
        one.price.version,
        one.cost,
        event.cost,
    )


def _record_rows(one: Rated) -> list[tuple[Any, ...]]:
    event = one.event
    who = (one.at, event.org, event.project, event.key_id, event.model, event.tier, event.pool)
    how = (event.path, event.hand_off, event.attempts, event.batch)
    return [
        (
            one.request_id,
            record.meter.value,
            *who,
            event.decode_worker if record.meter is Meter.DECODE else event.prefill_worker or event.decode_worker,
            *how,
            record.tokens,
            one.price.version,
            record.price,
            record.cost,
            one.billable,
        )
        for record in one.records
    ]


def _hourly_rows(requests: Sequence[Rated]) -> list[tuple[Any, ...]]:
    totals: dict[tuple[Any, ...], list[int]] = {}
    for one in requests:
        event = one.event
        group = (
            event.org,
            _hour(one.at),
            event.project,
            event.key_id,
            event.model,
            event.tier,
            event.batch,
            one.billable,
        )
        for record in one.records:
            sums = totals.setdefault((*group, record.meter.value), [0, 0, 0])
            sums[0] += record.tokens
            sums[1] += record.cost
            sums[2] += 1
    return [(*key, *totals[key]) for key in sorted(totals)]


def _hour(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)
