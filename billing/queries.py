"""What billing knows, read only: the one module of billing that the gateway may import.

Every query of one tenant takes the organisation first; those that cross tenants say so in their name and
are for the operator's command line.
"""

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import tables as t
from billing.budgets import Budget, budgets_of
from billing.collection_book import find_collection
from billing.credits import Grant, grants_of
from billing.invoice_book import Invoice, find_invoice, list_invoices, outstanding
from billing.key_terms import budgeted_scopes, share_group
from billing.moments import moment, unix_ms
from billing.money_queries import BudgetUse, Delivery, budget_uses, deliveries, invoice_document
from billing.portal_queries import (
    EXPLORED,
    Earned,
    Explored,
    Health,
    Period,
    Span,
    Worked,
    earned_across_tenants,
    explore,
    health,
    health_across_tenants,
    period,
    worked_across_tenants,
)
from billing.prices import PriceVersion, list_prices, map_price
from billing.profiles import Profile, find_profile
from billing.total_queries import UsageTotal, usage_totals, usage_totals_across_tenants
from billing.usage_queries import (
    COST_DIMENSIONS,
    USAGE_DIMENSIONS,
    WIDTHS_S,
    Asked,
    CostResult,
    UsageResult,
    cost_buckets,
    usage_buckets,
)
from contracts.demo import DEMO_WEEK_ORG
from contracts.identity import at_ms as at_ms_of
from contracts.rating import Price
from contracts.slo import Timings

__all__ = [
    "COST_DIMENSIONS",
    "EXPLORED",
    "USAGE_DIMENSIONS",
    "WIDTHS_S",
    "Asked",
    "AttemptRow",
    "Budget",
    "BudgetUse",
    "CostResult",
    "Delivery",
    "Earned",
    "Explored",
    "Grant",
    "Health",
    "Invoice",
    "MeterRow",
    "Period",
    "PriceVersion",
    "Profile",
    "RequestFilter",
    "RequestRow",
    "Span",
    "UsageResult",
    "UsageTotal",
    "Worked",
    "attempts_across_tenants",
    "budget_uses",
    "budgeted_scopes",
    "budgets_of",
    "cost_buckets",
    "current_prices",
    "deliveries",
    "earned_across_tenants",
    "explore",
    "find_collection",
    "find_invoice",
    "find_profile",
    "find_request",
    "find_request_across_tenants",
    "grants_of",
    "health",
    "health_across_tenants",
    "invoice_document",
    "list_invoices",
    "list_prices",
    "outstanding",
    "period",
    "price_in_force",
    "recent_requests",
    "recent_requests_across_tenants",
    "search_requests",
    "share_group",
    "usage_buckets",
    "usage_totals",
    "usage_totals_across_tenants",
    "worked_across_tenants",
]


class MeterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One usage record. `price` nano-units per million tokens, `cost` nano-units."""

    meter: str  # contracts.rating.Meter or minimum_charge
    tokens: int
    price: int
    cost: int
    worker: str


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One metered request, with its three meters. Money in nano-units."""

    request_id: str
    at_ms: int
    organisation: str
    project: str
    key_id: str
    model: str
    pool: str
    tier: str
    path: str | None
    hand_off: str | None
    attempts: int
    batch: bool
    stream: bool
    prefill_worker: str
    decode_worker: str
    outcome: str
    cause: str
    finish_reason: str
    reasoning_tokens: int
    timings: Timings | None
    slo_met: bool | None
    estimated: bool
    simulated: bool
    settled_by: str
    billable: bool
    price_version: int
    cost: int
    answered_cost: int
    end_user: str | None
    reference: str | None  # the client's own name of the request
    tags: str | None  # JSON object
    cache_scope: str
    meters: tuple[MeterRow, ...]


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine request as its worker counted it."""

    attempt: int
    sample: int
    phase: str
    worker: str
    worker_epoch: int
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    compute_ms: float
    worker_ms: float  # from accepted to ended
    ended_ms: int  # Unix ms


async def price_in_force(
    conn: AsyncConnection, model: str, at_ms: int, organisation: str | None = None, tier: str | None = None
) -> Price | None:
    """Return the price of `model` at a moment (Unix ms), the organisation's and the tier's own first; None = none."""
    at = moment(at_ms)
    own = t.price.c.organisation == organisation
    query = (
        sa.select(t.price)
        .where(
            t.price.c.model == model,
            t.price.c.effective_from <= at,
            sa.or_(t.price.c.effective_to.is_(None), t.price.c.effective_to > at),
            sa.or_(t.price.c.organisation.is_(None), own),
            sa.or_(t.price.c.tier.is_(None), t.price.c.tier == tier),
        )
        .order_by(t.price.c.organisation.is_(None), t.price.c.tier.is_(None), t.price.c.version.desc())
        .limit(1)
    )
    row = (await conn.execute(query)).first()
    return None if row is None else map_price(row)


async def current_prices(conn: AsyncConnection) -> dict[str, Price]:
    """Return the list price in force now, by model."""
    now = sa.func.clock_timestamp()
    query = (
        sa.select(t.price)
        .ext(distinct_on(t.price.c.model))
        .where(
            t.price.c.organisation.is_(None),
            t.price.c.tier.is_(None),
            t.price.c.effective_from <= now,
            sa.or_(t.price.c.effective_to.is_(None), t.price.c.effective_to > now),
        )
        .order_by(t.price.c.model, t.price.c.version.desc())
    )
    return {row.model: map_price(row) for row in await conn.execute(query)}


async def find_request(conn: AsyncConnection, tenant: str, rid: str) -> RequestRow | None:
    """Return a request of this organisation, or None when it is unknown, another's, or not billed yet."""
    row = await find_request_across_tenants(conn, rid)
    return row if row is not None and row.organisation == tenant else None


