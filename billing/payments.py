"""Getting paid: what a payment provider must be able to do.

Without one the buyer transfers, and a person records it with `pdgate invoices pay`, under the name `MANUAL`. Amounts
are cents of the installation's currency. What a provider is asked may be asked again, by anybody and at the same time:
it does each thing once, whatever became of the answer to the first time.
"""

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from billing.invoice_book import Invoice

MANUAL: Final = "manual"


class PaymentUnavailable(Exception):
    """The provider does not answer, or not now. Ask again."""


class PaymentRefused(Exception):
    """The provider will never do this; the message says why and holds no secret."""


class BadEvent(ValueError):
    """What came is not signed by the provider, is too old, or cannot be read."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """An invoice and what is due of it. `reference`: the provider's id of it, empty while nobody knows it.

    `repeated`: it may be there already. `declines`: how often the buyer's bank refused it.
    """

    invoice: Invoice
    amount_cents: int
    customer: str
    reference: str = ""
    repeated: bool = False
    declines: int = 0


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """Money that a provider has. `reference` is unique at the provider: recording it again changes nothing."""

    reference: str
    amount_cents: int


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """The provider has the invoice and says later what became of it. `declined`: why a first try failed."""

    reference: str
    url: str = ""  # where the buyer can pay
    declined: str = ""


class GivenBack(msgspec.Struct, frozen=True, kw_only=True):
    """A credit note about an invoice that a provider has: less is due there, and so much of what was paid goes back."""

    note: Invoice
    reference: str  # of the invoice
    refund_cents: int


class Said(enum.StrEnum):
    """What an event is about."""

    PAID = "paid"
    DECLINED = "declined"  # the provider may try again by itself
    VOID = "void"
    REFUNDED = "refunded"  # begun here or there


class PaymentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider tells of one of our invoices, by itself. `at`: its own time, whole seconds.

    `amount_cents`: what was paid, or, of refunds, everything that went back so far.
    """

    said: Said
    organisation: str
    invoice_id: str
    reference: str
    amount_cents: int
    currency: str
    at: datetime
    reason: str = ""
    url: str = ""


class PaymentProvider(Protocol):
    """Collects what invoices ask for. Errors: PaymentUnavailable, PaymentRefused."""

    @property
    def name(self) -> str:
        """Return what payments are recorded under."""
        ...

    async def customer(self, organisation: str, buyer: Mapping[str, Any]) -> str:
        """Return the provider's id of a buyer, made if need be."""
        ...

    async def collect(self, asked: Asked) -> Collected | Pending:
        """Collect what is due."""
        ...

    async def withdraw(self, asked: Asked) -> Collected | None:
        """Stop collecting an invoice that was paid elsewhere, or is void; return what was collected all the same."""
        ...

    async def give_back(self, given: GivenBack) -> None:
        """Ask for less, or refund."""
        ...

    async def event(self, body: bytes, signature: str) -> PaymentEvent | None:
        """Return what a signed message says of an invoice of ours; None = nothing. Raises BadEvent, too."""
        ...
