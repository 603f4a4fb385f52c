"""Corrections of one request: an estimate, or a partial row, whose true counts are known later.

1. The request's price is the one that it was billed at, or that the newest re-rating over it named.
2. `correction` keeps the counts before and after, why and by whom: the audit trail. From then on the newest row's
   counts are the request's, for re-ratings and for `reconcile`; the usage records stay as they were billed.
3. `rerating_line` keeps what each meter cost and costs, so that corrections and re-ratings follow each other in any
   order.
4. One ledger transaction, which names the request's own: debit the receivable with the difference, credit
   `adjustment:METER`. It is dated when it is made, so it goes on the next invoice.

A correction says what the counts are, not by how much they differ: the same one again changes nothing. Prices and
budgets are untouched by it.
"""

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing import tables as t
from billing.accounts import Posting, adjustment, receivable
from billing.ledger import post_transaction
from billing.moments import moment
from billing.prices import map_price
from billing.rerating import RERATE_LOCK, transaction_of
from contracts.rating import MINIMUM_CHARGE, CacheScope, Meter, Price, Tokens, rate, top_up

_LONGEST_COUNT: Final = 10**9  # tokens; beyond any request, and far below what a cost can hold


class CorrectionError(ValueError):
    """A correction that cannot be made; the message says why."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's counts are; None = as they are now. `reason` is kept and printed on the invoice."""

    id: uuid.UUID
    request_id: uuid.UUID
    prefill_computed: int | None = None
    prefill_cached: int | None = None
    decode: int | None = None
    reason: str
    made_by: str = ""


class Corrected(msgspec.Struct, frozen=True, kw_only=True):
    """What a correction did. Costs in nano-units; `changed`: False when the counts were so already."""

    changed: bool
    organisation: str
    old: Tokens
    new: Tokens
    old_cost: int
    new_cost: int


class _Billed(msgspec.Struct, frozen=True, kw_only=True):
    """What a correction needs to know of the request."""

    request_id: uuid.UUID
    at: datetime
    organisation: str
    model: str
    tier: str
    batch: bool
    cache_scope: str
    billable: bool
    outcome: str
    price_version: int


async def correct(conn: AsyncConnection, wanted: Wanted, *, now: datetime) -> Corrected:
    """Set a request's counts and post the difference; the caller's transaction commits.

    Raises:
        CorrectionError: no such request, one that costs nothing whatever it counted, or counts that make no sense.
    """
    if not wanted.reason.strip():
        raise CorrectionError("a correction needs a reason: it is printed on the invoice")
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(RERATE_LOCK)))
    request = await _request(conn, wanted.request_id)
    old = await _counts(conn, request)
    new = _new_counts(old, wanted)
    costs = await _costs(conn, request)
    same = Corrected(
        changed=False, organisation=request.organisation, old=old, new=old, old_cost=sum(costs.values()),
        new_cost=sum(costs.values()),
    )  # fmt: skip
    known = sa.select(m.correction.c.request_id).where(m.correction.c.id == wanted.id)
    made = (await conn.execute(known)).scalar_one_or_none()
    if made is not None and made != wanted.request_id:
        raise CorrectionError(f"{wanted.id} is the correction of another request, {made}")
    if made is not None or new == old:
        return same
    price = await _price(conn, request)
    costs_new = _rated(new, price, batch=request.batch, scope=CacheScope(request.cache_scope))
    deltas = {meter: costs_new[meter] - costs.get(meter, 0) for meter in costs_new}
    await _write(conn, wanted, request, old, new, price=price.version, delta=sum(deltas.values()), now=now)
    lines = [
        {
            "rerating_id": wanted.id,
            "request_id": wanted.request_id,
            "meter": meter,
            "old_cost": costs.get(meter, 0),
            "new_cost": costs_new[meter],
        }
        for meter, delta in deltas.items()
        if delta
    ]
    if lines:
        await conn.execute(m.rerating_line.insert().values(lines))
        await _post(conn, wanted, request.organisation, deltas, now=now)
    return msgspec.structs.replace(same, changed=True, new=new, new_cost=sum(costs_new.values()))


async def _request(conn: AsyncConnection, request_id: uuid.UUID) -> _Billed:
    r = t.request.c
    query = sa.select(*(r[name] for name in _Billed.__struct_fields__)).where(
        r.request_id == request_id, r.at == moment(request_id.int >> 80)
    )
    row = (await conn.execute(query)).mappings().first()
    if row is None:
        raise CorrectionError(f"there is no billed request {request_id}; if its usage was lost: `pdgate usage restore`")
    found = _Billed(**{str(name): value for name, value in row.items()})
    if not found.billable:
        raise CorrectionError(f"{request_id} costs nothing whatever it counted: its outcome is {found.outcome}")
    return found


