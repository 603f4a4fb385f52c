"""What a tier promised and did not keep: credits at the period's close, from the outcomes the scheduler steers by.

A promise is of a model and tier: an attainment, and which part of what the tier cost comes back below it. Counted are
the requests whose targets are known (`slo_met`): finished ones, and those that we broke, as missed. The credit's row,
the list of missed requests and the posting come in one transaction: debit `slo_credits`, credit the receivable.
"""

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing import tables as t
from billing.accounts import SLO_CREDITS, Posting, receivable
from billing.ledger import post_transaction
from billing.periods import Period
from contracts.rating import PPM

_NAMESPACE: Final = uuid.UUID("6f0e1f6a-7a0b-4c19-9d0e-0f6b6f1c5a10")


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's tier promises from a moment on: attainment and credit in millionths."""

    model: str
    tier: str
    effective_from: datetime
    attainment_ppm: int
    credit_ppm: int
    set_by: str = ""


class SloCredit(msgspec.Struct, frozen=True, kw_only=True):
    """One credit: of `met + missed` requests too many missed; `amount` of `base` comes back, nano-units."""

    id: uuid.UUID
    organisation: str
    period_start: datetime
    model: str
    tier: str
    met: int
    missed: int
    attainment_ppm: int
    credit_ppm: int
    base: int
    amount: int


async def promise(conn: AsyncConnection, promised: Promise) -> None:
    """Add a promise. Raises ValueError when its terms make no sense."""
    if not (0 <= promised.attainment_ppm <= PPM and 0 <= promised.credit_ppm <= PPM):
        raise ValueError(f"attainment and credit are millionths, 0 to {PPM}")
    await conn.execute(m.slo_promise.insert().values(msgspec.structs.asdict(promised)))


async def promises_at(conn: AsyncConnection, at: datetime) -> Sequence[Promise]:
    """Return what is promised at a moment, one per model and tier."""
    p = m.slo_promise.c
    query = (
        sa.select(m.slo_promise)
        .ext(distinct_on(p.model, p.tier))
        .where(p.effective_from <= at)
        .order_by(p.model, p.tier, p.effective_from.desc())
    )
    return [Promise(**row) for row in (await conn.execute(query)).mappings()]


async def post_slo_credits(conn: AsyncConnection, tenant: str, period: Period) -> Sequence[SloCredit]:
    """Post a period's credits of one organisation; return those that were not there before."""
    posted = []
    for promised in await promises_at(conn, period.start):
        found = await _credit(conn, tenant, period, promised)
        if found is not None and await _post(conn, found, period):
            posted.append(found)
    return posted


async def _credit(conn: AsyncConnection, tenant: str, period: Period, promised: Promise) -> SloCredit | None:
    r, hourly = t.request.c, t.usage_hourly.c
    counts = sa.select(
        sa.func.count().filter(r.slo_met).label("met"), sa.func.count().filter(~r.slo_met).label("missed")
    ).where(*_of(tenant, period, promised.model, promised.tier))
    seen = (await conn.execute(counts)).one()
    total = seen.met + seen.missed
    if total == 0 or seen.met * PPM >= promised.attainment_ppm * total:
        return None
    cost = sa.select(sa.func.coalesce(sa.func.sum(hourly.cost), 0)).where(
        hourly.organisation == tenant,
        hourly.hour >= period.start,
        hourly.hour < period.end,
        hourly.model == promised.model,
        hourly.tier == promised.tier,
    )
    base = int((await conn.execute(cost)).scalar_one())
    name = f"{tenant}/{period.start.isoformat()}/{promised.model}/{promised.tier}"
    return SloCredit(
        id=uuid.uuid5(_NAMESPACE, name),
        organisation=tenant,
        period_start=period.start,
        model=promised.model,
        tier=promised.tier,
        met=seen.met,
        missed=seen.missed,
        attainment_ppm=promised.attainment_ppm,
        credit_ppm=promised.credit_ppm,
        base=base,
        amount=-(-base * promised.credit_ppm // PPM),
    )


async def _post(conn: AsyncConnection, found: SloCredit, period: Period) -> bool:
    new = await post_transaction(
        conn,
        transaction_id=found.id,
        kind=Posting.SLO_CREDIT,
        organisation=found.organisation,
        at=period.end - timedelta(microseconds=1),
        entries={SLO_CREDITS: found.amount, receivable(found.organisation): -found.amount},
    )
    if not new:
        return False
    await conn.execute(m.slo_credit.insert().values(msgspec.structs.asdict(found)))
    r = t.request.c
    tpot = sa.case((r.decode_tokens > 1, r.decode_ms / (r.decode_tokens - 1)), else_=0.0)
    missed = sa.select(sa.literal(found.id), r.request_id, r.at, r.outcome, r.ttft_ms, tpot).where(
        *_of(found.organisation, period, found.model, found.tier), ~r.slo_met
    )
    columns = ["slo_credit_id", "request_id", "at", "outcome", "ttft_ms", "tpot_ms"]
    await conn.execute(m.slo_missed.insert().from_select(columns, missed))
    return True


def _of(tenant: str, period: Period, model: str, tier: str) -> Sequence[sa.ColumnElement[bool]]:
    r = t.request.c
    return (
        r.organisation == tenant,
        r.at >= period.start,
        r.at < period.end,
        r.model == model,
        r.tier == tier,
    )