async def find_request_across_tenants(conn: AsyncConnection, rid: str) -> RequestRow | None:
    """Return a request, or None when it is unknown or not billed yet."""
    try:
        request_id, at = uuid.UUID(rid), moment(at_ms_of(rid))
    except (ValueError, OverflowError):
        return None
    query = sa.select(t.request).where(t.request.c.request_id == request_id, t.request.c.at == at)
    rows = await _with_meters(conn, query)
    return rows[0] if rows else None


async def attempts_across_tenants(conn: AsyncConnection, rid: str) -> list[AttemptRow]:
    """Return what the workers counted of a request, in the order of attempts. Raises ValueError for a bad id."""
    cost = t.attempt_cost.c
    query = (
        sa.select(t.attempt_cost)
        .where(cost.request_id == uuid.UUID(rid), cost.at == moment(at_ms_of(rid)))
        .order_by(cost.attempt, cost.ended_at, cost.sample)
    )
    return [
        AttemptRow(
            ended_ms=unix_ms(row["ended_at"]),
            **{name: row[name] for name in AttemptRow.__struct_fields__ if name != "ended_ms"},
        )
        for row in (await conn.execute(query)).mappings()
    ]


async def recent_requests(conn: AsyncConnection, tenant: str, since_ms: int, limit: int = 20) -> list[RequestRow]:
    """Return the organisation's newest requests since a moment (Unix ms), newest first."""
    return await _recent(conn, since_ms, limit, t.request.c.organisation == tenant)


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests of an organisation; None and empty let everything through. `before`: moment and id of the last."""

    since_ms: int
    before: tuple[int, str] | None = None
    project: str = ""
    key_id: str = ""
    model: str = ""
    path: str = ""
    outcome: str = ""
    missed: bool = False  # only those that missed a target


async def search_requests(
    conn: AsyncConnection, tenant: str, wanted: RequestFilter, *, limit: int
) -> Sequence[RequestRow]:
    """Return an organisation's requests that a filter lets through, newest first. Raises ValueError: no such id."""
    r = t.request.c
    where = [r.organisation == tenant]
    for column, value in (
        (r.project, wanted.project), (r.key_id, wanted.key_id), (r.model, wanted.model), (r.path, wanted.path),
        (r.outcome, wanted.outcome),
    ):  # fmt: skip
        if value:
            where.append(column == value)
    if wanted.missed:
        where.append(r.slo_met.is_(False))
    if wanted.before is not None:
        at_ms, rid = wanted.before
        where.append(sa.tuple_(r.at, r.request_id) < sa.tuple_(moment(at_ms), uuid.UUID(rid)))
    return await _recent(conn, wanted.since_ms, limit, *where)


async def recent_requests_across_tenants(conn: AsyncConnection, since_ms: int, limit: int = 20) -> list[RequestRow]:
    """Return the newest requests since a moment (Unix ms), newest first; none of the demo week's."""
    return await _recent(conn, since_ms, limit, t.request.c.organisation != DEMO_WEEK_ORG)


async def _recent(conn: AsyncConnection, since_ms: int, limit: int, *where: sa.ColumnElement[bool]) -> list[RequestRow]:
    query = (
        sa.select(t.request)
        .where(t.request.c.at >= moment(since_ms), *where)
        .order_by(t.request.c.at.desc(), t.request.c.request_id.desc())
        .limit(limit)
    )
    return await _with_meters(conn, query)


async def _with_meters(conn: AsyncConnection, query: sa.Select[Any]) -> list[RequestRow]:
    requests = (await conn.execute(query)).all()
    if not requests:
        return []
    record = t.usage_record.c
    moments = [row.at for row in requests]
    found = await conn.execute(
        sa.select(record.request_id, record.meter, record.tokens, record.price, record.cost, record.worker)
        .where(
            record.request_id.in_([row.request_id for row in requests]),
            record.at.between(min(moments), max(moments)),  # lets Postgres skip the other days' partitions
        )
        .order_by(record.request_id, record.meter)
    )
    meters: dict[uuid.UUID, list[MeterRow]] = {}
    for row in found:
        meters.setdefault(row.request_id, []).append(
            MeterRow(meter=row.meter, tokens=row.tokens, price=row.price, cost=row.cost, worker=row.worker)
        )
    return [_map_request(row._mapping, meters.get(row.request_id, ())) for row in requests]  # noqa: SLF001 - public API of SQLAlchemy


def _map_request(row: Mapping[str, Any], meters: Sequence[MeterRow]) -> RequestRow:
    same = {name: row[name] for name in _SAME_NAME}
    timings = None
    if row["ttft_ms"] is not None:
        timings = Timings(**{name: row[name] for name in Timings.__struct_fields__})
    at: datetime = row["at"]
    return RequestRow(
        request_id=str(row["request_id"]), at_ms=unix_ms(at), timings=timings, meters=tuple(meters), **same
    )


_SAME_NAME = tuple(
    name for name in RequestRow.__struct_fields__ if name not in ("request_id", "at_ms", "timings", "meters")
)
