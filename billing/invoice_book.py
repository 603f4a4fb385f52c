"""Invoices as they are stored: their states, their lines, what is due, and which months have none. Read only."""

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing import tables as t
from billing.accounts import Posting
from billing.invoice_lines import Line
from billing.periods import Period
from contracts.demo import DEMO_WEEK_ORG


class State(StrEnum):
    """Where an invoice is."""

    DRAFT = "draft"
    ISSUED = "issued"
    PAID = "paid"
    VOID = "void"  # written off


NEXT: Final[Mapping[State, frozenset[State]]] = MappingProxyType({
    State.DRAFT: frozenset({State.ISSUED}),
    State.ISSUED: frozenset({State.PAID, State.VOID}),
    State.PAID: frozenset(),
    State.VOID: frozenset(),
})  # fmt: skip


class InvoiceError(ValueError):
    """Something that may not be done with an invoice; the message says why."""


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """One invoice or credit note; amounts in cents of `currency`. A credit note's are what it gives back."""

    id: uuid.UUID
    organisation: str
    kind: str
    number: str | None
    state: State
    period_start: datetime
    period_end: datetime
    corrects: uuid.UUID | None
    currency: str
    seller: Mapping[str, Any]
    buyer: Mapping[str, Any]
    subtotal_cents: int
    tax_cents: int
    total_cents: int
    credits_cents: int
    due_cents: int
    issued_at: datetime | None
    due_at: datetime | None
    paid_at: datetime | None
    lines: tuple[Line, ...] = ()


async def outstanding(conn: AsyncConnection, found: Invoice) -> int:
    """Return what is still due of an invoice, cents; negative: too much was paid."""
    paid = sa.select(sa.func.coalesce(sa.func.sum(m.payment.c.amount_cents), 0)).where(
        m.payment.c.invoice_id == found.id
    )
    noted = sa.select(sa.func.coalesce(sa.func.sum(m.invoice.c.due_cents), 0)).where(m.invoice.c.corrects == found.id)
    return (
        found.due_cents - int((await conn.execute(paid)).scalar_one()) - int((await conn.execute(noted)).scalar_one())
    )


async def find_invoice(conn: AsyncConnection, tenant: str, invoice_id: uuid.UUID) -> Invoice | None:
    """Return an invoice of this organisation with its lines."""
    return await find_one(conn, (m.invoice.c.organisation == tenant) & (m.invoice.c.id == invoice_id))


async def list_invoices(conn: AsyncConnection, tenant: str) -> Sequence[Invoice]:
    """Return an organisation's invoices and credit notes without their lines, newest first."""
    query = (
        sa.select(m.invoice)
        .where(m.invoice.c.organisation == tenant)
        .order_by(m.invoice.c.period_start.desc(), m.invoice.c.created_at.desc())
    )
    return [_invoice(row, ()) for row in (await conn.execute(query)).mappings()]


async def tenants_to_invoice_across_tenants(conn: AsyncConnection, period: Period) -> Sequence[str]:
    """Return the organisations with usage or postings in a month and no invoice for it; not the demo week's."""
    h, x, inv = t.usage_hourly.c, t.ledger_transaction.c, m.invoice.c
    used = sa.select(h.organisation).where(h.hour >= period.start, h.hour < period.end)
    posted = sa.select(x.organisation).where(
        x.kind == Posting.ADJUSTMENT.value, x.at >= period.start, x.at < period.end
    )
    either = used.union(posted).subquery()
    done = sa.select(inv.organisation).where(inv.kind == "invoice", inv.period_start == period.start)
    due = either.c.organisation.not_in(done) & (either.c.organisation != DEMO_WEEK_ORG)
    query = sa.select(either.c.organisation).where(due).order_by(either.c.organisation)
    return list((await conn.execute(query)).scalars())


async def find_one(conn: AsyncConnection, where: sa.ColumnElement[bool]) -> Invoice | None:
    """Return the invoice that a condition finds, with its lines."""
    row = (await conn.execute(sa.select(m.invoice).where(where))).mappings().first()
    if row is None:
        return None
    query = (
        sa.select(m.invoice_line).where(m.invoice_line.c.invoice_id == row["id"]).order_by(m.invoice_line.c.position)
    )
    lines = [
        Line(**{name: line[name] for name in Line.__struct_fields__}) for line in (await conn.execute(query)).mappings()
    ]
    return _invoice(row, lines)


def _invoice(row: sa.RowMapping, lines: Sequence[Line]) -> Invoice:
    fields = {name: row[name] for name in Invoice.__struct_fields__ if name != "lines"}
    return Invoice(**fields | {"state": State(row["state"])}, lines=tuple(lines))
