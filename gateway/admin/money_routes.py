"""Budgets, credits, billing profiles and invoices. Reads go to PostgreSQL, writes to billing."""

import uuid

import msgspec
from litestar import delete, get, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from billing import queries
from contracts.errors import NotFound
from contracts.v1 import billing_pb2 as pb
from gateway.admin.callers import Callers
from gateway.admin.handlers import AnyRequest, nano_of, taken, unix_ms
from gateway.admin.money import Noted
from gateway.admin.organisations import ORG, Organisations
from gateway.admin.paging import ListOf, page
from gateway.admin.shapes import BudgetView, Done, MonthToClose, NewBudget, NewCredit, ProfileChange, Thing
from gateway.openapi import json_operation
from gateway.portal.roles import Right
from gateway.schemas.answers import money_text
from gateway.tenant_read import tenant_read

TAGS = ["admin: money"]
BUDGET = f"{ORG}/budgets/{{kind:str}}/{{kind_id:str}}"
INVOICE = f"{ORG}/invoices/{{invoice:str}}"


def budget_routes(callers: Callers, parts: Organisations, noted: Noted) -> list[HTTPRouteHandler]:
    """Return the handlers of budgets."""

    async def check_scope(tenant: str, scope: str, scope_id: str) -> None:
        if scope == "org" and scope_id == tenant:
            return
        if scope == "project" and await parts.project(tenant, scope_id):
            return
        if scope == "key" and await parts.tenants.find_key(tenant, scope_id):
            return
        raise NotFound("A budget is of 'org', 'project' or 'key', and of one of this organisation's.", param="scope")

    @get(f"{ORG}/budgets", summary="List budgets", operation_id="listBudgets", tags=TAGS)
    async def list_budgets(request: AnyRequest, organisation: FromPath[str]) -> ListOf[BudgetView]:
        """Return the budgets of the organisation, its projects and keys."""
        caller = await callers.about(request, organisation, Right.COSTS)
        async with tenant_read(noted.engine, caller.tenant) as db:
            found = await queries.budgets_of(db, caller.tenant)
        return page(request, [budget_view(one) for one in found], lambda view: f"{view.scope}:{view.scope_id}")

    @put(
        BUDGET,
        summary="Set a budget",
        operation_id="putBudget",
        tags=TAGS,
        operation_class=json_operation(NewBudget, Done),
    )
    async def put_budget(
        request: AnyRequest, organisation: FromPath[str], kind: FromPath[str], kind_id: FromPath[str]
    ) -> Done:
        """Set what a scope may use in a month."""
        caller = await callers.about(request, organisation, Right.MONEY)
        wanted = await taken(request, NewBudget)
        await check_scope(caller.tenant, kind, kind_id)
        asked = pb.Budget(
            organisation=caller.tenant,
            scope=kind,
            scope_id=kind_id,
            amount=nano_of(wanted.amount),
            soft=wanted.soft,
            thresholds=wanted.thresholds,
            by=caller.actor,
        )
        await noted.call(
            "SetBudget", asked, actor=caller.actor, subject=f"{kind}:{kind_id}", org=caller.tenant, kind="budget"
        )
        return Done(id=f"{kind}:{kind_id}", object="budget")

    @delete(BUDGET, summary="Remove a budget", operation_id="deleteBudget", tags=TAGS, status_code=200)
    async def delete_budget(
        request: AnyRequest, organisation: FromPath[str], kind: FromPath[str], kind_id: FromPath[str]
    ) -> Done:
        """Remove a budget."""
        caller = await callers.about(request, organisation, Right.MONEY)
        await check_scope(caller.tenant, kind, kind_id)
        asked = pb.BudgetScope(organisation=caller.tenant, scope=kind, scope_id=kind_id)
        done = await noted.call(
            "RemoveBudget", asked, actor=caller.actor, subject=f"{kind}:{kind_id}", org=caller.tenant, kind="budget"
        )
        return Done(id=f"{kind}:{kind_id}", object="budget", deleted=bool(done.changed))

    return [list_budgets, put_budget, delete_budget]


