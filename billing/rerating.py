"""Re-rating: usage of the past at another price version. What was posted stays, the difference is an adjustment.

1. The requests of the period are rated at the chosen version, with its discounts and minimum; one whose counts were
   corrected (billing.corrections) by the corrected counts. A request that a narrower price was in force for (its
   organisation's own before the list's, its tier's before every tier's) keeps it, unless the re-rating names an
   organisation and a list price: that is an agreement about whatever the organisation used.
2. `rerating_line` keeps, for each request and meter that changes, what it cost and what it costs: the audit trail. What
   it cost includes earlier re-ratings, so they can follow each other in any order.
3. Each organisation gets one ledger transaction, whose id is derived from the re-rating's: debit the receivable with
   the difference, credit `adjustment:METER`. It is dated when it is made, so it goes on the next invoice.

The re-rating's id is the caller's idempotency key: the same one again changes nothing.
"""

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing import tables as t
from billing.accounts import Posting, adjustment, receivable
from billing.ledger import post_transaction
from billing.prices import map_price
from contracts.rating import MINIMUM_CHARGE, Price

RERATE_LOCK: Final = 0x70646761_74650004
"""Re-ratings and corrections wait for each other: each starts from what the others made of a request."""

# The same sums as contracts.rating, over a period at once; a test compares the two.
RATED_AGAIN: Final = """
WITH corrected AS (
    SELECT DISTINCT ON (request_id) request_id, prefill_computed, prefill_cached, decode FROM billing.correction
    WHERE model = :model AND request_at >= :from_at AND request_at < :to_at ORDER BY request_id, sequence DESC
), counted AS (
    SELECT u.*, CASE
        WHEN c.request_id IS NULL THEN u.tokens
        WHEN u.meter = 'prefill_computed' THEN c.prefill_computed
        WHEN u.meter = 'prefill_cached' THEN c.prefill_cached
        WHEN u.meter = 'decode' THEN c.decode
        ELSE 0
    END AS right_tokens, cast(:forced AS boolean) OR NOT EXISTS (
        SELECT FROM billing.price AS narrower
        WHERE narrower.model = u.model AND narrower.effective_from <= u.at
            AND (narrower.effective_to IS NULL OR narrower.effective_to > u.at)
            AND (narrower.organisation IS NULL OR narrower.organisation = u.organisation)
            AND (narrower.tier IS NULL OR narrower.tier = u.tier)
            AND (narrower.organisation IS NOT NULL, narrower.tier IS NOT NULL)
                > (cast(:payer AS text) IS NOT NULL, cast(:tier AS text) IS NOT NULL)
    ) AS applies
    FROM billing.usage_record AS u LEFT JOIN corrected AS c ON c.request_id = u.request_id
    WHERE u.model = :model AND u.at >= :from_at AND u.at < :to_at
        AND (cast(:organisation AS text) IS NULL OR u.organisation = :organisation)
        AND (cast(:tier AS text) IS NULL OR u.tier = :tier)
), chosen AS (
    SELECT u.request_id, u.organisation, u.meter, u.billable, u.cost, u.applies,
        CASE WHEN NOT u.billable OR u.meter = 'minimum_charge' THEN 0 ELSE ceil(
            u.right_tokens::numeric * ceil(
                CASE
                    WHEN u.meter = 'prefill_computed' THEN cast(:prefill_computed AS bigint)
                    WHEN u.meter = 'decode' THEN cast(:decode AS bigint)
                    WHEN u.scope = 'shared' THEN cast(:prefill_shared AS bigint)
                    ELSE cast(:prefill_cached AS bigint)
                END::numeric * CASE WHEN u.batch THEN cast(:batch_ppm AS bigint) ELSE 1000000 END / 1000000
            ) / 1000000
        )::bigint END AS rated,
        u.right_tokens AS tokens
    FROM counted AS u
), topped AS (
    SELECT request_id, organisation, 'minimum_charge'::billing.meter AS meter,
        coalesce(sum(cost) FILTER (WHERE meter = 'minimum_charge'), 0)::bigint AS cost,
        CASE WHEN bool_and(billable) AND sum(tokens) > 0
            THEN greatest(0, cast(:minimum AS bigint) - sum(rated))::bigint ELSE 0 END AS rated,
        bool_and(applies) AS applies
    FROM chosen GROUP BY request_id, organisation
), rated AS (
    SELECT request_id, organisation, meter, cost, rated, applies FROM chosen WHERE meter <> 'minimum_charge'
    UNION ALL SELECT * FROM topped
), earlier AS (
    SELECT request_id, meter, sum(new_cost - old_cost)::bigint AS delta FROM billing.rerating_line
    WHERE request_id IN (SELECT request_id FROM chosen) GROUP BY request_id, meter
), every AS (
    SELECT request_id, organisation, meter, cost + coalesce(earlier.delta, 0) AS old_cost,
        CASE WHEN applies THEN rated ELSE cost + coalesce(earlier.delta, 0) END AS new_cost
    FROM rated LEFT JOIN earlier USING (request_id, meter)
), changed AS (
    SELECT * FROM every WHERE old_cost <> new_cost
)
"""
_SUMS: Final = """
SELECT organisation, meter, count(DISTINCT request_id) AS requests, sum(old_cost)::bigint AS old_cost,
    sum(new_cost)::bigint AS new_cost, (SELECT count(DISTINCT request_id) FROM changed) AS all_requests
FROM changed GROUP BY organisation, meter ORDER BY organisation, meter
"""
_PREVIEW: Final = sa.text(RATED_AGAIN + _SUMS)
_WRITE: Final = sa.text(f"""{RATED_AGAIN}, written AS (
    INSERT INTO billing.rerating_line (rerating_id, request_id, meter, old_cost, new_cost)
    SELECT :rerating_id, request_id, meter, old_cost, new_cost FROM changed
)
{_SUMS}""")  # noqa: S608 - constants of this file


