"""What goes on an invoice: usage by project, model, meter and price version; late usage, re-ratings and SLO credits.

Amounts are exact in nano-units and rounded to the cent once per line, half to even.
"""

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing import tables as t
from billing.accounts import SETTLING, Posting, receivable
from billing.credits import NANO_PER_CENT
from billing.ledger import NOT_USAGE
from billing.periods import Period
from billing.prices import map_price
from billing.rerating import transaction_of
from contracts.rating import MINIMUM_CHARGE, CacheScope, Meter, Price

USAGE: Final = "usage"
LATE: Final = "late"
ADJUSTMENT: Final = "adjustment"
SLO_CREDIT: Final = "slo_credit"
CORRECTION: Final = "correction"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `amount` nano-units, `price` nano-units per million tokens after discounts; None = does not apply."""

    kind: str
    description: str
    amount: int
    amount_cents: int
    of_period: datetime
    project: str | None = None
    model: str | None = None
    tier: str | None = None
    meter: str | None = None
    scope: str | None = None
    batch: bool | None = None
    price_version: int | None = None
    price: int | None = None
    tokens: int | None = None
    requests: int | None = None


class Posted(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction on the receivable that no invoice has yet. `amount` as the organisation owes it."""

    id: uuid.UUID
    kind: str
    at: datetime
    amount: int


def cents(nano: int, *, step: int = 1) -> int:
    """Return nano-units in cents, in multiples of `step` (billing.currencies), half to even."""
    each = NANO_PER_CENT * step
    whole, rest = divmod(nano, each)
    up = rest * 2 > each or (rest * 2 == each and whole % 2 == 1)
    return (whole + up) * step


async def usage_lines(conn: AsyncConnection, tenant: str, period: Period, *, step: int = 1) -> Sequence[Line]:
    """Return the lines of a period's billable usage, in order."""
    h = t.usage_hourly.c
    group = (h.project, h.model, h.tier, h.meter, h.scope, h.batch, h.price_version)
    query = (
        sa.select(
            *group,
            sa.func.sum(h.tokens).label("tokens"),
            sa.func.sum(h.requests).label("requests"),
            sa.func.sum(h.cost).label("cost"),
        )
        .where(h.organisation == tenant, h.billable, h.hour >= period.start, h.hour < period.end)
        .group_by(*group)
        .order_by(*group)
    )
    rows = [row for row in (await conn.execute(query)).all() if row.cost or row.tokens]
    prices = await _prices(conn, {row.model for row in rows})
    return [_usage_line(row, prices.get((row.model, row.price_version)), period, step) for row in rows]


def _usage_line(row: Any, price: Price | None, period: Period, step: int) -> Line:
    each: int | None = None
    if price is not None:
        each = price.minimum
        if row.meter != MINIMUM_CHARGE:
            each = price.of(Meter(row.meter), batch=row.batch, scope=CacheScope(row.scope))
    marks = [row.tier] * (row.tier != "default") + ["batch"] * row.batch + ["shared"] * (row.scope == "shared")
    name = row.meter.replace("_", " ") + (f" ({', '.join(marks)})" if marks else "")
    return Line(
        kind=USAGE,
        description=f"{row.model}: {name}",
        amount=int(row.cost),
        amount_cents=cents(int(row.cost), step=step),
        of_period=period.start,
        project=row.project,
        model=row.model,
        tier=row.tier,
        meter=row.meter,
        scope=row.scope,
        batch=row.batch,
        price_version=row.price_version,
        price=each,
        tokens=int(row.tokens),
        requests=int(row.requests),
    )


async def _prices(conn: AsyncConnection, models: Iterable[str]) -> dict[tuple[str, int], Price]:
    rows = await conn.execute(sa.select(t.price).where(t.price.c.model.in_(sorted(models))))
    return {(row.model, row.version): map_price(row) for row in rows.all()}


