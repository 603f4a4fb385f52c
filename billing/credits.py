"""Credits: grants with priority and expiry, and the job that uses them up. The ledger has what is left of each.

1. A grant posts once per idempotency key. Paid: debit cash, credit `credit:GRANT` (deferred revenue).
   Promotional: debit `promotion_open` instead, since nobody paid.
2. `apply_credits` covers what an organisation owes and no invoice asks for yet, from the grants in order of priority,
   then expiry, then age: debit `credit:GRANT`, credit the receivable. It holds the organisation's lock and works from
   balances, so running it again does nothing.
3. `expire_credits` ends grants after their date: what was paid is breakage, what was given is taken back.
"""

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing import tables as t
from billing.accounts import (
    BREAKAGE,
    CASH,
    PROMOTION_OPEN,
    PROMOTION_USED,
    SETTLING,
    Posting,
    credit,
    receivable,
)
from billing.ledger import NOT_USAGE, post_transaction

PAID: Final = "paid"
PROMOTIONAL: Final = "promotional"
NANO_PER_CENT: Final = 10_000_000
_MOMENT: Final = timedelta(microseconds=1)


class CreditError(ValueError):
    """A grant that may not be made; the message says what would be right."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Credit of an organisation, nano-units. `left` is what is not used, of one that did not expire."""

    id: uuid.UUID
    organisation: str
    kind: str
    amount: int
    left: int
    priority: int
    granted_at: datetime
    expires_at: datetime | None
    note: str


