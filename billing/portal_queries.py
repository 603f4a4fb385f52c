"""What the portal's pages ask about usage: over time by any dimension, attainment, and margins. Read only."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import tables as t
from billing.moments import moment
from billing.usage_queries import bucket_of
from contracts.demo import DEMO_WEEK_ORG

EXPLORED: Final[Mapping[str, str]] = {
    "project": "project",
    "key": "key_id",
    "model": "model",
    "tier": "tier",
    "meter": "meter",
    "path": "path",
}
"""What usage can be grouped by, and the column of each."""


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one group in one bucket. Cost in nano-units; `label` None: not placed, or not grouped."""

    start_s: int
    label: str | None
    requests: int
    computed: int
    cached: int
    decode: int
    cost: int

    @property
    def tokens(self) -> int:
        """All tokens, prompt and answer."""
        return self.computed + self.cached + self.decode


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one bucket by how they went; percentiles in ms, None without any."""

    start_s: int
    requests: int
    failed: int
    met: int
    missed: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None

    @property
    def attainment(self) -> float | None:
        """Share (0 to 1) of the requests with targets that met them."""
        return self.met / (self.met + self.missed) if self.met + self.missed else None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """From `start_s` to before `end_s`, Unix seconds, in buckets of `width_s`."""

    start_s: int
    end_s: int
    width_s: int


class Earned(msgspec.Struct, frozen=True, kw_only=True):
    """What one organisation paid for one phase of one model, nano-units."""

    organisation: str
    model: str
    phase: str  # prefill | decode
    tokens: int
    revenue: int


class Worked(msgspec.Struct, frozen=True, kw_only=True):
    """What workers spent on one phase for one organisation and model, seconds. `retried`: of attempts but the last."""

    organisation: str
    model: str
    phase: str
    busy_s: float
    retried_s: float


async def explore(
    conn: AsyncConnection, tenant: str, span: Span, *, dimension: str | None, only: Mapping[str, str]
) -> Sequence[Explored]:
    """Return an organisation's billed usage by bucket and group. `only`: dimensions that must have a value."""
    fine = span.width_s < 3600 or "path" in {dimension, *only}
    table: Any = t.usage_record if fine else t.usage_hourly
    u = table.c
    at = u.at if fine else u.hour
    where = [u.organisation == tenant, u.billable, at >= moment(span.start_s * 1000), at < moment(span.end_s * 1000)]
    where += [sa.cast(u[EXPLORED[name]], sa.Text) == value for name, value in only.items()]
    label = sa.null().cast(sa.Text) if dimension is None else sa.cast(u[EXPLORED[dimension]], sa.Text)
    requests: Any = sa.literal(1) if fine else u.requests
    source = sa.select(
        bucket_of(at, span.width_s).label("start_s"), label.label("label"), u.meter, u.tokens, u.cost,
        requests.label("requests"),
    ).where(*where).subquery().c  # fmt: skip
    counted: Any = sa.func.sum(source.requests)
    if dimension != "meter":
        counted = counted.filter(source.meter == "decode")

    def tokens(meter: str) -> sa.ColumnElement[Any]:
        return sa.func.coalesce(sa.func.sum(source.tokens).filter(source.meter == meter), 0)

    query = (
        sa.select(
            source.start_s,
            source.label,
            sa.func.coalesce(counted, 0).label("requests"),
            tokens("prefill_computed").label("computed"),
            tokens("prefill_cached").label("cached"),
            tokens("decode").label("decode"),
            sa.func.sum(source.cost).label("cost"),
        )
        .group_by(source.start_s, source.label)
        .order_by(source.start_s, source.label)
    )
    figures = ("start_s", "requests", "computed", "cached", "decode", "cost")
    return [
        Explored(label=row["label"], **{name: int(row[name]) for name in figures})
        for row in (await conn.execute(query)).mappings()
    ]


async def health(conn: AsyncConnection, tenant: str, span: Span) -> Sequence[Health]:
    """Return how an organisation's requests went, by bucket."""
    return await _health(conn, span, t.request.c.organisation == tenant)


