"""Usage and costs over time, in buckets: what `/v1/organization/usage/completions` and `/costs` answer. Read only.

Buckets of hours and days come from the rollup. Buckets of a minute, and what is asked by user, come from the requests
themselves. Only what was billed counts.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import tables as t
from billing.accounts import Posting, receivable
from billing.ledger import NOT_USAGE
from billing.moments import moment
from contracts.rating import MINIMUM_CHARGE

WIDTHS_S: Final = {"1m": 60, "1h": 3600, "1d": 86_400}
USAGE_DIMENSIONS: Final = ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier")
COST_DIMENSIONS: Final = ("project_id", "user_id", "line_item", "api_key_id")
_COLUMN: Final = {
    "project_id": "project",
    "api_key_id": "key_id",
    "model": "model",
    "batch": "batch",
    "service_tier": "tier",
    "user_id": "end_user",
}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A question: whole buckets from `start_s` on, Unix seconds; an empty filter lets everything through."""

    start_s: int
    end_s: int
    width_s: int
    group_by: tuple[str, ...] = ()
    projects: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    line_items: tuple[str, ...] = ()  # of costs
    batch: bool | None = None


class UsageResult(msgspec.Struct, frozen=True, kw_only=True):
    """One group of one bucket; what is not grouped by is None. Cost in nano-units."""

    start_s: int
    requests: int
    computed: int
    cached: int
    decode: int
    cost: int
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None


