"""Getting paid: what a payment provider must be able to do, and the one that waits for a bank."""

from typing import Final, Protocol

import msgspec

from billing.invoice_book import Invoice


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """Money that a provider has. `reference` is unique at the provider: recording it again changes nothing."""

    reference: str
    amount_cents: int


class PaymentProvider(Protocol):
    """Collects what an invoice asks for. Calls are idempotent per invoice."""

    @property
    def name(self) -> str:
        """Return what payments are recorded under."""
        ...

    async def collect(self, invoice: Invoice, amount_cents: int) -> Collected | None:
        """Collect an amount; None = it comes later, and is recorded when it does."""
        ...


class Manual:
    """The buyer transfers; a person records it with `pdgate invoices pay`."""

    name: Final = "manual"

    async def collect(self, invoice: Invoice, amount_cents: int) -> Collected | None:  # noqa: ARG002 - the protocol's
        """Wait for the bank."""
        return None
