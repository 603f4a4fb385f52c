"""Service accounts on `/portal/members`: members that are no people and own keys."""

from typing import Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from contracts.errors import NotFound
from gateway.admin.members import Members
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk
from gateway.portal.views.keys import named
from gateway.tenants import NoSuchTenant


def service_account_view_routes(desk: Desk, parts: Members) -> list[HTTPRouteHandler]:
    """Return the handlers of service accounts' forms."""

    @post("/portal/service-accounts", status_code=200)
    async def make_account(request: Request[Any, Any, Any]) -> Response[str]:
        """Make a service account of a project."""
        visit = await desk.enter(request, Right.MEMBERS)
        form = await desk.door.form(request, visit)
        try:
            await parts.accounts.create(
                visit.tenant, str(form.get("project", "")), named(form.get("name")), actor=visit.actor
            )
        except NoSuchTenant:
            raise NotFound("There is no such project.") from None
        return desk.pages.go(request, "/portal/members")

    @post("/portal/service-accounts/{account_id:str}/remove", status_code=200)
    async def remove_account(request: Request[Any, Any, Any], account_id: FromPath[str]) -> Response[str]:
        """Remove a service account and revoke its keys: at once, everywhere."""
        visit = await desk.enter(request, Right.MEMBERS)
        await desk.door.form(request, visit)
        try:
            await parts.remove_account(visit.tenant, account_id, actor=visit.actor)
        except NoSuchTenant:
            raise NotFound("There is no such service account.") from None
        return desk.pages.go(request, "/portal/members")

    return [make_account, remove_account]
