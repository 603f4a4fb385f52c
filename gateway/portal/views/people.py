"""`/portal/members`: who is here with which role, and who is invited."""

from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from contracts.errors import BadRequest, NotFound
from gateway.admin.callers import Caller
from gateway.admin.members import Members, check_reset
from gateway.portal.door import AnyRequest, NotAllowed, Visit
from gateway.portal.links import Links
from gateway.portal.people import People
from gateway.portal.roles import MEMBER_ROLES, Right, Role, may_give
from gateway.portal.views.desk import Desk


class Shown(msgspec.Struct, frozen=True):
    """A one-time link on its way to the one page that shows it."""

    words: str
    address: str


def people_view_routes(desk: Desk, people: People, links: Links, parts: Members) -> list[HTTPRouteHandler]:
    """Return the handlers of members."""

    async def page(request: AnyRequest, visit: Visit, shown: Shown | None = None) -> Response[str]:
        manages = visit.may(Right.MEMBERS)
        invites = await links.list_invites(visit.tenant) if manages else []
        return desk.show(
            request,
            "members",
            visit,
            members=await people.members(visit.tenant),
            accounts=await parts.accounts.list(visit.tenant),
            projects={one.id: one.name for one in await desk.tenants.list_projects(visit.tenant)},
            invites=[one for one in invites if one.state == "open"],
            roles=[role.value for role in MEMBER_ROLES if may_give(visit.role, role)],
            shown=shown,
        )

    @get("/portal/members")
    async def list_members(request: Request[Any, Any, Any]) -> Response[str]:
        """Show members and open invites."""
        return await page(request, await desk.enter(request, Right.READ))

    @post("/portal/members", status_code=200)
    async def invite(request: Request[Any, Any, Any]) -> Response[str]:
        """Make an invite and show its link, this once."""
        visit = await desk.enter(request, Right.MEMBERS)
        form = await desk.door.form(request, visit)
        role = _role(form.get("role"), visit)
        link, token = await links.invite(visit.tenant, str(form.get("email", "")), role, actor=visit.actor)
        address = f"{desk.door.transport.origin(request.scope)}/portal/invite/{token}"
        return await page(request, visit, Shown(f"Invite of {link.email}", address))

    @post("/portal/members/{person_id:str}/role", status_code=200)
    async def set_role(request: Request[Any, Any, Any], person_id: FromPath[str]) -> Response[str]:
        """Give a member another role."""
        visit = await desk.enter(request, Right.MEMBERS)
        form = await desk.door.form(request, visit)
        await check_about(people, visit, person_id)
        await people.set_role(visit.tenant, person_id, _role(form.get("role"), visit), actor=visit.actor)
        return desk.pages.go(request, "/portal/members")

    @post("/portal/members/{person_id:str}/remove", status_code=200)
    async def remove(request: Request[Any, Any, Any], person_id: FromPath[str]) -> Response[str]:
        """Remove a member."""
        visit = await desk.enter(request, Right.MEMBERS)
        await desk.door.form(request, visit)
        await check_about(people, visit, person_id)
        await people.remove(visit.tenant, person_id, actor=visit.actor)
        return desk.pages.go(request, "/portal/members")

    @post("/portal/members/{person_id:str}/reset", status_code=200)
    async def reset(request: Request[Any, Any, Any], person_id: FromPath[str]) -> Response[str]:
        """Make a link with which a member sets a new password, and show it, this once."""
        visit = await desk.enter(request, Right.MEMBERS)
        await desk.door.form(request, visit)
        asking = Caller(actor=visit.actor, role=visit.role, tenant=visit.tenant, is_operator=visit.person.is_operator)
        await check_reset(parts, asking, person_id)
        _, token = await links.reset(visit.tenant, person_id, actor=visit.actor)
        who = await people.find(person_id)
        address = f"{desk.door.transport.origin(request.scope)}/portal/invite/{token}"
        return await page(request, visit, Shown(f"New password for {who.shown if who else person_id}", address))

    @post("/portal/members/invites/{link_id:str}/withdraw", status_code=200)
    async def withdraw(request: Request[Any, Any, Any], link_id: FromPath[str]) -> Response[str]:
        """Withdraw an invite."""
        visit = await desk.enter(request, Right.MEMBERS)
        await desk.door.form(request, visit)
        await links.withdraw(visit.tenant, link_id, actor=visit.actor)
        return desk.pages.go(request, "/portal/members")

    return [list_members, invite, set_role, remove, reset, withdraw]


async def check_about(people: People, visit: Visit, person_id: str) -> None:
    """Raise NotFound, or NotAllowed when the visitor may not change this member."""
    role = await people.role_of(visit.tenant, person_id)
    if role is None:
        raise NotFound("There is no such member.")
    if not may_give(visit.role, role):
        raise NotAllowed("Only owners change owners.")


def _role(text: Any, visit: Visit) -> Role:
    if text not in [role.value for role in MEMBER_ROLES]:
        raise BadRequest("There is no such role.", param="role")
    role = Role(text)
    if not may_give(visit.role, role):
        raise NotAllowed("Only owners make owners.")
    return role