async def health_across_tenants(conn: AsyncConnection, span: Span, *, model: str | None = None) -> Sequence[Health]:
    """Return how all requests but the demo week's went, by bucket; `model`: of this one alone."""
    served = t.request.c.organisation != DEMO_WEEK_ORG
    return await _health(conn, span, served, *([] if model is None else [t.request.c.model == model]))


async def _health(conn: AsyncConnection, span: Span, *where: sa.ColumnElement[bool]) -> Sequence[Health]:
    r = t.request.c
    bucket = bucket_of(r.at, span.width_s)
    tpot = r.decode_ms / sa.func.nullif(r.decode_tokens - 1, 0)

    def count(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[Any]:
        return sa.func.count().filter(condition)

    def percentile(share: float, column: Any) -> sa.ColumnElement[Any]:
        return sa.func.percentile_cont(share).within_group(column)

    query = (
        sa.select(
            bucket.label("start_s"),
            sa.func.count().label("requests"),
            count(r.outcome.not_in(("finished", "client_left"))).label("failed"),
            count(r.slo_met.is_(True)).label("met"),
            count(r.slo_met.is_(False)).label("missed"),
            percentile(0.5, r.ttft_ms).label("ttft_p50_ms"),
            percentile(0.95, r.ttft_ms).label("ttft_p95_ms"),
            percentile(0.5, tpot).label("tpot_p50_ms"),
            percentile(0.95, tpot).label("tpot_p95_ms"),
        )
        .where(r.at >= moment(span.start_s * 1000), r.at < moment(span.end_s * 1000), *where)
        .group_by(bucket)
        .order_by(bucket)
    )
    return [
        Health(**{name: row[name] for name in Health.__struct_fields__} | {"start_s": int(row["start_s"])})
        for row in (await conn.execute(query)).mappings()
    ]


async def earned_across_tenants(conn: AsyncConnection, span: Span) -> Sequence[Earned]:
    """Return what every organisation paid, by model and phase."""
    h = t.usage_hourly.c
    phase = sa.case((h.meter.in_(("prefill_computed", "prefill_cached")), "prefill"), else_="decode")
    query = (
        sa.select(
            h.organisation, h.model, phase.label("phase"),
            sa.func.sum(h.tokens).label("tokens"), sa.func.sum(h.cost).label("revenue"),
        )
        .where(h.hour >= moment(span.start_s * 1000), h.hour < moment(span.end_s * 1000))
        .group_by(h.organisation, h.model, phase)
    )  # fmt: skip
    return [
        Earned(
            **{name: row[name] for name in Earned.__struct_fields__} | {k: int(row[k]) for k in ("tokens", "revenue")}
        )
        for row in (await conn.execute(query)).mappings()
    ]


async def worked_across_tenants(conn: AsyncConnection, span: Span) -> Sequence[Worked]:
    """Return the workers' seconds by organisation, model and phase; unified workers count by the phase they did."""
    a, r = t.attempt_cost.c, t.request.c
    summed = sa.func.sum(a.compute_ms)
    query = (
        sa.select(
            r.organisation,
            r.model,
            a.phase,
            (sa.func.coalesce(summed, 0.0) / 1000.0).label("busy_s"),
            (sa.func.coalesce(summed.filter(a.attempt < r.attempts), 0.0) / 1000.0).label("retried_s"),
        )
        .select_from(t.attempt_cost.join(t.request, sa.and_(a.request_id == r.request_id, a.at == r.at)))
        .where(a.at >= moment(span.start_s * 1000), a.at < moment(span.end_s * 1000))
        .where(r.at >= moment(span.start_s * 1000), r.at < moment(span.end_s * 1000))
        .group_by(r.organisation, r.model, a.phase)
    )
    return [
        Worked(**{name: row[name] for name in Worked.__struct_fields__})
        for row in (await conn.execute(query)).mappings()
    ]