async def _counts(conn: AsyncConnection, request: _Billed) -> Tokens:
    c, u = m.correction.c, t.usage_record.c
    newest = (
        sa.select(c.prefill_computed, c.prefill_cached, c.decode)
        .where(c.request_id == request.request_id)
        .order_by(c.sequence.desc())
        .limit(1)
    )
    row = (await conn.execute(newest)).mappings().first()
    if row is not None:
        return Tokens(**row)
    query = sa.select(u.meter, u.tokens).where(
        u.request_id == request.request_id, u.at == request.at, u.meter != MINIMUM_CHARGE
    )
    return Tokens(**{row.meter: int(row.tokens) for row in await conn.execute(query)})


def _new_counts(old: Tokens, wanted: Wanted) -> Tokens:
    given = {meter.value: getattr(wanted, meter.value) for meter in Meter}
    counts = {name: old.of(Meter(name)) if value is None else value for name, value in given.items()}
    if any(not 0 <= value <= _LONGEST_COUNT for value in counts.values()):
        raise CorrectionError(f"counts are 0 to {_LONGEST_COUNT:,} tokens, not {counts}")
    return Tokens(**counts)


async def _costs(conn: AsyncConnection, request: _Billed) -> Mapping[str, int]:
    """Return what each meter of a request costs by now: as billed, plus earlier re-ratings and corrections."""
    u, line = t.usage_record.c, m.rerating_line.c
    billed = sa.select(u.meter, u.cost).where(u.request_id == request.request_id, u.at == request.at)
    later = sa.select(line.meter, line.new_cost - line.old_cost).where(line.request_id == request.request_id)
    found: dict[str, int] = {}
    for meter, nano in (await conn.execute(sa.union_all(billed, later))).all():
        found[meter] = found.get(meter, 0) + int(nano)
    return found


async def _price(conn: AsyncConnection, request: _Billed) -> Price:
    r, p, narrower = m.rerating.c, t.price.c, t.price.alias("narrower").c
    kept = sa.exists().where(  # the re-rating left the request alone: billing.rerating, step 1
        narrower.model == request.model,
        narrower.effective_from <= request.at,
        sa.or_(narrower.effective_to.is_(None), narrower.effective_to > request.at),
        sa.or_(narrower.organisation.is_(None), narrower.organisation == request.organisation),
        sa.or_(narrower.tier.is_(None), narrower.tier == request.tier),
        sa.tuple_(narrower.organisation.is_not(None), narrower.tier.is_not(None))
        > sa.tuple_(p.organisation.is_not(None), p.tier.is_not(None)),
    )
    newest = (
        sa.select(r.price_version)
        .join_from(m.rerating, t.price, sa.and_(p.model == r.model, p.version == r.price_version))
        .where(
            r.model == request.model,
            r.from_at <= request.at,
            r.to_at > request.at,
            sa.or_(r.organisation.is_(None), r.organisation == request.organisation),
            sa.or_(p.tier.is_(None), p.tier == request.tier),
            sa.or_(r.organisation.is_not(None) & p.organisation.is_(None), ~kept),
        )
        .order_by(r.at.desc())
        .limit(1)
    )
    version = (await conn.execute(newest)).scalar_one_or_none() or request.price_version
    row = (await conn.execute(sa.select(t.price).where(p.model == request.model, p.version == version))).one()
    return map_price(row)


def _rated(tokens: Tokens, price: Price, *, batch: bool, scope: CacheScope) -> dict[str, int]:
    costs = {meter.value: int(rate(tokens.of(meter), price.of(meter, batch=batch, scope=scope))) for meter in Meter}
    return costs | {MINIMUM_CHARGE: int(top_up(tokens, price, sum(costs.values())))}


async def _write(
    conn: AsyncConnection,
    wanted: Wanted,
    request: _Billed,
    old: Tokens,
    new: Tokens,
    *,
    price: int,
    delta: int,
    now: datetime,
) -> None:
    await conn.execute(
        m.correction.insert().values(
            id=wanted.id,
            request_id=wanted.request_id,
            request_at=request.at,
            organisation=request.organisation,
            model=request.model,
            price_version=price,
            delta=delta,
            reason=wanted.reason,
            made_by=wanted.made_by,
            at=now,
            **{meter.value: new.of(meter) for meter in Meter},
            **{f"old_{meter.value}": old.of(meter) for meter in Meter},
        )
    )


async def _post(
    conn: AsyncConnection, wanted: Wanted, organisation: str, deltas: Mapping[str, int], *, now: datetime
) -> None:
    posted = sa.select(t.ledger_transaction.c.id).where(t.ledger_transaction.c.id == wanted.request_id)
    await post_transaction(
        conn,
        transaction_id=transaction_of(wanted.id, organisation),
        kind=Posting.ADJUSTMENT,
        organisation=organisation,
        at=now,
        entries={receivable(organisation): sum(deltas.values())}
        | {adjustment(meter): -delta for meter, delta in deltas.items()},
        corrects=(await conn.execute(posted)).scalar_one_or_none(),  # one that cost nothing posted nothing
    )
