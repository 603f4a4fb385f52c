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


_WORKED: Final = sa.text(
    """
    WITH ended AS (
        SELECT a.worker, r.organisation, r.model, a.attempt < r.attempts AS retried,
            CASE a.phase WHEN 'decode' THEN 0 WHEN 'prefill' THEN a.compute_ms
                ELSE greatest(a.worker_ms - a.compute_ms, 0) END AS prefill_ms,
            CASE a.phase WHEN 'prefill' THEN 0 ELSE a.compute_ms END AS decode_ms,
            a.ended_at
        FROM billing.attempt_cost a JOIN billing.request r ON r.request_id = a.request_id AND r.at = a.at
        WHERE a.at >= :start AND a.at < :end AND r.at >= :start AND r.at < :end
    ), busy AS MATERIALIZED (
        SELECT worker, sum(prefill_ms + decode_ms) AS all_ms, (
            SELECT sum(extract(epoch FROM upper(part) - lower(part)))
            FROM unnest(range_agg(tstzrange(ended_at - (prefill_ms + decode_ms) * interval '1 ms', ended_at))) AS part
        ) AS busy_s
        FROM ended GROUP BY worker
    )
    SELECT ended.organisation, ended.model, part.phase,
        sum(part.ms / busy.all_ms * busy.busy_s)::float8 AS busy_s,
        coalesce(sum(part.ms / busy.all_ms * busy.busy_s) FILTER (WHERE ended.retried), 0)::float8 AS retried_s
    FROM ended JOIN busy ON busy.worker = ended.worker AND busy.all_ms > 0
        CROSS JOIN LATERAL (VALUES ('prefill', ended.prefill_ms), ('decode', ended.decode_ms)) AS part (phase, ms)
    WHERE part.ms > 0
    GROUP BY ended.organisation, ended.model, part.phase
    """
)


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


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What an organisation used in a time, and how its requests went. Cost in nano-units."""

    computed: int
    cached: int
    decode: int
    cost: int
    requests: int
    failed: int
    met: int
    missed: int


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
    """What workers spent on one phase for one organisation and model, seconds of a whole worker.

    `retried_s`: the part of it that went into attempts but the last.
    """

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


async def period(conn: AsyncConnection, tenant: str, span: Span) -> Period:
    """Return an organisation's sums over a whole span, in one statement: what a page compares with."""
    start, end = moment(span.start_s * 1000), moment(span.end_s * 1000)
    fine = span.width_s < 3600
    table: Any = t.usage_record if fine else t.usage_hourly
    u, r = table.c, t.request.c
    at = u.at if fine else u.hour

    def tokens(meter: str) -> sa.ColumnElement[Any]:
        return sa.func.coalesce(sa.func.sum(u.tokens).filter(u.meter == meter), 0).label(meter)

    used = (
        sa.select(
            tokens("prefill_computed"),
            tokens("prefill_cached"),
            tokens("decode"),
            sa.func.coalesce(sa.func.sum(u.cost), 0).label("cost"),
        )
        .where(u.organisation == tenant, u.billable, at >= start, at < end)
        .subquery()
    )
    went = sa.select(*_counts(r)).where(r.organisation == tenant, r.at >= start, r.at < end).subquery()
    both = sa.select(used, went).select_from(used.join(went, sa.true()))
    row = (await conn.execute(both)).mappings().one()
    return Period(
        computed=int(row["prefill_computed"]),
        cached=int(row["prefill_cached"]),
        **{name: int(row[name]) for name in ("decode", "cost", "requests", "failed", "met", "missed")},
    )


async def health(conn: AsyncConnection, tenant: str, span: Span) -> Sequence[Health]:
    """Return how an organisation's requests went, by bucket."""
    return await _health(conn, span, t.request.c.organisation == tenant)


async def health_across_tenants(conn: AsyncConnection, span: Span, *, model: str | None = None) -> Sequence[Health]:
    """Return how all requests but the demo week's went, by bucket; `model`: of this one alone."""
    served = t.request.c.organisation != DEMO_WEEK_ORG
    return await _health(conn, span, served, *([] if model is None else [t.request.c.model == model]))


def _counts(r: Any) -> Sequence[sa.ColumnElement[Any]]:
    """Return the columns that count requests (of `billing.request`) by how they went."""

    def count(condition: sa.ColumnElement[bool], name: str) -> sa.ColumnElement[Any]:
        return sa.func.count().filter(condition).label(name)

    return (
        sa.func.count().label("requests"),
        count(r.outcome.not_in(("finished", "client_left")), "failed"),
        count(r.slo_met.is_(True), "met"),
        count(r.slo_met.is_(False), "missed"),
    )


async def _health(conn: AsyncConnection, span: Span, *where: sa.ColumnElement[bool]) -> Sequence[Health]:
    r = t.request.c
    bucket = bucket_of(r.at, span.width_s)
    tpot = r.decode_ms / sa.func.nullif(r.decode_tokens - 1, 0)

    def percentile(share: float, column: Any) -> sa.ColumnElement[Any]:
        return sa.func.percentile_cont(share).within_group(column)

    query = (
        sa.select(
            bucket.label("start_s"),
            *_counts(r),
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
    """Return the workers' seconds by organisation, model and phase.

    A worker is busy while it computes for anybody, however many at once: that time is divided among its requests by how
    long each of them took. A unified worker's counts as prefill until the first token and as decode after it.
    """
    bounds = {"start": moment(span.start_s * 1000), "end": moment(span.end_s * 1000)}
    return [
        Worked(**{name: row[name] for name in Worked.__struct_fields__})
        for row in (await conn.execute(_WORKED, bounds)).mappings()
    ]
