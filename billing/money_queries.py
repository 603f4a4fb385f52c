"""What people read about an organisation's money: invoices, budgets with what is spent, webhooks, prices. Read only."""

import uuid
from collections.abc import Sequence
from datetime import datetime

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing.budgets import Budget, budgets_of, spent_in
from billing.invoice_book import Invoice, find_invoice
from billing.periods import month_of
from billing.profiles import find_profile


class BudgetUse(msgspec.Struct, frozen=True, kw_only=True):
    """A budget and what its scope was charged in the running month of the organisation's zone, nano-units."""

    budget: Budget
    spent: int
    resets_at: datetime

    @property
    def share(self) -> float:
        """Return spent over amount; 1 when nothing may be spent."""
        return self.spent / self.budget.amount if self.budget.amount else 1.0


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook that was or is to be sent."""

    id: uuid.UUID
    url: str
    body: str
    tries: int
    created_at: datetime
    delivered_at: datetime | None
    given_up_at: datetime | None
    last_error: str


async def budget_uses(conn: AsyncConnection, tenant: str, *, now: datetime) -> Sequence[BudgetUse]:
    """Return an organisation's budgets and how much of each is used."""
    period = month_of(now, (await find_profile(conn, tenant)).time_zone)
    return [
        BudgetUse(
            budget=budget,
            spent=await spent_in(conn, tenant, scope=budget.scope, scope_id=budget.scope_id, period=period),
            resets_at=period.end,
        )
        for budget in await budgets_of(conn, tenant)
    ]


async def deliveries(conn: AsyncConnection, tenant: str, *, limit: int = 100) -> Sequence[Delivery]:
    """Return an organisation's latest webhooks, newest first."""
    w = m.webhook.c
    query = sa.select(m.webhook).where(w.organisation == tenant).order_by(w.created_at.desc(), w.id).limit(limit)
    return [
        Delivery(**{name: row[name] for name in Delivery.__struct_fields__})
        for row in (await conn.execute(query)).mappings()
    ]


async def invoice_document(
    conn: AsyncConnection, tenant: str, invoice_id: uuid.UUID, kind: str
) -> tuple[Invoice, bytes] | None:
    """Return an invoice of this organisation and its document of a kind: pdf or csv."""
    found = await find_invoice(conn, tenant, invoice_id)
    if found is None:
        return None
    from billing.invoice_documents import invoice_csv, invoice_pdf  # noqa: PLC0415 - fonts and images, for this alone

    return found, invoice_pdf(found) if kind == "pdf" else invoice_csv(found).encode()
