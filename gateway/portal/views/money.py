"""`/portal/budgets`, `/invoices`, `/credits`, `/webhooks`: what an organisation owes, has, and may spend."""

import datetime as dt
import uuid
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final, Protocol

from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from billing import queries
from contracts.errors import BadRequest, NotFound
from contracts.v1 import billing_pb2 as pb
from gateway.portal.door import Visit
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk

_NANO: Final = 1_000_000_000
_MEDIA: Final[Mapping[str, str]] = {"pdf": "application/pdf", "csv": "text/csv"}


class MoneyWriter(Protocol):
    """Who writes about money: billing's Admin service. Raises BadRequest with its sentence, DependencyDown."""

    async def call(self, method: str, asked: Any, *, actor: str, subject: str, org: str | None, kind: str) -> Any:
        """Return the answer to one call of contracts/v1/billing.proto; the record of changes says who did it."""
        ...


def money_view_routes(desk: Desk, writer: MoneyWriter) -> list[HTTPRouteHandler]:
    """Return the handlers of money."""
    return [*_document_routes(desk), *_budget_routes(desk, writer)]


def _document_routes(desk: Desk) -> list[HTTPRouteHandler]:
    @get("/portal/invoices")
    async def list_invoices(request: Request[Any, Any, Any]) -> Response[str]:
        """Show invoices and credit notes, newest first."""
        visit = await desk.enter(request, Right.COSTS)
        async with desk.reading(visit) as db:
            invoices = await queries.list_invoices(db, visit.tenant)
            due = {one.id: await queries.outstanding(db, one) for one in invoices if one.state == "issued"}
        return desk.show(request, "invoices", visit, invoices=invoices, outstanding=due)

    @get("/portal/invoices/{invoice_id:str}")
    async def get_invoice(request: Request[Any, Any, Any], invoice_id: FromPath[str]) -> Response[str]:
        """Show one invoice with its lines."""
        visit = await desk.enter(request, Right.COSTS)
        async with desk.reading(visit) as db:
            found = await queries.find_invoice(db, visit.tenant, _id(invoice_id))
            if found is None:
                raise NotFound("There is no such invoice.")
            due = await queries.outstanding(db, found)
            collection = await queries.find_collection(db, found.id)
        pay_url = collection.url if collection is not None and found.state == "issued" else ""
        pay_url = pay_url if pay_url.startswith("https://") else ""
        return desk.show(request, "invoice", visit, found=found, outstanding=due, pay_url=pay_url)

    @get("/portal/invoices/{invoice_id:str}/{kind:str}")
    async def get_document(
        request: Request[Any, Any, Any], invoice_id: FromPath[str], kind: FromPath[str]
    ) -> Response[bytes]:
        """Return an invoice as PDF or CSV."""
        visit = await desk.enter(request, Right.COSTS)
        if kind not in _MEDIA:
            raise NotFound("An invoice is a pdf or a csv.")
        async with desk.reading(visit) as db:
            found = await queries.invoice_document(db, visit.tenant, _id(invoice_id), kind)
        if found is None:
            raise NotFound("There is no such invoice.")
        invoice, body = found
        name = invoice.number or f"draft-{invoice.period_start:%Y-%m}"
        return Response(
            body,
            media_type=_MEDIA[kind],
            headers={"content-disposition": f'attachment; filename="{name}.{kind}"'},
        )

    @get("/portal/credits")
    async def list_credits(request: Request[Any, Any, Any]) -> Response[str]:
        """Show grants in the order in which they are used."""
        visit = await desk.enter(request, Right.COSTS)
        async with desk.reading(visit) as db:
            grants = await queries.grants_of(db, visit.tenant)
            profile = await queries.find_profile(db, visit.tenant)
        left = sum(one.left for one in grants)
        return desk.show(request, "credits", visit, grants=grants, left=left, prepaid=profile.prepaid)

    return [list_invoices, get_invoice, get_document, list_credits]


