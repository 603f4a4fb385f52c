"""`pdgate invoices`: close months, issue, pay, correct, and print as PDF or CSV."""

import asyncio
import datetime as dt
import uuid
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from billing.collection_book import Collection, find_collection
from billing.invoice_book import Invoice, find_invoice, list_invoices
from billing.invoice_documents import invoice_csv, invoice_pdf
from contracts.v1 import billing_pb2 as pb
from pdgate.billing_admin import call, cents_of, ppm_of, who
from pdgate.connection import open_database
from pdgate.output import AsJson, show, show_json
from pdgate.preflight import CannotStart

invoices_app = typer.Typer(help="Invoices: monthly, numbered without gaps.", no_args_is_help=True)

Org = Annotated[str, typer.Option("--org", help="Id of the organisation.")]
InvoiceId = Annotated[str, typer.Argument(help="Id of the invoice.")]


class InvoiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """An invoice as it is listed; amounts in currency units."""

    id: str
    number: str | None
    organisation: str
    kind: str
    state: str
    month: str
    total: str
    due: str
    currency: str
    payment: str | None = None  # how far a payment provider is with it


class StateRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a command did to an invoice; amounts in currency units."""

    id: str
    organisation: str
    number: str
    state: str
    total: str
    due: str


@invoices_app.command("close")
def close(
    month: Annotated[str, typer.Argument(help="Month in UTC, YYYY-MM.")],
    org: Annotated[str, typer.Option(help="Id of an organisation; all with usage if absent.")] = "",
    issue: Annotated[bool, typer.Option(help="Give the invoices their numbers at once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make the invoices of a month that is over; again makes none twice."""
    made = call("CloseMonth", pb.Month(month=month, organisation=org, issue=issue), timeout_s=3600.0)
    show([_state(one) for one in made.invoices], as_json=as_json, empty="no invoices to make")


@invoices_app.command("issue")
def issue(invoice: InvoiceId, org: Org, as_json: AsJson = False) -> None:
    """Give a draft its number; from then on it is due."""
    show([_state(call("Issue", pb.InvoiceRef(organisation=org, id=invoice)))], as_json=as_json)


@invoices_app.command("void")
def void(invoice: InvoiceId, org: Org, as_json: AsJson = False) -> None:
    """Write off what is still due of an invoice."""
    show([_state(call("WriteOff", pb.InvoiceRef(organisation=org, id=invoice)))], as_json=as_json)


@invoices_app.command("pay")
def pay(
    invoice: InvoiceId,
    amount: Annotated[str, typer.Argument(help="Currency units that came in.")],
    org: Org,
    reference: Annotated[str, typer.Option(help="The bank's reference: the same one again records nothing.")],
    as_json: AsJson = False,
) -> None:
    """Record a payment that came in by hand."""
    request = pb.Payment(
        organisation=org, id=invoice, provider="manual", reference=reference, amount_cents=cents_of(amount), by=who()
    )
    show([_state(call("Pay", request))], as_json=as_json)