async def lock_organisation(conn: AsyncConnection, tenant: str) -> None:
    """Hold the organisation's money until the transaction ends."""
    await conn.execute(sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": f"money:{tenant}"})


class NewGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Credit to give. `amount` nano-units; a lower `priority` is used first; `idempotency`: once per organisation."""

    kind: str
    amount: int
    idempotency: str
    priority: int = 100
    expires_at: datetime | None = None
    note: str = ""
    granted_by: str = ""


async def grant(
    conn: AsyncConnection,
    tenant: str,
    new: NewGrant,
    *,
    at: datetime,
    posting: Posting = Posting.GRANT,
    paid_from: str = CASH,
) -> tuple[uuid.UUID, bool]:
    """Give credit; return the grant's id, and False when this idempotency key was used for it before.

    Raises:
        CreditError: bad terms, or the key was used for another grant.
    """
    if new.kind not in (PAID, PROMOTIONAL):
        raise CreditError(f"a grant is {PAID} or {PROMOTIONAL}, not {new.kind!r}")
    if new.amount <= 0 or not new.idempotency:
        raise CreditError("a grant needs an amount above 0 and an idempotency key")
    await lock_organisation(conn, tenant)
    g = m.credit_grant.c
    mine = (g.organisation == tenant) & (g.idempotency == new.idempotency)
    known = (await conn.execute(sa.select(m.credit_grant).where(mine))).first()
    if known is not None:
        if (known.kind, known.amount) != (new.kind, new.amount):
            raise CreditError(f"{new.idempotency!r} was used for {known.kind} credit of {known.amount} nano-units")
        return known.id, False
    grant_id = uuid.uuid4()
    values = {"id": grant_id, "organisation": tenant, "granted_at": at, **msgspec.structs.asdict(new)}
    await conn.execute(m.credit_grant.insert().values(values))
    source = paid_from if new.kind == PAID else PROMOTION_OPEN
    await post_transaction(
        conn,
        transaction_id=grant_id,
        kind=posting,
        organisation=tenant,
        at=at,
        entries={source: new.amount, credit(grant_id): -new.amount},
        paid=new.kind == PAID,
    )
    return grant_id, True


async def give_back(
    conn: AsyncConnection, tenant: str, amount: int, *, idempotency: str, note: str, at: datetime, posting: Posting
) -> None:
    """Turn what an organisation paid too much into paid credit, nano-units."""
    new = NewGrant(kind=PAID, amount=amount, idempotency=idempotency, note=note)
    await grant(conn, tenant, new, at=at, posting=posting, paid_from=receivable(tenant))


async def grants_of(conn: AsyncConnection, tenant: str) -> Sequence[Grant]:
    """Return an organisation's grants in the order in which they are used."""
    g = m.credit_grant.c
    left = (
        sa.select(sa.func.coalesce(-sa.func.sum(t.ledger_entry.c.amount), 0))
        .select_from(t.ledger_entry.join(t.account, t.account.c.id == t.ledger_entry.c.account_id))
        .join(t.ledger_transaction, t.ledger_transaction.c.id == t.ledger_entry.c.transaction_id)
        .where(
            t.account.c.code == sa.func.concat("credit:", g.id),
            t.ledger_transaction.c.organisation == tenant,
            NOT_USAGE,
        )
        .scalar_subquery()
    )
    query = (
        sa.select(m.credit_grant, left.label("left"))
        .where(g.organisation == tenant)
        .order_by(g.priority, g.expires_at.asc().nulls_last(), g.granted_at, g.id)
    )
    return [
        Grant(**{name: row[name] for name in Grant.__struct_fields__} | {"left": int(row["left"])})
        for row in (await conn.execute(query)).mappings().all()
    ]


async def owed(conn: AsyncConnection, tenant: str) -> int:
    """Return what an organisation owes and no invoice asks for yet, nano-units; negative: too much was credited."""
    usage = sa.select(sa.func.coalesce(sa.func.sum(t.usage_hourly.c.cost), 0)).where(
        t.usage_hourly.c.organisation == tenant
    )
    asked = sa.select(sa.func.coalesce(sa.func.sum(m.invoice.c.due_cents), 0)).where(
        m.invoice.c.organisation == tenant, m.invoice.c.kind == "invoice"
    )
    other = await _receivable_entries(conn, tenant, but=SETTLING)
    return (
        int((await conn.execute(usage)).scalar_one())
        + other
        - NANO_PER_CENT * int((await conn.execute(asked)).scalar_one())
    )


async def _receivable_entries(conn: AsyncConnection, tenant: str, *, but: Sequence[Posting]) -> int:
    transaction, entry = t.ledger_transaction.c, t.ledger_entry.c
    query = (
        sa.select(sa.func.coalesce(sa.func.sum(entry.amount), 0))
        .select_from(t.ledger_transaction)
        .join(t.ledger_entry, entry.transaction_id == transaction.id)
        .join(t.account, t.account.c.id == entry.account_id)
        .where(
            transaction.organisation == tenant,
            transaction.kind.not_in([kind.value for kind in but]),
            NOT_USAGE,
            t.account.c.code == receivable(tenant),
        )
    )
    return int((await conn.execute(query)).scalar_one())


async def funding(conn: AsyncConnection, tenant: str) -> int:
    """Return what a prepaid organisation may use in its life: credit that did not expire, less other charges."""
    grants = sum(grant.amount for grant in await grants_of(conn, tenant))
    expired = sa.select(
        sa.func.coalesce(sa.func.sum(t.ledger_entry.c.amount).filter(t.ledger_entry.c.amount > 0), 0)
    ).select_from(
        t.ledger_transaction.join(t.ledger_entry, t.ledger_entry.c.transaction_id == t.ledger_transaction.c.id)
    )
    expired = expired.where(
        t.ledger_transaction.c.organisation == tenant,
        t.ledger_transaction.c.kind == Posting.CREDIT_EXPIRED.value,
        NOT_USAGE,
    )
    other = await _receivable_entries(conn, tenant, but=(Posting.CREDIT_APPLIED,))
    return grants - int((await conn.execute(expired)).scalar_one()) - other


async def apply_credits(
    conn: AsyncConnection, tenant: str, *, now: datetime, most: int | None = None, at: datetime | None = None
) -> int:
    """Cover what is owed (at most `most`) from the organisation's grants; return how much was, nano-units.

    `now` decides which grants still hold, `at` (default: now) the period of the postings.
    """
    await lock_organisation(conn, tenant)
    need = await owed(conn, tenant) if most is None else most
    covered = 0
    for one in await grants_of(conn, tenant):
        amount = min(need - covered, one.left)
        if amount <= 0 or (one.expires_at is not None and one.expires_at <= now):
            continue
        entries = {credit(one.id): amount, receivable(tenant): -amount}
        if one.kind == PROMOTIONAL:
            entries |= {PROMOTION_USED: amount, PROMOTION_OPEN: -amount}
        await post_transaction(
            conn,
            transaction_id=uuid.uuid4(),
            kind=Posting.CREDIT_APPLIED,
            organisation=tenant,
            at=at or now,
            entries=entries,
            paid=one.kind == PAID,
        )
        covered += amount
    return covered


async def expire_credits(conn: AsyncConnection, tenant: str, *, now: datetime) -> int:
    """End what is left of grants whose date has passed; return how much that was, nano-units."""
    await lock_organisation(conn, tenant)
    ended = 0
    for one in await grants_of(conn, tenant):
        if one.expires_at is None or one.expires_at > now or one.left <= 0:
            continue
        target = BREAKAGE if one.kind == PAID else PROMOTION_OPEN
        await post_transaction(
            conn,
            transaction_id=uuid.uuid5(one.id, "expired"),
            kind=Posting.CREDIT_EXPIRED,
            organisation=tenant,
            at=now,
            entries={credit(one.id): one.left, target: -one.left},
            paid=one.kind == PAID,
        )
        ended += one.left
    return ended


async def use_credits(conn: AsyncConnection, tenant: str, *, now: datetime) -> None:
    """Run the job for one organisation: what was used before a grant ended is still covered by it."""
    ending = [one.expires_at for one in await grants_of(conn, tenant) if one.left and one.expires_at is not None]
    await apply_credits(conn, tenant, now=min([now, *(end - _MOMENT for end in ending)]), at=now)
    await apply_credits(conn, tenant, now=now)
    await expire_credits(conn, tenant, now=now)


async def tenants_with_credit_across_tenants(conn: AsyncConnection) -> Sequence[str]:
    """Return the organisations that were ever granted credit."""
    query = sa.select(m.credit_grant.c.organisation).distinct().order_by(m.credit_grant.c.organisation)
    return list((await conn.execute(query)).scalars())
