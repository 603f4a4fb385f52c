"""What a payment provider gave back without being asked from here becomes a credit note.

Its messages say how much went back in all, so what is known of that already is taken off: refunds that begin here are
counted before the provider is asked, and earlier messages by the notes that they made.
"""

from datetime import datetime
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import collection_book as book
from billing.collection_book import UNSETTLED, Collection, Stage
from billing.invoice_book import Invoice, InvoiceError
from billing.invoices import refund_note
from billing.payments import PaymentEvent, PaymentUnavailable

log: Final = structlog.get_logger()


async def record_refund(
    conn: AsyncConnection, found: Invoice, row: Collection, event: PaymentEvent, *, now: datetime
) -> None:
    """Record what went back of an invoice and is not known to go back already; the caller holds the organisation.

    What cannot be a note is said on the invoice's row (`mismatch`), for a person.

    Raises:
        PaymentUnavailable: that the invoice was paid is not heard yet.
    """
    if row.state in UNSETTLED:
        raise PaymentUnavailable(f"{found.number} is not known to be paid")
    _, known_cents = await book.refunds_of(conn, found.id, row.provider)
    more_cents = event.amount_cents - known_cents
    if more_cents <= 0:
        return
    if event.currency != found.currency.upper():
        await _unexplained(conn, found, row, f"{more_cents} cents {event.currency} of {found.currency} went back")
        return
    try:
        note = await refund_note(
            conn,
            found.organisation,
            found.id,
            refunded_cents=more_cents,
            reason=f"Refunded by {row.provider}",
            idempotency=f"{row.provider}:{event.reference}:{event.amount_cents}",
            now=now,
        )
    except InvoiceError as error:
        await _unexplained(conn, found, row, str(error))
        return
    log.info("refund_heard", provider=row.provider, invoice=found.number, cents=more_cents)
    await book.write(
        conn, note.id, provider=row.provider, state=Stage.PAID, amount_cents=more_cents, next_at=now, asked_at=now
    )


async def _unexplained(conn: AsyncConnection, found: Invoice, row: Collection, why: str) -> None:
    log.error("refund_unexplained", provider=row.provider, invoice=found.number, why=why)
    await book.change(conn, found.id, state=Stage.MISMATCH, reason=f"refunded by {row.provider}: {why}")
