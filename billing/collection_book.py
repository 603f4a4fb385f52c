"""What is known of invoices and credit notes at a payment provider: one row each, and what is to be done about them."""

import enum
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing.invoice_book import State


class Stage(enum.StrEnum):
    """How far an invoice, or a credit note, is at the provider."""

    ASKED = "asked"  # whether it arrived is not known; it is asked again
    OPEN = "open"  # the provider has it
    DECLINED = "declined"  # the buyer's bank refused; a note: the provider refused the refund
    PAID = "paid"  # a note: done
    WITHDRAWN = "withdrawn"  # paid elsewhere, or void
    MISMATCH = "mismatch"  # what the provider said is not what was asked; a person looks


UNSETTLED: Final = (Stage.ASKED, Stage.OPEN, Stage.DECLINED)


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `amount_cents`: asked for; of a credit note: to be refunded. `next_at`: not asked again before."""

    invoice_id: uuid.UUID
    provider: str
    state: Stage
    amount_cents: int
    reference: str
    url: str
    reason: str
    tries: int
    declines: int
    next_at: datetime
    asked_at: datetime
    said_at: datetime | None


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """An invoice, or a credit note, that something is to be done about."""

    organisation: str
    invoice_id: uuid.UUID


async def find_collection(conn: AsyncConnection, invoice_id: uuid.UUID) -> Collection | None:
    """Return what is known of an invoice or credit note; None = no provider was asked."""
    row = (
        (await conn.execute(sa.select(m.collection).where(m.collection.c.invoice_id == invoice_id))).mappings().first()
    )
    return None if row is None else Collection(**{**row, "state": Stage(row["state"])})


async def write(conn: AsyncConnection, invoice_id: uuid.UUID, **changes: Any) -> None:
    """Make or change a row; the caller holds the organisation's money."""
    values = {name: value.value if isinstance(value, Stage) else value for name, value in changes.items()}
    query = insert(m.collection).values(invoice_id=invoice_id, **values)
    await conn.execute(query.on_conflict_do_update(index_elements=["invoice_id"], set_=values))


async def change(conn: AsyncConnection, invoice_id: uuid.UUID, **changes: Any) -> None:
    """Change a row that is there."""
    values = {name: value.value if isinstance(value, Stage) else value for name, value in changes.items()}
    await conn.execute(sa.update(m.collection).where(m.collection.c.invoice_id == invoice_id).values(values))


async def refunds_of(conn: AsyncConnection, invoice_id: uuid.UUID, provider: str) -> tuple[int, int]:
    """Return what a provider collected for an invoice, and what of it goes or went back; cents."""
    paid = sa.select(sa.func.coalesce(sa.func.sum(m.payment.c.amount_cents), 0)).where(
        m.payment.c.invoice_id == invoice_id, m.payment.c.provider == provider
    )
    back = (
        sa.select(sa.func.coalesce(sa.func.sum(m.collection.c.amount_cents), 0))
        .select_from(m.collection.join(m.invoice, m.invoice.c.id == m.collection.c.invoice_id))
        .where(m.invoice.c.corrects == invoice_id, m.collection.c.state != Stage.DECLINED.value)
    )
    return int((await conn.execute(paid)).scalar_one()), int((await conn.execute(back)).scalar_one())


async def customer_of(conn: AsyncConnection, tenant: str, provider: str) -> str:
    """Return a provider's id of a buyer; empty = none is known."""
    c = m.payment_customer.c
    query = sa.select(c.reference).where(c.organisation == tenant, c.provider == provider)
    return (await conn.execute(query)).scalar_one_or_none() or ""


async def set_customer(conn: AsyncConnection, tenant: str, provider: str, reference: str) -> None:
    """Set which buyer of a provider an organisation is."""
    values = {"organisation": tenant, "provider": provider, "reference": reference}
    query = insert(m.payment_customer).values(values)
    await conn.execute(
        query.on_conflict_do_update(index_elements=["organisation", "provider"], set_={"reference": reference})
    )


async def due_across_tenants(conn: AsyncConnection, *, now: datetime, limit: int) -> Sequence[Due]:
    """Return what the provider is to be told: notes first, since they lower what invoices ask for."""
    inv, row = m.invoice.c, m.collection.c
    known = m.invoice.outerjoin(m.collection, row.invoice_id == inv.id)
    waits = sa.or_(row.next_at.is_(None), row.next_at <= now)
    unsettled = [stage.value for stage in UNSETTLED]
    note = (inv.kind == "credit_note") & (row.state == Stage.ASKED.value)
    unasked = (inv.kind == "invoice") & (inv.state == State.ISSUED.value)
    unasked &= sa.or_(row.state.is_(None), row.state == Stage.ASKED.value)
    elsewhere = (inv.kind == "invoice") & inv.state.in_([State.PAID.value, State.VOID.value]) & row.state.in_(unsettled)
    query = (
        sa.select(inv.organisation, inv.id.label("invoice_id"))
        .select_from(known)
        .where(waits, sa.or_(note, unasked, elsewhere))
        .order_by(inv.kind, row.next_at.asc().nulls_first(), inv.id)
        .limit(limit)
    )
    return [Due(**found) for found in (await conn.execute(query)).mappings()]