class RerateError(ValueError):
    """A re-rating that cannot be made; the message says why."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What a re-rating changes for an organisation and meter, nano-units. `requests`: those that change."""

    organisation: str
    meter: str
    requests: int
    old_cost: int
    new_cost: int

    @property
    def delta(self) -> int:
        """Return what is added to what the organisation owes."""
        return self.new_cost - self.old_cost


class Rerating(msgspec.Struct, frozen=True, kw_only=True):
    """Which usage to rate again, and how. `to_at` exclusive; `organisation` None = all."""

    id: uuid.UUID
    model: str
    price_version: int
    from_at: datetime
    to_at: datetime
    reason: str
    made_by: str = ""
    organisation: str | None = None


def transaction_of(rerating_id: uuid.UUID, organisation: str) -> uuid.UUID:
    """Return the id of the ledger transaction of a re-rating, or a correction, for an organisation."""
    return uuid.uuid5(rerating_id, organisation)


async def rerate(conn: AsyncConnection, wanted: Rerating, *, now: datetime) -> Sequence[Change]:
    """Rate again and post the differences; return what changed. The same id again returns nothing.

    Raises:
        RerateError: no such price version, or no period.
    """
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(RERATE_LOCK)))
    known = sa.select(m.rerating.c.id).where(m.rerating.c.id == wanted.id)
    if (await conn.execute(known)).first() is not None:
        return ()
    parameters = await _parameters(conn, wanted)
    rows = (await conn.execute(_WRITE, {**parameters, "rerating_id": wanted.id})).mappings().all()
    changes = [_change(row) for row in rows]
    by_organisation: dict[str, dict[str, int]] = {}
    for change in changes:
        by_organisation.setdefault(change.organisation, {})[change.meter] = change.delta
    for organisation, deltas in by_organisation.items():
        await _post(conn, wanted, organisation, deltas, now=now)
    await conn.execute(
        m.rerating.insert().values(
            **msgspec.structs.asdict(wanted),
            at=now,
            requests=rows[0]["all_requests"] if rows else 0,
            delta=sum(change.delta for change in changes),
        )
    )
    return changes


async def preview(conn: AsyncConnection, wanted: Rerating) -> Sequence[Change]:
    """Return what a re-rating would change, and change nothing. Raises RerateError."""
    rows = await conn.execute(_PREVIEW, await _parameters(conn, wanted))
    return [_change(row) for row in rows.mappings()]


def _change(row: sa.RowMapping) -> Change:
    return Change(**{name: row[name] for name in Change.__struct_fields__})


async def _post(
    conn: AsyncConnection, wanted: Rerating, organisation: str, deltas: Mapping[str, int], *, now: datetime
) -> None:
    entries = {adjustment(meter): -delta for meter, delta in deltas.items()}
    await post_transaction(
        conn,
        transaction_id=transaction_of(wanted.id, organisation),
        kind=Posting.ADJUSTMENT,
        organisation=organisation,
        at=now,
        entries={receivable(organisation): sum(deltas.values()), **entries},
    )


async def _parameters(conn: AsyncConnection, wanted: Rerating) -> dict[str, object]:
    if wanted.from_at >= wanted.to_at:
        raise RerateError(f"the period must end ({wanted.to_at}) after it starts ({wanted.from_at})")
    query = sa.select(t.price).where(t.price.c.model == wanted.model, t.price.c.version == wanted.price_version)
    row = (await conn.execute(query)).first()
    if row is None:
        raise RerateError(f"{wanted.model} has no price version {wanted.price_version}: see `pdgate prices list`")
    if row.organisation is not None and row.organisation != wanted.organisation:
        raise RerateError(f"version {wanted.price_version} is {row.organisation}'s own: name the organisation")
    return {
        "model": wanted.model,
        "from_at": wanted.from_at,
        "to_at": wanted.to_at,
        "organisation": wanted.organisation,
        "payer": row.organisation,
        "forced": wanted.organisation is not None and row.organisation is None,
        **numbers_of(map_price(row)),
    }


def numbers_of(price: Price) -> dict[str, object]:
    """Return a price as the parameters of the query."""
    shared = price.prefill_cached if price.prefill_shared is None else price.prefill_shared
    return {
        "prefill_computed": price.prefill_computed,
        "prefill_cached": price.prefill_cached,
        "prefill_shared": shared,
        "decode": price.decode,
        "batch_ppm": price.batch_ppm,
        "minimum": price.minimum,
        "tier": price.tier,
    }


assert MINIMUM_CHARGE == "minimum_charge"  # as the queries spell it
