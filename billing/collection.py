"""Brings the books and a payment provider in line: asks for what is due, records what came, tells of corrections.

1. A row of `collection` says that the provider is asked, before it is. So what it does is never forgotten, and whoever
   finds the row later asks again; providers do each thing once (billing.payments).
2. The provider is called outside of any transaction. What it answers is recorded in one, as a payment under the
   provider's own id: by this answer, by its message, or by both, in any order, it is recorded once.
3. What it says is compared with what was asked, amount and currency. If they differ nothing is recorded, the row says
   `mismatch`, and a person looks.
4. Money that arrives for an invoice that was written off meanwhile is not lost: it becomes credit.
5. What the provider gave back without being asked from here becomes a credit note. Its messages say how much went back
   in all, so what is known of that already is taken off.

A message can only move a row forward: what is paid stays paid, and an older refusal changes nothing.
"""

import asyncio
import random
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import collection_book as book
from billing import invoices
from billing.collection_book import UNSETTLED, Collection, Stage
from billing.credits import NANO_PER_CENT, PAID, NewGrant, grant, lock_organisation
from billing.invoice_book import Invoice, State, find_invoice, outstanding
from billing.moments import moment
from billing.payments import (
    Asked,
    BadEvent,
    Collected,
    GivenBack,
    PaymentEvent,
    PaymentProvider,
    PaymentRefused,
    PaymentUnavailable,
    Pending,
    Said,
)
from billing.refunds import record_refund

log: Final = structlog.get_logger()

_BATCH: Final = 500  # a round
_FIRST_PAUSE_S: Final = 30.0
_LONGEST_PAUSE_S: Final = 6 * 3600.0
_ANSWER_S: Final = 120.0  # a provider's own retries are over by then
_HEARD_S: Final = 5.0  # who tells waits for us


