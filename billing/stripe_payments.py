"""Payments by Stripe: our issued invoice is mirrored as one of Stripe's with a single line, finalised and paid there.

1. Draft, line, finalise, pay: each call carries an idempotency key made from our invoice's number, so a call whose
   answer was lost is answered by what it did. Stripe keeps keys for a day; later the invoice is found by its id or,
   while nobody knows that, among the buyer's by our own id in its metadata.
2. Every step starts from the state that Stripe tells. An invoice can be paid there once, whatever we ask.
3. A declined card leaves the invoice open. Stripe tries again by the account's own rules, the buyer can pay at
   `hosted_invoice_url`, and a message says what became of it.

What goes wrong on the way, and 409, 429 and 5xx, is tried again with the same key. Messages are taken when their
signature is Stripe's and not older than five minutes. A refund's message names no invoice, so which one it is about is
asked. Stripe counts money in a currency's own smallest coin.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import stripe

from billing.currencies import cents_step
from billing.payments import (
    Asked,
    BadEvent,
    Collected,
    GivenBack,
    PaymentEvent,
    PaymentRefused,
    PaymentUnavailable,
    Pending,
    Said,
)

T = TypeVar("T")

TOLERANCE_S: Final = 300
API: Final = "https://api.stripe.com"
_HUNDREDTHS: Final = frozenset(("ISK", "UGX"))  # no cents, and yet counted in hundredths there
_THOUSANDTHS: Final = frozenset(("BHD", "JOD", "KWD", "OMR", "TND"))
_TIMEOUT_S: Final = 20.0
_LIBRARY_RETRIES: Final = 2  # of lost connections, 409 and 5xx
_BUSY_RETRIES: Final = 3  # of 429, which the library gives up on
_BUSY_PAUSE_S: Final = 1.0
_EVENTS: Final[Mapping[str, Said]] = {
    "invoice.paid": Said.PAID,
    "invoice.payment_failed": Said.DECLINED,
    "invoice.marked_uncollectible": Said.DECLINED,
    "invoice.voided": Said.VOID,
}
_REFUNDED: Final = "charge.refunded"


class _Object(msgspec.Struct, frozen=True, kw_only=True):
    """What we read of an invoice in a message; Stripe adds fields at will."""

    id: str
    currency: str
    amount_paid: int = 0
    metadata: dict[str, str] = {}
    hosted_invoice_url: str | None = None


class _Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What we read of a payment of which something went back. `amount_refunded`: all that did so far."""

    id: str
    currency: str
    amount_refunded: int = 0
    payment_intent: str | None = None


class _Data(msgspec.Struct, frozen=True):
    object: msgspec.Raw


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str
    created: int
    data: _Data


def minor_units(cents: int, currency: str) -> int:
    """Return cents as Stripe counts a currency. Raises ValueError for a part of a coin."""
    code = currency.upper()
    if code in _THOUSANDTHS:
        return cents * 10
    if cents % cents_step(code):
        raise ValueError(f"{code} has no cents: {cents} of them cannot be paid")
    return cents if code in _HUNDREDTHS else cents // cents_step(code)


def cents_of(minor: int, currency: str) -> int:
    """Return what Stripe counts in cents; of thousandths the part below a cent does not occur there."""
    code = currency.upper()
    if code in _THOUSANDTHS:
        return minor // 10
    return minor if code in _HUNDREDTHS else minor * cents_step(code)


def stripe_client(api_key: str, *, api_base: str = API, timeout_s: float = _TIMEOUT_S) -> stripe.StripeClient:
    """Return a client of Stripe's API, or of what speaks it at `api_base`."""
    logging.getLogger("stripe").setLevel(logging.WARNING)  # below that it logs whole answers, with the buyers' data
    return stripe.StripeClient(
        api_key,
        base_addresses={"api": api_base},
        http_client=stripe.HTTPXClient(timeout=timeout_s),
        max_network_retries=_LIBRARY_RETRIES,
    )