def _budget_routes(desk: Desk, writer: MoneyWriter) -> list[HTTPRouteHandler]:
    @get("/portal/budgets")
    async def list_budgets(request: Request[Any, Any, Any]) -> Response[str]:
        """Show budgets, what is spent of them, and the limits of keys and projects."""
        visit = await desk.enter(request, Right.COSTS)
        async with desk.reading(visit) as db:
            uses = await queries.budget_uses(db, visit.tenant, now=dt.datetime.now(dt.UTC))
        names = await desk.names(visit.tenant)
        scopes = [("org", visit.tenant, "The whole organisation")]
        scopes += [("project", id_, f"Project {name}") for id_, name in names.projects.items()]
        scopes += [("key", id_, f"Key {name}") for id_, name in names.keys.items()]
        words = {(scope, id_): name for scope, id_, name in scopes}
        return desk.show(request, "budgets", visit, uses=uses, scopes=scopes, words=words)

    @post("/portal/budgets", status_code=200)
    async def set_budget(request: Request[Any, Any, Any]) -> Response[str]:
        """Set a budget of a month; a hard one refuses what does not fit."""
        visit = await desk.enter(request, Right.MONEY)
        form = await desk.door.form(request, visit)
        scope, _, scope_id = str(form.get("scope", "")).partition(":")
        await _check_scope(visit.tenant, scope, scope_id)
        await writer.call(
            "SetBudget",
            pb.Budget(
                organisation=visit.tenant,
                scope=scope,
                scope_id=scope_id,
                amount=typed_nano(str(form.get("amount", ""))),
                soft=form.get("soft") == "1",
                by=visit.actor,
            ),
            **_of(visit, f"{scope}:{scope_id}", "budget"),
        )
        return desk.pages.go(request, "/portal/budgets")

    @post("/portal/budgets/remove", status_code=200)
    async def remove_budget(request: Request[Any, Any, Any]) -> Response[str]:
        """Remove a budget."""
        visit = await desk.enter(request, Right.MONEY)
        form = await desk.door.form(request, visit)
        scope, _, scope_id = str(form.get("scope", "")).partition(":")
        await _check_scope(visit.tenant, scope, scope_id)
        asked = pb.BudgetScope(organisation=visit.tenant, scope=scope, scope_id=scope_id)
        await writer.call("RemoveBudget", asked, **_of(visit, f"{scope}:{scope_id}", "budget"))
        return desk.pages.go(request, "/portal/budgets")

    @get("/portal/webhooks")
    async def list_webhooks(request: Request[Any, Any, Any]) -> Response[str]:
        """Show where news are sent, and what became of them."""
        visit = await desk.enter(request, Right.COSTS)
        async with desk.reading(visit) as db:
            profile = await queries.find_profile(db, visit.tenant)
            sent = await queries.deliveries(db, visit.tenant)
        return desk.show(request, "webhooks", visit, address=profile.webhook_url, deliveries=sent)

    @post("/portal/webhooks", status_code=200)
    async def set_webhook(request: Request[Any, Any, Any]) -> Response[str]:
        """Set where news are sent and with which secret they are signed; an empty address: nowhere."""
        visit = await desk.enter(request, Right.MONEY)
        form = await desk.door.form(request, visit)
        async with desk.reading(visit) as db:
            known = await queries.find_profile(db, visit.tenant)
        names = [field.name for field in pb.Profile.DESCRIPTOR.fields]
        kept = {name: getattr(known, name) for name in names}
        address = str(form.get("address", "")).strip()
        secret = str(form.get("secret", "")) or known.webhook_secret
        kept |= {"webhook_url": address, "webhook_secret": secret if address else ""}
        await writer.call("SetProfile", pb.Profile(**kept), **_of(visit, visit.tenant, "profile"))
        return desk.pages.go(request, "/portal/webhooks")

    async def _check_scope(tenant: str, scope: str, scope_id: str) -> None:
        names = await desk.names(tenant)
        known = {"org": {tenant}, "project": set(names.projects), "key": set(names.keys)}.get(scope, set())
        if scope_id not in known:
            raise NotFound("There is no such project or key.")

    return [list_budgets, set_budget, remove_budget, list_webhooks, set_webhook]


def _of(visit: Visit, subject: str, kind: str) -> dict[str, str]:
    return {"actor": visit.actor, "subject": subject, "org": visit.tenant, "kind": kind}


def typed_nano(text: str) -> int:
    """Return an amount that somebody typed, nano-units. Raises BadRequest."""
    try:
        amount = Decimal(text.strip().replace(",", "."))
    except InvalidOperation:
        raise BadRequest("An amount is a number, such as 25 or 0.50.", param="amount") from None
    if not amount.is_finite() or not 0 <= amount <= 9_000_000 or amount * _NANO != int(amount * _NANO):
        raise BadRequest("An amount is 0 to 9 million, with at most nine decimals.", param="amount")
    return int(amount * _NANO)


def _id(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise NotFound("There is no such invoice.") from None
