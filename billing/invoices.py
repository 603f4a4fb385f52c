"""Invoices: a month is closed once, numbered without gaps when issued, then paid or written off. Credit notes correct.

Closing a month of one organisation, in one transaction:

1. SLO credits of the month are posted, usage and what else was posted becomes lines, tax is a line of its own.
2. Credit covers the total. What was credited beyond it becomes credit again.
3. The difference between the exact amounts and whole cents is posted to `rounding`, so the receivable of everything on
   the invoice is what the invoice asks for, to the nano-unit.

Usage belongs to the month of its `at`. A month closes `CUT_OFF` after its end; what comes later is a line of the next
invoice. Closing again returns the invoice that is there. Issuing takes the next number in the same transaction that
changes the state, so a number is never lost.
"""

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m
from billing.accounts import CASH, CREDIT_NOTES, REFUNDS_DUE, ROUNDING, TAX, WRITTEN_OFF, Posting, receivable
from billing.credits import NANO_PER_CENT, PAID, NewGrant, apply_credits, give_back, grant, lock_organisation
from billing.currencies import cents_step
from billing.invoice_book import NEXT, Invoice, InvoiceError, State, find_invoice, find_one, outstanding
from billing.invoice_lines import (
    CORRECTION,
    LATE,
    USAGE,
    Line,
    cents,
    late_lines,
    not_invoiced,
    posted_lines,
    usage_lines,
)
from billing.ledger import post_transaction
from billing.periods import Period
from billing.profiles import find_profile, find_seller, on_invoice
from billing.slo_credits import post_slo_credits
from contracts.rating import PPM

CUT_OFF: Final = timedelta(hours=2)  # the longest deadline of a request, and an hour
_MICRO: Final = timedelta(microseconds=1)