@invoices_app.command("credit-note")
def credit_note(
    invoice: InvoiceId,
    amount: Annotated[str, typer.Argument(help="Currency units to give back, before tax.")],
    org: Org,
    reason: Annotated[str, typer.Option(help="Printed on the note.")],
    key: Annotated[str, typer.Option(help="Idempotency key.")] = "",
    refund: Annotated[bool, typer.Option(help="Send back what was paid by the provider; else it is credit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give back part of an issued invoice."""
    request = pb.NewCreditNote(
        organisation=org,
        id=invoice,
        amount_cents=cents_of(amount),
        reason=reason,
        idempotency=key or str(uuid.uuid4()),
        refund=refund,
    )
    show([_state(call("CreditNote", request))], as_json=as_json)


@invoices_app.command("promise")
def promise(
    model: Annotated[str, typer.Argument(help="Public name of the model.")],
    attainment: Annotated[str, typer.Option(help="Requests that meet their targets, for example 99%.")],
    credit: Annotated[str, typer.Option(help="What comes back of a month's cost below that, for example 10%.")],
    tier: Annotated[str, typer.Option(help="The tier.")] = "default",
) -> None:
    """Promise an SLO attainment from now on; a month that misses it gives credit when it closes."""
    request = pb.SloPromise(
        model=model, tier=tier, attainment_ppm=ppm_of(attainment), credit_ppm=ppm_of(credit), by=who()
    )
    call("Promise", request)
    typer.echo(f"{model} ({tier}): {attainment} from now on, or {credit} back")


@invoices_app.command("seller")
def seller(
    legal_name: Annotated[str, typer.Option(help="Name on the invoices.")],
    address: Annotated[str, typer.Option(help="Address, lines separated by commas.")] = "",
    country: Annotated[str, typer.Option(help="Country code.")] = "",
    tax_id: Annotated[str, typer.Option(help="Tax number.")] = "",
    email: Annotated[str, typer.Option(help="Whom to ask.")] = "",
) -> None:
    """Set who sends the invoices."""
    call("SetSeller", pb.Seller(legal_name=legal_name, address=address, country=country, tax_id=tax_id, email=email))
    typer.echo(f"invoices come from {legal_name}")


@invoices_app.command("buyer")
def buyer(  # noqa: PLR0917 - options have names
    org: Org,
    legal_name: Annotated[str, typer.Option(help="Name on the invoices.")] = "",
    address: Annotated[str, typer.Option(help="Address, lines separated by commas.")] = "",
    country: Annotated[str, typer.Option(help="Country code.")] = "",
    tax_id: Annotated[str, typer.Option(help="Tax number.")] = "",
    tax_name: Annotated[str, typer.Option(help="What the tax is called.")] = "",
    tax: Annotated[str, typer.Option(help="Rate, for example 19%.")] = "0%",
    email: Annotated[str, typer.Option(help="Where invoices go.")] = "",
    time_zone: Annotated[str, typer.Option(help="Of the budgets' months.")] = "UTC",
    prepaid: Annotated[bool, typer.Option(help="Serve only while there is credit.")] = False,
    terms_days: Annotated[int, typer.Option(min=0, help="Days until an invoice is due.")] = 14,
    webhook_url: Annotated[str, typer.Option(help="Where budget alerts go.")] = "",
    webhook_secret: Annotated[str, typer.Option(help="What they are signed with.")] = "",
) -> None:
    """Set an organisation's billing data; what is not named is empty."""
    call(
        "SetProfile",
        pb.Profile(
            organisation=org,
            legal_name=legal_name,
            address=address,
            country=country,
            tax_id=tax_id,
            tax_name=tax_name,
            tax_ppm=ppm_of(tax),
            email=email,
            time_zone=time_zone,
            prepaid=prepaid,
            terms_days=terms_days,
            webhook_url=webhook_url,
            webhook_secret=webhook_secret,
        ),
    )
    typer.echo(f"billing data of {org} are set")


@invoices_app.command("customer")
def customer(org: Org, reference: Annotated[str, typer.Argument(help="Stripe's id of the buyer, cus_….")]) -> None:
    """Bind an organisation to a customer that Stripe has; otherwise its first invoice makes one."""
    call("SetPaymentCustomer", pb.PaymentCustomer(organisation=org, reference=reference))
    typer.echo(f"{org} is {reference} from now on")


@invoices_app.command("list")
def list_all(org: Org, as_json: AsJson = False) -> None:
    """List an organisation's invoices and credit notes, newest first."""

    async def run() -> list[InvoiceRow]:
        async with open_database() as database, database.begin() as conn:
            found = await list_invoices(conn, org)
            return [_row(one, await find_collection(conn, one.id)) for one in found]

    show(asyncio.run(run()), as_json=as_json, empty="no invoices")


@invoices_app.command("show")
def show_one(invoice: InvoiceId, org: Org) -> None:
    """Print an invoice with its lines, as JSON."""
    found, at_provider = _found(invoice, org)
    show_json({**msgspec.to_builtins(found), "collection": msgspec.to_builtins(at_provider)})


@invoices_app.command("export")
def export(
    invoice: InvoiceId,
    file: Annotated[Path, typer.Argument(help="Ends in .pdf or .csv.")],
    org: Org,
    font: Annotated[Path | None, typer.Option(help="TrueType font for names beyond Latin-1.")] = None,
) -> None:
    """Write an invoice as PDF or CSV."""
    found, _ = _found(invoice, org)
    match file.suffix:
        case ".pdf":
            file.write_bytes(invoice_pdf(found, font=font))
        case ".csv":
            file.write_text(invoice_csv(found), newline="")
        case _:
            raise typer.BadParameter(f"{file} must end in .pdf or .csv")
    typer.echo(f"wrote {file}")


def _found(invoice: str, org: str) -> tuple[Invoice, Collection | None]:
    async def run() -> tuple[Invoice | None, Collection | None]:
        async with open_database() as database, database.begin() as conn:
            found = await find_invoice(conn, org, uuid.UUID(invoice))
            return found, None if found is None else await find_collection(conn, found.id)

    try:
        found, at_provider = asyncio.run(run())
    except ValueError:
        raise typer.BadParameter(f"{invoice!r} is no id of an invoice") from None
    if found is None:
        raise CannotStart(f"{org} has no invoice {invoice}: see `pdgate invoices list`")
    return found, at_provider


def _row(one: Invoice, at_provider: Collection | None) -> InvoiceRow:
    return InvoiceRow(
        id=str(one.id),
        number=one.number,
        organisation=one.organisation,
        kind=one.kind,
        state=one.state,
        month=f"{one.period_start.astimezone(dt.UTC):%Y-%m}",
        total=cents_text(one.total_cents),
        due=cents_text(one.due_cents),
        currency=one.currency,
        payment=None if at_provider is None else f"{at_provider.provider}: {at_provider.state}",
    )


def _state(one: Any) -> StateRow:
    return StateRow(
        id=one.id,
        organisation=one.organisation,
        number=one.number,
        state=one.state,
        total=cents_text(one.total_cents),
        due=cents_text(one.due_cents),
    )


def cents_text(cents: int) -> str:
    """Return cents as currency units: `-12.34`."""
    whole, rest = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole}.{rest:02d}"