def credit_routes(callers: Callers, noted: Noted) -> list[HTTPRouteHandler]:
    """Return the handlers of credits and billing profiles."""

    @get(f"{ORG}/credits", summary="List credits", operation_id="listCredits", tags=TAGS)
    async def list_credits(request: AnyRequest, organisation: FromPath[str]) -> ListOf[Thing]:
        """Return what was granted, and what is left of it, nano-units."""
        caller = await callers.about(request, organisation, Right.COSTS)
        async with tenant_read(noted.engine, caller.tenant) as db:
            found = await queries.grants_of(db, caller.tenant)
        return page(request, [thing("credit", one) for one in found], lambda view: str(view.value["id"]))

    @post(
        f"{ORG}/credits",
        summary="Grant credit",
        operation_id="createCredit",
        tags=TAGS,
        operation_class=json_operation(NewCredit, Done, status=201),
    )
    async def create_credit(request: AnyRequest, organisation: FromPath[str]) -> Done:
        """Grant credit, once per `idempotency`."""
        caller = await callers.about(request, organisation, Right.FLEET)
        wanted = await taken(request, NewCredit)
        asked = pb.NewGrant(
            organisation=caller.tenant,
            kind=wanted.kind,
            amount=nano_of(wanted.amount),
            idempotency=wanted.idempotency,
            expires_ms=unix_ms(wanted.expires_at, "expires_at"),
            note=wanted.note,
            by=caller.actor,
        )
        made = await noted.call(
            "Grant", asked, actor=caller.actor, subject=wanted.idempotency, org=caller.tenant, kind="credit"
        )
        return Done(id=made.id, object="credit")

    @get(f"{ORG}/profile", summary="Get the billing profile", operation_id="getProfile", tags=TAGS)
    async def get_profile(request: AnyRequest, organisation: FromPath[str]) -> Thing:
        """Return the billing profile, without the webhook's secret."""
        caller = await callers.about(request, organisation, Right.COSTS)
        async with tenant_read(noted.engine, caller.tenant) as db:
            found = await queries.find_profile(db, caller.tenant)
        return thing("profile", msgspec.structs.replace(found, webhook_secret=""))

    @put(
        f"{ORG}/profile",
        summary="Set the billing profile",
        operation_id="putProfile",
        tags=TAGS,
        operation_class=json_operation(ProfileChange, Done),
    )
    async def put_profile(request: AnyRequest, organisation: FromPath[str]) -> Done:
        """Replace the billing profile; tax, terms and prepayment stay as the operator set them."""
        caller = await callers.about(request, organisation, Right.MONEY)
        wanted = await taken(request, ProfileChange)
        async with tenant_read(noted.engine, caller.tenant) as db:
            known = await queries.find_profile(db, caller.tenant)
        asked = pb.Profile(
            organisation=caller.tenant,
            tax_name=known.tax_name,
            tax_ppm=known.tax_ppm,
            prepaid=known.prepaid,
            terms_days=known.terms_days,
            **msgspec.structs.asdict(wanted) | {"webhook_secret": wanted.webhook_secret or known.webhook_secret},
        )
        await noted.call(
            "SetProfile", asked, actor=caller.actor, subject=caller.tenant, org=caller.tenant, kind="profile"
        )
        return Done(id=caller.tenant, object="profile")

    return [list_credits, create_credit, get_profile, put_profile]


def invoice_routes(callers: Callers, noted: Noted) -> list[HTTPRouteHandler]:
    """Return the handlers of invoices."""

    @get(f"{ORG}/invoices", summary="List invoices", operation_id="listInvoices", tags=TAGS)
    async def list_invoices(request: AnyRequest, organisation: FromPath[str]) -> ListOf[Thing]:
        """Return invoices and credit notes without their lines, newest first; filter by `state`."""
        caller = await callers.about(request, organisation, Right.COSTS)
        wanted = request.query_params.get("state")
        async with tenant_read(noted.engine, caller.tenant) as db:
            found = await queries.list_invoices(db, caller.tenant)
        views = [thing("invoice", one) for one in found if wanted in (None, one.state.value)]
        return page(request, views, lambda view: str(view.value["id"]))

    @get(INVOICE, summary="Get an invoice", operation_id="getInvoice", tags=TAGS)
    async def get_invoice(request: AnyRequest, organisation: FromPath[str], invoice: FromPath[str]) -> Thing:
        """Return an invoice with its lines, and how far a payment provider is with it (`collection`)."""
        caller = await callers.about(request, organisation, Right.COSTS)
        async with tenant_read(noted.engine, caller.tenant) as db:
            found = await queries.find_invoice(db, caller.tenant, _uuid(invoice))
            collection = await queries.find_collection(db, _uuid(invoice)) if found is not None else None
        if found is None:
            raise NotFound("There is no such invoice.", param="invoice")
        view = thing("invoice", found)
        return Thing(object=view.object, value={**view.value, "collection": msgspec.to_builtins(collection)})

    @post(f"{INVOICE}/issue", summary="Issue an invoice", operation_id="issueInvoice", tags=TAGS, status_code=200)
    async def issue_invoice(request: AnyRequest, organisation: FromPath[str], invoice: FromPath[str]) -> Thing:
        """Give a draft its number. It cannot be changed afterwards."""
        caller = await callers.about(request, organisation, Right.FLEET)
        asked = pb.InvoiceRef(organisation=caller.tenant, id=str(_uuid(invoice)))
        state = await noted.call("Issue", asked, actor=caller.actor, subject=invoice, org=caller.tenant, kind="invoice")
        return Thing(object="invoice", value={"id": state.id, "number": state.number, "state": state.state})

    @post(
        f"{ORG}/invoices",
        summary="Close a month",
        operation_id="closeMonth",
        tags=TAGS,
        operation_class=json_operation(MonthToClose, ListOf[Thing], status=201),
    )
    async def close_month(request: AnyRequest, organisation: FromPath[str]) -> ListOf[Thing]:
        """Make the invoice of a month that is over; again changes nothing."""
        caller = await callers.about(request, organisation, Right.FLEET)
        wanted = await taken(request, MonthToClose)
        asked = pb.Month(month=wanted.month, organisation=caller.tenant, issue=wanted.issue)
        made = await noted.call(
            "CloseMonth", asked, actor=caller.actor, subject=wanted.month, org=caller.tenant, kind="invoice"
        )
        values = [{"id": one.id, "number": one.number, "state": one.state} for one in made.invoices]
        return ListOf(data=[Thing(object="invoice", value=value) for value in values])

    return [list_invoices, get_invoice, issue_invoice, close_month]


def budget_view(found: queries.Budget) -> BudgetView:
    """Return a budget as it is answered."""
    return BudgetView(
        scope=found.scope,
        scope_id=found.scope_id,
        amount=money_text(found.amount),
        amount_nano=found.amount,
        soft=not found.hard,
        thresholds=found.thresholds,
    )


def thing(kind: str, found: msgspec.Struct) -> Thing:
    """Return something of billing as JSON has it."""
    return Thing(object=kind, value=msgspec.to_builtins(found))


def _uuid(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise NotFound("There is no such invoice.", param="invoice") from None