class Collector:
    """Asks one provider. Any number of processes may do so at once."""

    def __init__(self, engine: AsyncEngine, provider: PaymentProvider, *, now_ms: Callable[[], int]) -> None:
        self._engine = engine
        self._provider = provider
        self._now_ms = now_ms

    @property
    def provider(self) -> str:
        """Return the provider's name."""
        return self._provider.name

    async def settle(self, tenant: str, invoice_id: uuid.UUID) -> None:
        """Do whatever an invoice or a credit note needs done at the provider; what fails is done later by the job."""
        found, row, left = await self._look(tenant, invoice_id)
        if found is None:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                if found.kind == "credit_note":
                    if row is not None and row.state is Stage.ASKED:
                        await self._give_back(found, row)
                elif found.state is State.ISSUED and left > 0:
                    await self._collect(found, row, left)
                elif found.state in (State.PAID, State.VOID) and row is not None and row.state in UNSETTLED:
                    await self._withdraw(found, row)
        except (PaymentUnavailable, TimeoutError) as error:
            await self._wait(found, str(error) or "the provider does not answer")
        except PaymentRefused as error:
            await self._refused(found, str(error))

    async def settle_due(self) -> int:
        """Do what is due, a batch of it; return how many that was."""
        async with self._engine.connect() as conn:
            due = await book.due_across_tenants(conn, now=self._now(), limit=_BATCH)
        for one in due:
            await self.settle(one.organisation, one.invoice_id)
        return len(due)

    async def note_made(self, conn: AsyncConnection, note: Invoice, refund_cents: int) -> None:
        """Remember, in the note's own transaction, that the provider is to be told of it; not if it has no invoice."""
        assert note.corrects is not None
        if await book.find_collection(conn, note.corrects) is None:
            return
        if await book.find_collection(conn, note.id) is None:
            await book.write(
                conn,
                note.id,
                provider=self.provider,
                state=Stage.ASKED,
                amount_cents=refund_cents,
                next_at=self._now(),
                asked_at=self._now(),
            )

    async def refundable(self, conn: AsyncConnection, invoice_id: uuid.UUID) -> int:
        """Return how much of what this provider collected for an invoice can go back, cents."""
        paid, back = await book.refunds_of(conn, invoice_id, self.provider)
        return max(0, paid - back)

    async def told(self, body: bytes, signature: str) -> bool:
        """Record what a message says; False = it is about nothing of ours.

        Raises:
            BadEvent: it is not the provider's.
            PaymentUnavailable: it is to be told again later.
        """
        try:
            async with asyncio.timeout(_HEARD_S):
                event = await self._provider.event(body, signature)
        except TimeoutError:
            raise PaymentUnavailable("the provider does not answer what its message is about") from None
        except PaymentRefused as error:
            raise BadEvent(str(error)) from None
        if event is None:
            return False
        async with self._engine.begin() as conn:
            return await self._heard(conn, event)

    async def _look(self, tenant: str, invoice_id: uuid.UUID) -> tuple[Invoice | None, Collection | None, int]:
        async with self._engine.begin() as conn:
            found = await find_invoice(conn, tenant, invoice_id)
            if found is None:
                return None, None, 0
            return found, await book.find_collection(conn, invoice_id), await outstanding(conn, found)

    async def _collect(self, found: Invoice, row: Collection | None, left: int) -> None:
        if row is not None and row.state not in (Stage.ASKED, Stage.DECLINED):
            return  # the provider has it and will say
        customer = await self._customer(found)
        tries = row.tries if row else 0
        async with self._engine.begin() as conn:
            await lock_organisation(conn, found.organisation)
            await book.write(
                conn,
                found.id,
                provider=self.provider,
                state=Stage.ASKED,
                amount_cents=left,
                tries=tries,
                next_at=self._now() + _pause(tries + 1),
                asked_at=self._now(),
            )
        answer = await self._provider.collect(self._asked(found, row, left, customer))
        async with self._engine.begin() as conn:
            await lock_organisation(conn, found.organisation)
            known = await book.find_collection(conn, found.id)
            assert known is not None
            match answer:
                case Collected() if known.state is not Stage.PAID and answer.amount_cents != left:
                    await self._mismatch(conn, found, answer.reference, answer.amount_cents, found.currency, left)
                case Collected():
                    await self._paid(conn, found.organisation, known, answer)
                case Pending() if known.state in UNSETTLED:
                    await book.change(
                        conn,
                        found.id,
                        state=Stage.DECLINED if answer.declined else Stage.OPEN,
                        reference=answer.reference,
                        url=answer.url,
                        reason=answer.declined,
                        declines=known.declines + bool(answer.declined),
                    )
                case _:
                    pass  # its message was faster

    async def _customer(self, found: Invoice) -> str:
        async with self._engine.connect() as conn:
            known = await book.customer_of(conn, found.organisation, self.provider)
        if known:
            return known
        made = await self._provider.customer(found.organisation, found.buyer)
        async with self._engine.begin() as conn:
            await book.set_customer(conn, found.organisation, self.provider, made)
        return made

    async def _withdraw(self, found: Invoice, row: Collection) -> None:
        async with self._engine.connect() as conn:
            customer = await book.customer_of(conn, found.organisation, self.provider)
        asked = self._asked(found, row, row.amount_cents, customer)
        collected = await self._provider.withdraw(asked)
        async with self._engine.begin() as conn:
            await lock_organisation(conn, found.organisation)
            if collected is not None:
                await self._paid(conn, found.organisation, row, collected)
            else:
                await book.change(conn, found.id, state=Stage.WITHDRAWN, reason="")

    async def _give_back(self, note: Invoice, row: Collection) -> None:
        assert note.corrects is not None
        async with self._engine.begin() as conn:
            about = await book.find_collection(conn, note.corrects)
        if about is None or (about.state is Stage.ASKED and not about.reference):
            raise PaymentUnavailable("whether the provider has the invoice is not known yet")
        if about.reference:
            given = GivenBack(note=note, reference=about.reference, refund_cents=row.amount_cents)
            await self._provider.give_back(given)
        async with self._engine.begin() as conn:
            await lock_organisation(conn, note.organisation)
            if row.amount_cents:
                await invoices.refunded(
                    conn, note.organisation, note.id, amount_cents=row.amount_cents, now=self._now()
                )
            about = await book.find_collection(conn, note.corrects)
            assert about is not None
            if about.state in UNSETTLED:
                await book.change(conn, note.corrects, amount_cents=about.amount_cents - note.due_cents)
            await book.change(conn, note.id, state=Stage.PAID, reason="")

    async def _heard(self, conn: AsyncConnection, event: PaymentEvent) -> bool:
        await lock_organisation(conn, event.organisation)
        try:
            found = await find_invoice(conn, event.organisation, uuid.UUID(event.invoice_id))
        except ValueError:
            found = None
        if found is None or found.state is State.DRAFT or found.kind != "invoice":
            log.warning("payment_event_of_nothing", provider=self.provider, reference=event.reference)
            return False
        row = await book.find_collection(conn, found.id)
        left = await outstanding(conn, found)
        if row is None:
            row = await self._found_at_the_provider(conn, found, event, left)
        await self._record(conn, found, row, left, event)
        return True

    async def _record(
        self, conn: AsyncConnection, found: Invoice, row: Collection, left: int, event: PaymentEvent
    ) -> None:
        match event.said:
            case Said.PAID:
                if row.state is Stage.PAID:
                    return
                right = event.currency.upper() == found.currency.upper() and event.amount_cents in (
                    row.amount_cents,
                    left,
                )
                if not right:
                    await self._mismatch(
                        conn, found, event.reference, event.amount_cents, event.currency, row.amount_cents
                    )
                    return
                collected = Collected(reference=event.reference, amount_cents=event.amount_cents)
                await self._paid(conn, event.organisation, row, collected)
            case Said.DECLINED if row.state in UNSETTLED and (row.said_at is None or event.at >= row.said_at):
                log.info("payment_declined", provider=self.provider, invoice=found.number, reason=event.reason)
                await book.change(
                    conn,
                    found.id,
                    state=Stage.DECLINED,
                    reference=event.reference,
                    url=event.url or row.url,
                    reason=event.reason,
                    said_at=event.at,
                )
            case Said.REFUNDED:
                await record_refund(conn, found, row, event, now=self._now())
            case Said.VOID if row.state in UNSETTLED:
                await book.change(conn, found.id, state=Stage.WITHDRAWN, reference=event.reference, said_at=event.at)
                if found.state is State.ISSUED:
                    await invoices.write_off(conn, event.organisation, found.id, now=self._now())
            case _:
                pass  # older than what is known

    async def _found_at_the_provider(
        self, conn: AsyncConnection, found: Invoice, event: PaymentEvent, left: int
    ) -> Collection:
        """Make the row of an invoice that the provider has and we do not know of: its message was faster."""
        await book.write(
            conn,
            found.id,
            provider=self.provider,
            state=Stage.OPEN,
            amount_cents=left,
            reference=event.reference,
            next_at=self._now(),
            asked_at=self._now(),
        )
        row = await book.find_collection(conn, found.id)
        assert row is not None
        return row

    async def _paid(self, conn: AsyncConnection, tenant: str, row: Collection, collected: Collected) -> None:
        found = await find_invoice(conn, tenant, row.invoice_id)
        assert found is not None
        if found.state is State.VOID:
            new = NewGrant(
                kind=PAID,
                amount=collected.amount_cents * NANO_PER_CENT,
                idempotency=f"{self.provider}:{collected.reference}",
                note=f"paid after {found.number} was void",
            )
            await grant(conn, tenant, new, at=self._now())
        else:
            await invoices.pay(
                conn,
                tenant,
                found.id,
                provider=self.provider,
                reference=collected.reference,
                amount_cents=collected.amount_cents,
                recorded_by=self.provider,
                now=self._now(),
            )
        log.info("payment_collected", provider=self.provider, invoice=found.number, cents=collected.amount_cents)
        await book.change(conn, found.id, state=Stage.PAID, reference=collected.reference, reason="")

    async def _mismatch(
        self, conn: AsyncConnection, found: Invoice, reference: str, cents: int, currency: str, asked_cents: int
    ) -> None:
        said, asked = f"{cents} cents {currency.upper()}", f"{asked_cents} cents {found.currency}"
        log.error(
            "payment_mismatch", provider=self.provider, invoice=found.number, reference=reference, said=said,
            asked=asked,
        )  # fmt: skip
        reason = f"the provider says {said} of {asked}"
        await book.change(conn, found.id, state=Stage.MISMATCH, reference=reference, reason=reason)

    async def _wait(self, found: Invoice, why: str) -> None:
        log.warning("payment_waits", provider=self.provider, invoice=found.number, why=why)
        async with self._engine.begin() as conn:
            await lock_organisation(conn, found.organisation)
            row = await book.find_collection(conn, found.id)
            if row is None:  # not even the buyer could be made
                await self._write_asked(conn, found, Stage.ASKED, why)
            elif row.state in UNSETTLED:
                changes = {"reason": why} if row.state is Stage.ASKED else {}
                tries = row.tries + 1
                await book.change(conn, found.id, tries=tries, next_at=self._now() + _pause(tries), **changes)

    async def _refused(self, found: Invoice, why: str) -> None:
        log.error("payment_refused", provider=self.provider, invoice=found.number, why=why)
        async with self._engine.begin() as conn:
            await lock_organisation(conn, found.organisation)
            row = await book.find_collection(conn, found.id)
            if row is None:
                await self._write_asked(conn, found, Stage.DECLINED, why)
                return
            if row.state not in UNSETTLED:
                return
            if found.kind == "credit_note" and row.amount_cents:
                await invoices.refund_failed(
                    conn, found.organisation, found.id, amount_cents=row.amount_cents,
                    note=f"refund of {found.number} was refused", now=self._now(),
                )  # fmt: skip
            state = Stage.WITHDRAWN if found.state is State.VOID else Stage.DECLINED
            await book.change(conn, found.id, state=state, reason=why, next_at=self._now() + _pause(row.tries))

    async def _write_asked(self, conn: AsyncConnection, found: Invoice, state: Stage, why: str) -> None:
        await book.write(
            conn,
            found.id,
            provider=self.provider,
            state=state,
            amount_cents=found.due_cents,
            tries=1,
            next_at=self._now() + _pause(1),
            asked_at=self._now(),
            reason=why,
        )

    def _asked(self, found: Invoice, row: Collection | None, left: int, customer: str) -> Asked:
        return Asked(
            invoice=found,
            amount_cents=left,
            customer=customer,
            reference=row.reference if row else "",
            repeated=row is not None,
            declines=row.declines if row else 0,
        )

    def _now(self) -> datetime:
        return moment(self._now_ms())


def _pause(tries: int) -> timedelta:
    """Return how long to wait after so many tries: doubling from half a minute, with jitter, to six hours."""
    longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries - 1, 12))
    return timedelta(seconds=longest * random.uniform(0.75, 1.0))  # noqa: S311 - not for secrets