class Stripe:
    """The provider `stripe`."""

    name: Final = "stripe"

    def __init__(
        self,
        client: stripe.StripeClient,
        *,
        webhook_secrets: Sequence[str],
        busy_pause_s: float = _BUSY_PAUSE_S,
    ) -> None:
        """`webhook_secrets`: of the endpoint; several while one replaces another. `busy_pause_s`: after a 429."""
        self._api: Any = client.v1  # its types want a literal in every call
        self._secrets = webhook_secrets
        self._busy_pause_s = busy_pause_s

    async def customer(self, organisation: str, buyer: Mapping[str, Any]) -> str:
        """Return the id of a customer, made once per organisation and day; billing keeps it."""
        told = {"name": buyer.get("legal_name") or organisation, "metadata": {"pdgate_organisation": organisation}}
        if buyer.get("email"):
            told["email"] = buyer["email"]
        made = await self._do(lambda: self._api.customers.create_async(told, _once(f"customer-{organisation}")))
        return str(made.id)

    async def collect(self, asked: Asked) -> Collected | Pending:
        """Bring an invoice to where Stripe collects it, and collect it if the buyer has a card there."""
        found = await self._find(asked) or await self._create(asked)
        if found.status == "draft":
            if found.total == 0:
                await self._add_line(asked, found.id)
            finalise = {"auto_advance": True}  # from here on Stripe repeats what a bank refused
            key = _once(f"{asked.invoice.number}-finalise")
            found = await self._do(lambda: self._api.invoices.finalize_invoice_async(found.id, finalise, key))
        if found.status != "open":
            return _outcome(found)
        wanted = minor_units(asked.amount_cents, asked.invoice.currency)
        if (found.amount_due, found.currency.upper()) != (wanted, asked.invoice.currency.upper()):
            raise PaymentUnavailable(
                f"Stripe's {found.id} asks for {found.amount_due} {found.currency}, not {wanted}: not paid by it"
            )
        return await self._pay(asked, found)

    async def withdraw(self, asked: Asked) -> Collected | None:
        """Void an invoice, also one that was paid elsewhere: marked as paid, it would be told of like a payment."""
        found = await self._find(asked)
        if found is None:
            return None
        match found.status:
            case "paid":
                done = _outcome(found)
                return done if isinstance(done, Collected) and done.amount_cents else None
            case "draft":
                await self._do(lambda: self._api.invoices.delete_async(found.id))
            case "open" | "uncollectible":
                key = _once(f"{asked.invoice.number}-void")
                await self._do(lambda: self._api.invoices.void_invoice_async(found.id, {}, key))
            case _:
                pass  # void already
        return None

    async def give_back(self, given: GivenBack) -> None:
        """Lower an open invoice by what a credit note takes off it, or refund what was paid."""
        note = given.note
        found = await self._do(lambda: self._api.invoices.retrieve_async(given.reference))
        if found.status == "paid":
            amount = minor_units(given.refund_cents, note.currency)
            refund = {"refund_amount": amount}
        elif found.status == "open":
            amount = minor_units(note.due_cents, note.currency)
            refund = {}
        else:
            return
        if not amount:
            return
        told = {
            "invoice": given.reference,
            "amount": amount,
            "memo": note.lines[0].description if note.lines else "",
            "metadata": {"pdgate_credit_note": str(note.id), "pdgate_number": note.number or ""},
            **refund,
        }
        await self._do(lambda: self._api.credit_notes.create_async(told, _once(f"{note.number}-note")))

    async def event(self, body: bytes, signature: str) -> PaymentEvent | None:
        """Return what a signed message says of one of our invoices.

        Raises:
            BadEvent: it is not Stripe's, or cannot be read.
            PaymentUnavailable, PaymentRefused: which invoice a refund is about was asked, and Stripe did not say.
        """
        self._verify(body, signature)
        try:
            event = msgspec.json.decode(body, type=_Event)
            if event.type == _REFUNDED:
                return await self._refunded(event, msgspec.json.decode(event.data.object, type=_Charge))
            said = _EVENTS.get(event.type)
            if said is None:
                return None
            about = msgspec.json.decode(event.data.object, type=_Object)
        except msgspec.DecodeError as error:
            raise BadEvent(f"the message cannot be read: {error}") from None
        organisation, invoice_id = (about.metadata.get(name, "") for name in ("pdgate_organisation", "pdgate_invoice"))
        if not organisation or not invoice_id:
            return None  # an invoice that somebody made there by hand
        return PaymentEvent(
            said=said,
            organisation=organisation,
            invoice_id=invoice_id,
            reference=about.id,
            amount_cents=cents_of(about.amount_paid, about.currency),
            currency=about.currency.upper(),
            at=datetime.fromtimestamp(event.created, UTC),
            reason="" if said is not Said.DECLINED else event.type.removeprefix("invoice.").replace("_", " "),
            url=about.hosted_invoice_url or "",
        )

    async def _refunded(self, event: _Event, charge: _Charge) -> PaymentEvent | None:
        """Return what a refund is about: a charge names its payment, and Stripe's books which invoice that paid."""
        if not charge.payment_intent:
            return None
        by_payment = {"payment": {"type": "payment_intent", "payment_intent": charge.payment_intent}, "limit": 1}
        page = await self._do(lambda: self._api.invoice_payments.list_async(by_payment))
        if not page.data:
            return None  # a payment that no invoice asked for
        reference = str(page.data[0].invoice)
        found = await self._do(lambda: self._api.invoices.retrieve_async(reference))
        told = found.to_dict().get("metadata") or {}
        if not told.get("pdgate_organisation") or not told.get("pdgate_invoice"):
            return None
        return PaymentEvent(
            said=Said.REFUNDED,
            organisation=told["pdgate_organisation"],
            invoice_id=told["pdgate_invoice"],
            reference=reference,
            amount_cents=cents_of(charge.amount_refunded, charge.currency),
            currency=charge.currency.upper(),
            at=datetime.fromtimestamp(event.created, UTC),
        )

    def _verify(self, body: bytes, signature: str) -> None:
        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise BadEvent("the message is no text") from None
        wrong = "no webhook secret is set"
        for secret in self._secrets:
            try:
                stripe.WebhookSignature.verify_header(text, signature, secret, TOLERANCE_S)
            except stripe.SignatureVerificationError as error:
                wrong = str(error.args[0] if error.args else "wrong signature")
            except ValueError:
                wrong = "the signature's header cannot be read"
            else:
                return
        raise BadEvent(f"the message is not taken for Stripe's: {wrong}")

    async def _find(self, asked: Asked) -> Any | None:
        """Return Stripe's invoice of ours, if there is one."""
        if asked.reference:
            return await self._do(lambda: self._api.invoices.retrieve_async(asked.reference))
        if not asked.repeated or not asked.customer:
            return None
        of_buyer = {"customer": asked.customer, "limit": 100}
        page = await self._do(lambda: self._api.invoices.list_async(of_buyer))
        while True:
            for one in page.data:
                if one.to_dict().get("metadata", {}).get("pdgate_invoice") == str(asked.invoice.id):
                    return one
            if not page.has_more:
                return None
            onwards = {**of_buyer, "starting_after": page.data[-1].id}
            page = await self._do(partial(self._api.invoices.list_async, onwards))

    async def _create(self, asked: Asked) -> Any:
        ours = asked.invoice
        draft = {
            "customer": asked.customer,
            "currency": ours.currency.lower(),
            "collection_method": "charge_automatically",
            "auto_advance": False,  # nothing happens to it before it is whole
            "pending_invoice_items_behavior": "exclude",
            "description": f"Invoice {ours.number}, {ours.period_start:%Y-%m}",
            "metadata": {
                "pdgate_invoice": str(ours.id),
                "pdgate_organisation": ours.organisation,
                "pdgate_number": ours.number or "",
            },
        }
        return await self._do(lambda: self._api.invoices.create_async(draft, _once(f"{ours.number}-draft")))

    async def _add_line(self, asked: Asked, reference: str) -> None:
        ours = asked.invoice
        line = {
            "customer": asked.customer,
            "invoice": reference,
            "amount": minor_units(asked.amount_cents, ours.currency),
            "currency": ours.currency.lower(),
            "description": f"Usage of {ours.period_start:%Y-%m} (invoice {ours.number})",
        }
        await self._do(lambda: self._api.invoice_items.create_async(line, _once(f"{ours.number}-line")))

    async def _pay(self, asked: Asked, found: Any) -> Collected | Pending:
        key = _once(f"{asked.invoice.number}-pay-{asked.declines}")
        try:
            return _outcome(await self._do(lambda: self._api.invoices.pay_async(found.id, {}, key)))
        except stripe.CardError as error:
            why = error.code or "declined"
        except PaymentRefused as refused:  # no card there, or paid a moment ago
            found = await self._do(lambda: self._api.invoices.retrieve_async(found.id))
            if found.status != "open":
                return _outcome(found)
            why = str(refused)
        return Pending(reference=found.id, url=found.hosted_invoice_url or "", declined=why)

    async def _do(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call Stripe; a 429 is repeated with the same key. Raises PaymentUnavailable, PaymentRefused, CardError."""
        for left in reversed(range(_BUSY_RETRIES + 1)):
            try:
                return await call()
            except stripe.CardError:
                raise
            except stripe.RateLimitError:
                if not left:
                    raise PaymentUnavailable("Stripe has too much to do (429)") from None
                await asyncio.sleep(self._busy_pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - not for secrets
            except (stripe.AuthenticationError, stripe.PermissionError) as error:  # its text may show the key
                raise PaymentUnavailable(f"Stripe does not take our key ({error.http_status})") from None
            except (stripe.InvalidRequestError, stripe.IdempotencyError) as error:
                raise PaymentRefused(f"Stripe refused it: {error.code or error.user_message or type(error).__name__}"
                                     ) from None  # fmt: skip
            except stripe.StripeError as error:
                raise PaymentUnavailable(f"{type(error).__name__} ({error.http_status or 'no answer'})") from None
        raise AssertionError  # the last round returns or raises


def _once(key: str) -> Any:
    return {"idempotency_key": f"pdgate-{key}"}


def _outcome(found: Any) -> Collected | Pending:
    """Return what an invoice's state says."""
    if found.status == "paid" and found.amount_paid:
        return Collected(reference=found.id, amount_cents=cents_of(found.amount_paid, found.currency))
    return Pending(reference=found.id, url=found.hosted_invoice_url or "")
