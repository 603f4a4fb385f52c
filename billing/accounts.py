"""The chart of accounts, and the kinds of postings. Debit > 0, credit < 0; a balance is the sum of its entries.

| Account | Kind | Balance |
|---|---|---|
| `receivable:ORG` | receivable | what the organisation owes; negative: it has too much credited |
| `revenue:METER`, `revenue:minimum_charge` | revenue | negative: earned |
| `credit:GRANT` | deferred (paid) or promotional | negative: what is left of the grant |
| `cash` | cash | received |
| `promotion_open` | promotion | promotional credit given and not used |
| `promotion_used` | promotion | promotional credit used: an expense |
| `breakage` | revenue | negative: paid credit that expired unused |
| `adjustment:METER` | adjustment | re-ratings and corrections of revenue |
| `slo_credits` | slo_credit | given back for missed targets |
| `tax` | tax | negative: owed to the tax office |
| `rounding` | rounding | what invoices in whole cents gain or lose |
| `credit_notes` | adjustment | what credit notes gave back, before tax |
| `refunds_due` | refund | negative: what is on its way back to buyers |
| `written_off` | write_off | what void invoices were about |
"""

import enum
from typing import Final

import msgspec

from contracts.rating import MINIMUM_CHARGE, Meter

METERS: Final = (*(meter.value for meter in Meter), MINIMUM_CHARGE)

CASH: Final = "cash"
PROMOTION_OPEN: Final = "promotion_open"
PROMOTION_USED: Final = "promotion_used"
BREAKAGE: Final = "breakage"
SLO_CREDITS: Final = "slo_credits"
TAX: Final = "tax"
ROUNDING: Final = "rounding"
WRITTEN_OFF: Final = "written_off"
CREDIT_NOTES: Final = "credit_notes"
REFUNDS_DUE: Final = "refunds_due"

_SINGLE: Final = {
    CASH: "cash",
    PROMOTION_OPEN: "promotion",
    PROMOTION_USED: "promotion",
    BREAKAGE: "breakage",
    SLO_CREDITS: "slo_credit",
    TAX: "tax",
    ROUNDING: "rounding",
    WRITTEN_OFF: "write_off",
    CREDIT_NOTES: "adjustment",
    REFUNDS_DUE: "refund",
}


class Posting(enum.StrEnum):
    """Why a transaction is in the ledger."""

    USAGE = "usage"
    ADJUSTMENT = "adjustment"  # a re-rating
    SLO_CREDIT = "slo_credit"
    GRANT = "grant"
    CREDIT_APPLIED = "credit_applied"
    CREDIT_EXPIRED = "credit_expired"
    TAX = "tax"
    ROUNDING = "rounding"
    PAYMENT = "payment"
    OVERPAID = "overpaid"  # what was paid beyond an invoice, or given back of a paid one, is credit
    CREDIT_NOTE = "credit_note"
    WRITE_OFF = "write_off"
    REFUND_DUE = "refund_due"  # of what was paid, instead of credit
    REFUNDED = "refunded"


SETTLING: Final = (
    Posting.PAYMENT,
    Posting.OVERPAID,
    Posting.CREDIT_NOTE,
    Posting.WRITE_OFF,
    Posting.REFUND_DUE,
)
"""Postings about invoices that are there: they are on no later one."""


class Account(msgspec.Struct, frozen=True):
    """One account as the table has it."""

    code: str
    kind: str
    organisation: str | None = None
    meter: str | None = None


def receivable(organisation: str) -> str:
    """Return the account of what an organisation owes."""
    return f"receivable:{organisation}"


def revenue(meter: str) -> str:
    """Return the account of what a meter earned."""
    return f"revenue:{meter}"


def adjustment(meter: str) -> str:
    """Return the account of what re-ratings changed about a meter's revenue."""
    return f"adjustment:{meter}"


def credit(grant_id: object) -> str:
    """Return the account of what is left of a grant."""
    return f"credit:{grant_id}"


def account(code: str, *, organisation: str | None = None, paid: bool = True) -> Account:
    """Return the account behind a code. `paid`: of a credit account, whether it was paid for."""
    family, _, name = code.partition(":")
    match family:
        case "receivable":
            return Account(code, family, name)
        case "revenue" | "adjustment":
            return Account(code, family, None, name)
        case "credit":
            return Account(code, "deferred" if paid else "promotional", organisation)
        case _:
            return Account(code, _SINGLE[family])