class CostResult(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one group of one bucket, nano-units. `tokens`: of a line item that counts some."""

    start_s: int
    cost: int
    tokens: int | None = None
    project_id: str | None = None
    user_id: str | None = None
    line_item: str | None = None
    api_key_id: str | None = None


async def usage_buckets(conn: AsyncConnection, tenant: str, asked: Asked) -> Sequence[UsageResult]:
    """Return what an organisation used, by bucket and group; buckets without usage are left out."""
    fine = asked.width_s < WIDTHS_S["1h"] or "user_id" in asked.group_by or asked.users
    source, at = _records(tenant, asked) if fine else _rollup(tenant, asked)
    groups = [source.c[_COLUMN[name]].label(name) for name in asked.group_by]
    bucket = bucket_of(at, asked.width_s)

    def tokens(meter: str) -> sa.ColumnElement[Any]:
        return sa.func.coalesce(sa.func.sum(source.c.tokens).filter(source.c.meter == meter), 0)

    query = (
        sa.select(
            bucket.label("start_s"),
            *groups,
            sa.func.coalesce(sa.func.sum(source.c.requests).filter(source.c.meter == "decode"), 0).label("requests"),
            tokens("prefill_computed").label("computed"),
            tokens("prefill_cached").label("cached"),
            tokens("decode").label("decode"),
            sa.func.sum(source.c.cost).label("cost"),
        )
        .group_by(bucket, *groups)
        .order_by(bucket, *groups)
    )
    figures = ("start_s", "requests", "computed", "cached", "decode", "cost")
    return [
        UsageResult(**{name: row[name] for name in asked.group_by} | {name: int(row[name]) for name in figures})
        for row in (await conn.execute(query)).mappings()
    ]


async def cost_buckets(conn: AsyncConnection, tenant: str, asked: Asked) -> Sequence[CostResult]:
    """Return what an organisation was charged, by bucket and group: usage, re-ratings and SLO credits.

    What is no usage belongs to no project, key or user: it is left out when some of these are asked for.
    """
    whole = not (asked.projects or asked.keys)
    usage = _usage_charges(tenant, asked)
    both: Any = sa.union_all(usage, _other_charges(tenant, asked)) if whole else usage
    source = both.subquery()
    bucket = bucket_of(source.c.at, asked.width_s)
    groups = [source.c[name] for name in asked.group_by]
    query = (
        sa.select(
            bucket.label("start_s"), *groups, sa.func.sum(source.c.cost).label("cost"),
            sa.func.sum(source.c.tokens).label("tokens"),
        )
        .group_by(bucket, *groups)
        .order_by(bucket, *groups)
    )  # fmt: skip
    if asked.line_items:
        query = query.where(source.c.line_item.in_(asked.line_items))
    by_item = "line_item" in asked.group_by  # tokens of several meters do not add up to a quantity
    return [
        CostResult(
            start_s=int(row["start_s"]),
            cost=int(row["cost"]),
            tokens=int(row["tokens"]) if by_item and row["tokens"] is not None else None,
            **{name: row[name] for name in asked.group_by},
        )
        for row in (await conn.execute(query)).mappings()
    ]


def _usage_charges(tenant: str, asked: Asked) -> sa.Select[Any]:
    by_user = "user_id" in asked.group_by
    source, at = _records(tenant, asked) if by_user else _rollup(tenant, asked)
    item = source.c.model + sa.literal(", ") + sa.func.replace(sa.cast(source.c.meter, sa.Text), "_", " ")
    return sa.select(
        at.label("at"),
        source.c.project.label("project_id"),
        source.c.key_id.label("api_key_id"),
        (source.c.end_user if by_user else sa.null().cast(sa.Text)).label("user_id"),
        item.label("line_item"),
        source.c.cost,
        sa.case((source.c.meter != MINIMUM_CHARGE, source.c.tokens)).label("tokens"),
    )


def _other_charges(tenant: str, asked: Asked) -> sa.Select[Any]:
    x, e = t.ledger_transaction.c, t.ledger_entry.c
    kinds = (Posting.ADJUSTMENT.value, Posting.SLO_CREDIT.value)
    return (
        sa.select(
            x.at,
            *(sa.null().cast(sa.Text),) * 3,
            sa.func.replace(x.kind, "_", " "),
            e.amount,
            sa.null().cast(sa.BigInteger),
        )
        .select_from(t.ledger_transaction)
        .join(t.ledger_entry, e.transaction_id == x.id)
        .join(t.account, t.account.c.id == e.account_id)
        .where(
            x.organisation == tenant,
            NOT_USAGE,
            x.kind.in_(kinds),
            x.at >= moment(asked.start_s * 1000),
            x.at < moment(asked.end_s * 1000),
            t.account.c.code == receivable(tenant),
        )
    )


def _rollup(tenant: str, asked: Asked) -> tuple[sa.Subquery, sa.ColumnElement[datetime]]:
    h = t.usage_hourly.c
    where = [h.organisation == tenant, h.billable, *_filters(h, asked)]
    where += [h.hour >= moment(asked.start_s * 1000), h.hour < moment(asked.end_s * 1000)]
    source = sa.select(t.usage_hourly).where(*where).subquery()
    return source, source.c.hour


def _records(tenant: str, asked: Asked) -> tuple[sa.Subquery, sa.ColumnElement[datetime]]:
    u, r = t.usage_record.c, t.request.c
    where = [r.organisation == tenant, r.billable, *_filters(r, asked)]
    where += [column >= moment(asked.start_s * 1000) for column in (r.at, u.at)]
    where += [column < moment(asked.end_s * 1000) for column in (r.at, u.at)]
    if asked.users:
        where.append(r.end_user.in_(asked.users))
    source = (
        sa.select(
            r.at, r.project, r.key_id, r.model, r.batch, r.tier, r.end_user, u.meter, u.tokens, u.cost,
            sa.literal(1).label("requests"),
        )
        .select_from(t.request.join(t.usage_record, sa.and_(u.request_id == r.request_id, u.at == r.at)))
        .where(*where)
        .subquery()
    )  # fmt: skip
    return source, source.c.at


def _filters(columns: Any, asked: Asked) -> list[sa.ColumnElement[bool]]:
    found: list[sa.ColumnElement[bool]] = []
    for column, wanted in (
        (columns.project, asked.projects), (columns.key_id, asked.keys), (columns.model, asked.models)
    ):  # fmt: skip
        if wanted:
            found.append(column.in_(wanted))
    if asked.batch is not None:
        found.append(columns.batch == asked.batch)
    return found


def bucket_of(at: sa.ColumnElement[datetime], width_s: int) -> sa.ColumnElement[Any]:
    """Return the start of the bucket of a moment, Unix seconds."""
    width: sa.ColumnElement[int] = sa.literal_column(str(width_s))
    return sa.func.floor(sa.extract("epoch", at) / width) * width
