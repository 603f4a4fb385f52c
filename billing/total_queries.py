"""What was used since a moment, by organisation, model and meter."""

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import tables as t
from billing.moments import moment
from contracts.demo import DEMO_WEEK_ORG

_FINE_SPAN_MS = 3_600_000


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one organisation, model and meter. `cost` in nano-units; `tokens` includes what was not billed."""

    organisation: str
    model: str
    meter: str  # contracts.rating.Meter or minimum_charge
    requests: int
    tokens: int
    billed_tokens: int
    cost: int


async def usage_totals(conn: AsyncConnection, tenant: str, since_ms: int) -> list[UsageTotal]:
    """Return the organisation's totals since a moment (Unix ms), by model and meter; exact."""
    return await _totals(conn, since_ms, tenant)


async def usage_totals_across_tenants(
    conn: AsyncConnection, since_ms: int, *, demo_week: bool = False
) -> list[UsageTotal]:
    """Return totals since a moment (Unix ms), by organisation, model and meter; exact. `demo_week`: its own, too."""
    return [one for one in await _totals(conn, since_ms, None) if demo_week or one.organisation != DEMO_WEEK_ORG]


async def _totals(conn: AsyncConnection, since_ms: int, tenant: str | None) -> list[UsageTotal]:
    """Whole hours come from the rollup, the part of an hour before the first one from the records."""
    since = moment(since_ms)
    first_hour = moment(-(-since_ms // _FINE_SPAN_MS) * _FINE_SPAN_MS)
    hourly, record = t.usage_hourly.c, t.usage_record.c
    whole = sa.select(
        hourly.organisation, hourly.model, hourly.meter, hourly.requests, hourly.tokens, hourly.billable, hourly.cost
    ).where(hourly.hour >= first_hour)
    part = sa.select(
        record.organisation,
        record.model,
        record.meter,
        sa.literal(1).label("requests"),
        record.tokens,
        record.billable,
        record.cost,
    ).where(record.at >= since, record.at < first_hour)
    if tenant is not None:
        whole, part = whole.where(hourly.organisation == tenant), part.where(record.organisation == tenant)
    both = sa.union_all(whole, part).subquery().c
    billed = sa.func.sum(sa.case((both.billable, both.tokens), else_=0))
    query = (
        sa.select(
            both.organisation,
            both.model,
            both.meter,
            sa.func.sum(both.requests).label("requests"),
            sa.func.sum(both.tokens).label("tokens"),
            billed.label("billed_tokens"),
            sa.func.sum(both.cost).label("cost"),
        )
        .group_by(both.organisation, both.model, both.meter)
        .order_by(both.organisation, both.model, both.meter)
    )
    return [
        UsageTotal(
            organisation=row.organisation,
            model=row.model,
            meter=row.meter,
            requests=int(row.requests),
            tokens=int(row.tokens),
            billed_tokens=int(row.billed_tokens),
            cost=int(row.cost),
        )
        for row in await conn.execute(query)
    ]
