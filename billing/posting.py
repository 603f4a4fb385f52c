"""Writes rated requests: requests, usage records, rollup and ledger, in one transaction per batch.

Whether a request is new is decided once, by the insert into `request`; everything else is written only for
those rows. So a batch may be written again, by anybody, at any time, and changes nothing.
Rows and groups go in sorted order, so that two consumers with the same entries wait instead of deadlocking.

Each value crosses once, in one array per column: encoding arrays is what the consumer's CPU goes into.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import asyncpg
import msgspec

from billing.events import Rated
from billing.ledger import Ledger
from contracts.dimensions import NO_DIMENSIONS, Dimensions
from contracts.rating import MINIMUM_CHARGE, Meter

_REQUEST: Final[dict[str, str]] = {
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
    "itl_p99_ms": "double precision",
    "slo_met": "boolean",
    "estimated": "boolean",
    "simulated": "boolean",
    "settled_by": "text",
    "billable": "boolean",
    "price_version": "integer",
    "cost": "bigint",
    "answered_cost": "bigint",
    "end_user": "text",
    "safety_identifier": "text",
    "reference": "text",
    "tags": "text",
    "cache_scope": "text",
}
_OF_METER: Final = {f"{figure}_of_{meter}": "bigint" for meter in Meter for figure in ("tokens", "price", "cost")} | {
    "minimum": "bigint",
    "top_up": "bigint",
}

_names: Final = ", ".join(_REQUEST)
_arrays: Final = ", ".join(f"${n}::{kind}[]" for n, kind in enumerate((_REQUEST | _OF_METER).values(), 1))
_PREFILLED_BY: Final = "coalesce(nullif(prefill_worker, ''), decode_worker)"
_meters: Final = ", ".join(
    f"('{meter}'::billing.meter, tokens_of_{meter}, price_of_{meter}, cost_of_{meter},"
    f" {'decode_worker' if meter is Meter.DECODE else _PREFILLED_BY})"
    for meter in Meter
)
_group: Final = ", ".join(map(str, range(1, 12)))
_top_up: Final = f"('{MINIMUM_CHARGE}'::billing.meter, 0::bigint, minimum, top_up, decode_worker)"

_POST: Final = f"""
WITH incoming AS MATERIALIZED (
    SELECT * FROM unnest({_arrays}) AS column_by_column ({", ".join(_REQUEST | _OF_METER)})
), fresh AS (
    INSERT INTO billing.request ({_names}) SELECT {_names} FROM incoming
    ON CONFLICT DO NOTHING RETURNING request_id
), metered AS MATERIALIZED (
    SELECT request_id, meter, at, organisation, project, key_id, model, tier, pool, worker,
        path, hand_off, attempts, batch, tokens, price_version, price, one.cost, billable,
        CASE WHEN meter = 'prefill_cached' THEN cache_scope ELSE 'own' END AS scope
    FROM fresh JOIN incoming USING (request_id)
    CROSS JOIN LATERAL (VALUES {_meters}, {_top_up}) AS one (meter, tokens, price, cost, worker)
    WHERE meter <> '{MINIMUM_CHARGE}' OR top_up > 0
), records AS (
    INSERT INTO billing.usage_record (request_id, meter, at, organisation, project, key_id, model, tier, pool, worker,
        path, hand_off, attempts, batch, tokens, price_version, price, cost, billable, scope)
    SELECT * FROM metered
), hourly AS (
    INSERT INTO billing.usage_hourly AS old (organisation, hour, project, key_id, model, tier, batch, billable, meter,
        price_version, scope, tokens, cost, requests)
    SELECT organisation, date_trunc('hour', at, 'UTC'), project, key_id, model, tier, batch, billable, meter,
        price_version, scope, sum(tokens), sum(cost), count(*)
    FROM metered GROUP BY {_group} ORDER BY {_group}
    ON CONFLICT (organisation, hour, project, key_id, model, tier, batch, billable, meter, price_version, scope)
    DO UPDATE SET tokens = old.tokens + excluded.tokens, cost = old.cost + excluded.cost,
        requests = old.requests + excluded.requests
)
SELECT request_id FROM fresh
"""  # noqa: S608 - our own column names

_NOTHING_SAID: Final = (None,) * 4
_by_id = attrgetter("request_id")


async def post(connection: asyncpg.Connection, ledger: Ledger, batch: Sequence[Rated]) -> list[Rated]:
    """Write the requests that are not there yet, all or nothing; return them.

    Opens its own transaction. Raises asyncpg.PostgresError, also for values that Postgres does not take.
    """
    unique = sorted({one.request_id: one for one in reversed(batch)}.values(), key=_by_id)
    await ledger.open_accounts(connection, {one.event.org for one in unique if one.cost})
    async with connection.transaction():
        inserted = await connection.fetch(_POST, *zip(*map(_row, unique), strict=True))
        ids = {row["request_id"] for row in inserted}
        new = [one for one in unique if one.request_id in ids]
        await ledger.post_usage(connection, new)
    return new


def _dimensions(said: Dimensions) -> tuple[str | None, ...]:
    if said == NO_DIMENSIONS:
        return _NOTHING_SAID
    tags = msgspec.json.encode(said.tags).decode() if said.tags else None
    return said.user or None, said.safety_identifier or None, said.reference or None, tags


def _row(one: Rated) -> tuple[Any, ...]:
    """Return the values of one request in the order of _REQUEST and _OF_METER."""
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
            (None,) * 8
            if seen is None
            else (
                seen.ttft_ms,
                seen.decode_ms,
                seen.decode_tokens,
                seen.queue_ms,
                seen.prefill_ms,
                seen.transfer_ms,
                seen.total_ms,
                seen.itl_p99_ms,
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
        *_dimensions(event.dimensions),
        event.cache_scope,
        *(figure for record in one.records for figure in (record.tokens, record.price, record.cost)),
        one.price.minimum,
        one.top_up,
    )