async def late_lines(conn: AsyncConnection, tenant: str, before: Period, *, step: int = 1) -> Sequence[Line]:
    """Return a line for each earlier period whose usage has grown since it was invoiced."""
    line, inv, h = m.invoice_line.c, m.invoice.c, t.usage_hourly.c
    closed = (
        await conn.execute(
            sa.select(inv.period_start, inv.period_end)
            .where(inv.organisation == tenant, inv.kind == "invoice", inv.period_start < before.start)
            .order_by(inv.period_start)
        )
    ).all()
    lines = []
    for row in closed:
        used = sa.select(sa.func.coalesce(sa.func.sum(h.cost), 0)).where(
            h.organisation == tenant, h.hour >= row.period_start, h.hour < row.period_end
        )
        invoiced = (
            sa.select(sa.func.coalesce(sa.func.sum(line.amount), 0))
            .select_from(m.invoice_line.join(m.invoice, inv.id == line.invoice_id))
            .where(inv.organisation == tenant, line.of_period == row.period_start, line.kind.in_((USAGE, LATE)))
        )
        late = int((await conn.execute(used)).scalar_one()) - int((await conn.execute(invoiced)).scalar_one())
        if late:
            lines.append(
                Line(
                    kind=LATE,
                    description=f"Usage of {row.period_start:%Y-%m} that came after its invoice",
                    amount=late,
                    amount_cents=cents(late, step=step),
                    of_period=row.period_start,
                )
            )
    return lines


async def not_invoiced(conn: AsyncConnection, tenant: str, before: datetime) -> Sequence[Posted]:
    """Return what was posted to the receivable before a moment, is not usage or settlement, and is on no invoice."""
    x, e, linked = t.ledger_transaction.c, t.ledger_entry.c, m.invoice_transaction.c
    settling = [kind.value for kind in SETTLING]
    query = (
        sa.select(x.id, x.kind, x.at, e.amount)
        .select_from(t.ledger_transaction)
        .join(t.ledger_entry, e.transaction_id == x.id)
        .join(t.account, t.account.c.id == e.account_id)
        .where(
            x.organisation == tenant,
            x.at < before,
            NOT_USAGE,
            x.kind.not_in(settling),
            t.account.c.code == receivable(tenant),
            ~sa.exists().where(linked.transaction_id == x.id),
        )
        .order_by(x.at, x.id)
    )
    return [Posted(**row) for row in (await conn.execute(query)).mappings()]


async def posted_lines(
    conn: AsyncConnection, tenant: str, posted: Sequence[Posted], period: Period, *, step: int = 1
) -> Sequence[Line]:
    """Return the lines of re-ratings, corrections and SLO credits among what was posted."""
    r = m.rerating.c
    reratings = await conn.execute(sa.select(r.id, r.model, r.reason).where(sa.or_(
        r.organisation.is_(None), r.organisation == tenant)))  # fmt: skip
    reasons = {
        transaction_of(row.id, tenant): (row.model, f"Re-rated: {row.reason}") for row in reratings.all()
    } | await _corrections(conn, tenant, posted)
    c = m.slo_credit.c
    promised = {
        row.id: row for row in (await conn.execute(sa.select(m.slo_credit).where(c.organisation == tenant))).all()
    }
    lines = []
    for one in posted:
        if one.kind == Posting.ADJUSTMENT:
            kind = ADJUSTMENT
            model, words = reasons.get(one.id, (None, "Adjustment"))
        elif one.kind == Posting.SLO_CREDIT:
            row = promised[one.id]
            kept = 100 * row.met / (row.met + row.missed)
            kind, model = SLO_CREDIT, row.model
            words = (
                f"{row.model} ({row.tier}): {kept:.2f} % of targets met, {row.attainment_ppm / 10_000:.2f} % promised"
            )
        else:
            continue
        lines.append(
            Line(
                kind=kind,
                description=words,
                amount=one.amount,
                amount_cents=cents(one.amount, step=step),
                of_period=period.start,
                model=model,
            )
        )
    return lines


async def _corrections(
    conn: AsyncConnection, tenant: str, posted: Sequence[Posted]
) -> dict[uuid.UUID, tuple[str | None, str]]:
    c = m.correction.c
    since = min((one.at for one in posted if one.kind == Posting.ADJUSTMENT), default=None)
    if since is None:
        return {}
    rows = await conn.execute(
        sa.select(c.id, c.request_id, c.model, c.reason).where(c.organisation == tenant, c.at >= since)
    )
    return {
        transaction_of(row.id, tenant): (row.model, f"Corrected {row.request_id}: {row.reason}") for row in rows.all()
    }