async def close_period(conn: AsyncConnection, tenant: str, period: Period, *, currency: str, now: datetime) -> Invoice:
    """Make the draft invoice of a month, or return the one that is there.

    Raises:
        InvoiceError: the month is not over, or an earlier one with usage is not closed.
    """
    await lock_organisation(conn, tenant)
    mine = (m.invoice.c.organisation == tenant) & (m.invoice.c.kind == "invoice")
    known = await find_one(conn, mine & (m.invoice.c.period_start == period.start))
    if known is not None:
        return known
    if now < period.end + CUT_OFF:
        raise InvoiceError(f"{period.name} closes at {(period.end + CUT_OFF).isoformat()}, not before")
    await _check_order(conn, tenant, period)
    profile = await find_profile(conn, tenant)
    at = period.end - _MICRO
    invoice_id = uuid.uuid4()
    step = cents_step(currency)

    await post_slo_credits(conn, tenant, period)
    posted = await not_invoiced(conn, tenant, period.end)
    lines = [
        *await usage_lines(conn, tenant, period, step=step),
        *await late_lines(conn, tenant, period, step=step),
        *await posted_lines(conn, tenant, posted, period, step=step),
    ]
    subtotal = sum(line.amount_cents for line in lines)
    tax = cents(subtotal * profile.tax_ppm * (NANO_PER_CENT // PPM), step=step) if subtotal > 0 else 0
    await _post(
        conn, invoice_id, Posting.TAX, tenant, at, {receivable(tenant): tax * NANO_PER_CENT, TAX: -tax * NANO_PER_CENT}
    )
    total = subtotal + tax
    covered = -sum(one.amount for one in posted if one.kind == Posting.CREDIT_APPLIED)
    if covered < total * NANO_PER_CENT:
        most = total * NANO_PER_CENT - covered
        covered += await apply_credits(conn, tenant, now=at, most=most, at=at)
    credited = cents(covered, step=step)
    if credited > total:  # nothing is due: what is too much is credit again
        over = (credited - total) * NANO_PER_CENT
        note = f"left of {period.name}"
        await give_back(conn, tenant, over, idempotency=f"over:{invoice_id}", note=note, at=at, posting=Posting.GRANT)
        credited = total
    on_this = await not_invoiced(conn, tenant, period.end)
    exact = sum(line.amount for line in lines if line.kind in (USAGE, LATE)) + sum(one.amount for one in on_this)
    due = total - credited
    residue = due * NANO_PER_CENT - exact
    await _post(conn, invoice_id, Posting.ROUNDING, tenant, at, {receivable(tenant): residue, ROUNDING: -residue})
    await conn.execute(
        m.invoice.insert().values(
            id=invoice_id,
            organisation=tenant,
            kind="invoice",
            state=State.DRAFT.value,
            period_start=period.start,
            period_end=period.end,
            currency=currency,
            seller=on_invoice(await find_seller(conn)),
            buyer={**on_invoice(profile), "tax_name": profile.tax_name, "tax_ppm": profile.tax_ppm},
            subtotal_cents=subtotal,
            tax_cents=tax,
            total_cents=total,
            credits_cents=credited,
            due_cents=due,
        )
    )
    await _write_lines(conn, invoice_id, lines)
    linked = {one.id for one in await not_invoiced(conn, tenant, period.end)}
    if linked:
        await conn.execute(
            m.invoice_transaction.insert().values(
                [{"transaction_id": one, "invoice_id": invoice_id} for one in sorted(linked)]
            )
        )
    made = await find_one(conn, m.invoice.c.id == invoice_id)
    assert made is not None
    return made


async def issue(conn: AsyncConnection, tenant: str, invoice_id: uuid.UUID, *, now: datetime) -> Invoice:
    """Give a draft its number; with nothing due it is paid at once. Issuing again returns it as it is."""
    found = await _locked(conn, tenant, invoice_id)
    if found.state is not State.DRAFT:
        return found
    profile = await find_profile(conn, tenant)
    number = await _next_number(conn, found.kind, now)
    changes = {"number": number, "issued_at": now, "due_at": now + timedelta(days=profile.terms_days)}
    await _move(conn, found, State.ISSUED, changes)
    issued = await _locked(conn, tenant, invoice_id)
    if issued.due_cents == 0:
        await _move(conn, issued, State.PAID, {"paid_at": now})
    return await _locked(conn, tenant, invoice_id)


async def write_off(conn: AsyncConnection, tenant: str, invoice_id: uuid.UUID, *, now: datetime) -> Invoice:
    """Void an issued invoice: what is still due is written off."""
    found = await _locked(conn, tenant, invoice_id)
    if found.state is State.VOID:
        return found
    left = await outstanding(conn, found)
    await _move(conn, found, State.VOID, {"voided_at": now})
    entries = {WRITTEN_OFF: left * NANO_PER_CENT, receivable(tenant): -left * NANO_PER_CENT}
    await _post(conn, invoice_id, Posting.WRITE_OFF, tenant, now, entries)
    return await _locked(conn, tenant, invoice_id)


async def credit_note(
    conn: AsyncConnection,
    tenant: str,
    invoice_id: uuid.UUID,
    *,
    amount_cents: int,
    reason: str,
    idempotency: str,
    now: datetime,
    refund_cents: int = 0,
) -> Invoice:
    """Give back part of an issued invoice, with its tax; return the note. What was paid already becomes credit.

    Args:
        conn: in a transaction.
        tenant: whose invoice.
        invoice_id: the invoice that is corrected.
        amount_cents: before tax.
        reason: printed on the note.
        idempotency: the same one again returns the note that is there.
        now: the note's date.
        refund_cents: of what was paid already, at most so much goes back to where it came from, instead. It is owed
            (`refunds_due`) until somebody says that it went.

    Raises:
        InvoiceError: a draft, more than the invoice was about, or a part of a coin.
    """
    found = await _locked(conn, tenant, invoice_id)
    note_id = uuid.uuid5(invoice_id, f"note:{idempotency}")
    known = await find_one(conn, m.invoice.c.id == note_id)
    if known is not None:
        return known
    if found.kind != "invoice" or found.state is State.DRAFT:
        raise InvoiceError(f"a credit note corrects an issued invoice; this is a {found.state} {found.kind}")
    subtotal_left, _ = await _not_given_back(conn, found)
    if not 0 < amount_cents <= subtotal_left:
        raise InvoiceError(f"at most {subtotal_left} cents can be given back; got {amount_cents}")
    step = cents_step(found.currency)
    if amount_cents % step:
        raise InvoiceError(f"{found.currency} has no cents: {amount_cents} of them cannot be given back")
    tax = cents(amount_cents * NANO_PER_CENT * found.tax_cents // found.subtotal_cents, step=step)
    return await _write_note(
        conn, found, note_id, amount_cents=amount_cents, tax=tax, reason=reason, now=now, refund_cents=refund_cents
    )


async def refund_note(
    conn: AsyncConnection,
    tenant: str,
    invoice_id: uuid.UUID,
    *,
    refunded_cents: int,
    reason: str,
    idempotency: str,
    now: datetime,
) -> Invoice:
    """Record what went back, tax included, to who paid an invoice, without a note of ours; return the note.

    Raises:
        InvoiceError: the invoice is not paid, or less is left of it than went back.
    """
    found = await _locked(conn, tenant, invoice_id)
    note_id = uuid.uuid5(invoice_id, f"note:{idempotency}")
    known = await find_one(conn, m.invoice.c.id == note_id)
    if known is not None:
        return known
    if found.kind != "invoice" or found.state is not State.PAID:
        raise InvoiceError(f"what was paid for a {found.state} {found.kind} cannot go back")
    subtotal_left, total_left = await _not_given_back(conn, found)
    if not 0 < refunded_cents <= total_left:
        raise InvoiceError(f"at most {total_left} cents can go back; {refunded_cents} did")
    share = refunded_cents * NANO_PER_CENT * found.tax_cents // found.total_cents
    tax = cents(share, step=cents_step(found.currency))
    amount_cents = min(refunded_cents - tax, subtotal_left)  # the last of several parts takes what rounding left
    tax = refunded_cents - amount_cents
    note = await _write_note(
        conn, found, note_id, amount_cents=amount_cents, tax=tax, reason=reason, now=now, refund_cents=refunded_cents
    )
    await refunded(conn, tenant, note_id, amount_cents=refunded_cents, now=now)
    return note


async def _not_given_back(conn: AsyncConnection, found: Invoice) -> tuple[int, int]:
    """Return what credit notes have left of an invoice: before tax, and with it; cents."""
    c = m.invoice.c
    query = sa.select(
        sa.func.coalesce(sa.func.sum(c.subtotal_cents), 0), sa.func.coalesce(sa.func.sum(c.total_cents), 0)
    ).where(c.corrects == found.id)
    subtotal, total = (await conn.execute(query)).one()
    return found.subtotal_cents - int(subtotal), found.total_cents - int(total)


async def _write_note(
    conn: AsyncConnection,
    found: Invoice,
    note_id: uuid.UUID,
    *,
    amount_cents: int,
    tax: int,
    reason: str,
    now: datetime,
    refund_cents: int,
) -> Invoice:
    """Write a credit note and post it. `tax` is in cents, too."""
    tenant, invoice_id = found.organisation, found.id
    total = amount_cents + tax
    left = 0 if found.state is State.VOID else await outstanding(conn, found)
    from_due = min(total, left)
    await conn.execute(
        m.invoice.insert().values(
            id=note_id,
            organisation=tenant,
            kind="credit_note",
            number=await _next_number(conn, "credit_note", now),
            state=State.PAID.value,
            period_start=found.period_start,
            period_end=found.period_end,
            corrects=invoice_id,
            currency=found.currency,
            seller=found.seller,
            buyer=found.buyer,
            subtotal_cents=amount_cents,
            tax_cents=tax,
            total_cents=total,
            credits_cents=total - from_due,
            due_cents=from_due,
            issued_at=now,
            paid_at=now,
        )
    )
    amount = amount_cents * NANO_PER_CENT
    line = Line(
        kind=CORRECTION,
        description=f"{reason} (corrects {found.number})",
        amount=amount,
        amount_cents=amount_cents,
        of_period=found.period_start,
    )
    await _write_lines(conn, note_id, [line])
    whole = {CREDIT_NOTES: amount, TAX: tax * NANO_PER_CENT, receivable(tenant): -total * NANO_PER_CENT}
    await _post(conn, note_id, Posting.CREDIT_NOTE, tenant, now, whole)
    refund = min(total - from_due, refund_cents)
    owed = {receivable(tenant): refund * NANO_PER_CENT, REFUNDS_DUE: -refund * NANO_PER_CENT}
    await _post(conn, note_id, Posting.REFUND_DUE, tenant, now, owed)
    if total > from_due + refund:
        back = (total - from_due - refund) * NANO_PER_CENT
        await give_back(
            conn, tenant, back, idempotency=f"note:{note_id}", note=reason, at=now, posting=Posting.OVERPAID
        )
    if left and left == from_due and found.state is State.ISSUED:
        await _move(conn, found, State.PAID, {"paid_at": now})
    note = await find_one(conn, m.invoice.c.id == note_id)
    assert note is not None
    return note


async def refunded(conn: AsyncConnection, tenant: str, note_id: uuid.UUID, *, amount_cents: int, now: datetime) -> None:
    """Post that a credit note's refund went back to where the money came from; again posts nothing."""
    amount = amount_cents * NANO_PER_CENT
    await _post(conn, note_id, Posting.REFUNDED, tenant, now, {REFUNDS_DUE: amount, CASH: -amount})


async def refund_failed(
    conn: AsyncConnection, tenant: str, note_id: uuid.UUID, *, amount_cents: int, note: str, now: datetime
) -> None:
    """Make credit of a refund that nobody takes; again posts nothing."""
    new = NewGrant(kind=PAID, amount=amount_cents * NANO_PER_CENT, idempotency=f"refund:{note_id}", note=note)
    await grant(conn, tenant, new, at=now, posting=Posting.REFUNDED, paid_from=REFUNDS_DUE)


async def pay(
    conn: AsyncConnection,
    tenant: str,
    invoice_id: uuid.UUID,
    *,
    provider: str,
    reference: str,
    amount_cents: int,
    recorded_by: str = "",
    now: datetime,
) -> Invoice:
    """Record a payment, once per provider and reference; what exceeds the due becomes credit.

    Raises:
        InvoiceError: not an issued invoice, or nothing was paid.
    """
    found = await _locked(conn, tenant, invoice_id)
    payment_id = uuid.uuid5(invoice_id, f"{provider}:{reference}")
    added = await conn.execute(
        insert(m.payment)
        .values(
            id=payment_id,
            invoice_id=invoice_id,
            provider=provider,
            reference=reference,
            amount_cents=amount_cents,
            at=now,
            recorded_by=recorded_by,
        )
        .on_conflict_do_nothing()
        .returning(m.payment.c.id)
    )
    if added.first() is None:
        return found
    if found.state not in (State.ISSUED, State.PAID) or found.kind != "invoice" or amount_cents <= 0:
        raise InvoiceError(f"{amount_cents} cents cannot be paid on a {found.state} {found.kind}")
    left = await outstanding(conn, found)  # with this payment
    amount = amount_cents * NANO_PER_CENT
    await post_transaction(
        conn,
        transaction_id=payment_id,
        kind=Posting.PAYMENT,
        organisation=tenant,
        at=now,
        entries={CASH: amount, receivable(tenant): -amount},
    )
    if left < 0:
        over = min(-left, amount_cents) * NANO_PER_CENT
        await give_back(
            conn, tenant, over, idempotency=f"paid:{payment_id}", note="overpaid", at=now, posting=Posting.OVERPAID
        )
    if left <= 0 and found.state is State.ISSUED:
        await _move(conn, found, State.PAID, {"paid_at": now})
    return await _locked(conn, tenant, invoice_id)


async def _check_order(conn: AsyncConnection, tenant: str, period: Period) -> None:
    """Raise InvoiceError when a later month is closed already: lines would go to the wrong invoice."""
    later = sa.select(m.invoice.c.period_start).where(
        m.invoice.c.organisation == tenant, m.invoice.c.kind == "invoice", m.invoice.c.period_start > period.start
    )
    if (await conn.execute(later)).first() is not None:
        raise InvoiceError(f"a month after {period.name} is closed: its late usage goes to the next invoice")


async def _next_number(conn: AsyncConnection, kind: str, now: datetime) -> str:
    """Return the next number of the kind and year; the row's lock makes the next caller wait for our commit."""
    series = f"{'INV' if kind == 'invoice' else 'CN'}-{now.year}"
    query = insert(m.invoice_number).values(series=series, last=1)
    last = await conn.execute(
        query.on_conflict_do_update(index_elements=["series"], set_={"last": m.invoice_number.c.last + 1}).returning(
            m.invoice_number.c.last
        )
    )
    return f"{series}-{last.scalar_one():06d}"


async def _post(
    conn: AsyncConnection,
    invoice_id: uuid.UUID,
    kind: Posting,
    tenant: str,
    at: datetime,
    entries: Mapping[str, int],
) -> None:
    transaction_id = uuid.uuid5(invoice_id, kind.value)
    await post_transaction(conn, transaction_id=transaction_id, kind=kind, organisation=tenant, at=at, entries=entries)


async def _move(conn: AsyncConnection, found: Invoice, to: State, changes: Mapping[str, Any]) -> None:
    if to not in NEXT[found.state]:
        raise InvoiceError(f"a {found.state} invoice cannot become {to}")
    await conn.execute(sa.update(m.invoice).where(m.invoice.c.id == found.id).values(state=to.value, **changes))


async def _write_lines(conn: AsyncConnection, invoice_id: uuid.UUID, lines: Sequence[Line]) -> None:
    rows = [
        {"invoice_id": invoice_id, "position": position, **msgspec.structs.asdict(line)}
        for position, line in enumerate(lines, 1)
    ]
    if rows:
        await conn.execute(m.invoice_line.insert(), rows)


async def _locked(conn: AsyncConnection, tenant: str, invoice_id: uuid.UUID) -> Invoice:
    await lock_organisation(conn, tenant)
    found = await find_invoice(conn, tenant, invoice_id)
    if found is None:
        raise InvoiceError(f"{tenant} has no invoice {invoice_id}")
    return found
