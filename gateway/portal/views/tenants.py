"""`/portal/fleet/tenants`: every organisation and what it used; operators make, suspend and resume them here."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from billing import queries
from contracts.errors import BadRequest, NotFound
from gateway.admin.organisations import Organisations, link_url
from gateway.holds import SUSPENDED, Hold
from gateway.portal.door import AnyRequest, Visit
from gateway.portal.people import normal_email
from gateway.portal.roles import Right, Role
from gateway.portal.views.desk import Desk
from gateway.portal.views.keys import named
from gateway.portal.views.ranges import CHOICES, range_of

PATH: Final = "/portal/fleet/tenants"


class Invited(msgspec.Struct, frozen=True, kw_only=True):
    """The invite of a new organisation's owner, on its way to the one page that shows it."""

    email: str
    address: str


def tenant_view_routes(desk: Desk, parts: Organisations) -> list[HTTPRouteHandler]:
    """Return the handlers of tenants."""

    async def page(
        request: AnyRequest, visit: Visit, *, typed: Mapping[str, str] | None = None, problem: str = "",
        invited: Invited | None = None,
    ) -> Response[str]:  # fmt: skip
        chosen = range_of(request.query_params.get("range") or "30d", desk.now_s())
        async with desk.reading_across_tenants() as db:
            totals = await queries.usage_totals_across_tenants(db, chosen.span.start_s * 1000, demo_week=True)
        used: dict[str, tuple[int, int, int]] = {}
        for one in totals:
            requests, tokens, cost = used.get(one.organisation, (0, 0, 0))
            of_one = one.requests if one.meter == "decode" else 0
            used[one.organisation] = (requests + of_one, tokens + one.tokens, cost + one.cost)
        return desk.show(
            request,
            "tenants",
            visit,
            range=chosen,
            choices=[(name, words[0]) for name, words in CHOICES.items()],
            organisations=await desk.tenants.list_organisations(),
            held={hold.id: hold.mode for hold in await parts.holds.all() if hold.kind == "org"},
            used=used,
            typed=typed or {},
            problem=problem,
            invited=invited,
            status=400 if problem else 200,
        )

    @get(PATH)
    async def list_tenants(request: Request[Any, Any, Any]) -> Response[str]:
        """Show every organisation, whether it is held, and what it used."""
        return await page(request, await desk.enter(request, Right.FLEET))

    @post(PATH, status_code=200)
    async def make_tenant(request: Request[Any, Any, Any]) -> Response[str]:
        """Make an organisation with one project; with an address also its owner's invite, shown this once."""
        visit = await desk.enter(request, Right.FLEET)
        form = await desk.door.form(request, visit)
        typed = {name: str(form.get(name, "")).strip() for name in ("name", "email")}
        try:
            name, email = named(typed["name"]), normal_email(typed["email"]) if typed["email"] else ""
        except BadRequest as error:
            return await page(request, visit, typed=typed, problem=error.message)
        made = await parts.tenants.create_organisation(name, actor=visit.actor)
        await parts.tenants.create_project(made.id, "Default", actor=visit.actor)
        if not email:
            return desk.pages.go(request, PATH)
        _, token = await parts.links.invite(made.id, email, Role.OWNER, actor=visit.actor)
        address = link_url(parts.transport, request, token)
        return await page(request, visit, invited=Invited(email=email, address=address))

    @post(f"{PATH}/{{tenant:str}}/hold", status_code=200)
    async def hold_tenant(request: Request[Any, Any, Any], tenant: FromPath[str]) -> Response[str]:
        """Refuse an organisation's calls on every gateway and end its running answers; or let it call again."""
        visit = await desk.enter(request, Right.FLEET)
        form = await desk.door.form(request, visit)
        known = await parts.tenants.find_organisation(tenant)
        if known is None or known.runs_fleet:
            raise NotFound("There is no such organisation, or it runs the fleet.")
        if form.get("on") == "1":
            hold = Hold(kind="org", id=tenant, mode=SUSPENDED, reason="suspended", actor=visit.actor)
            await parts.holds.put(hold, org=tenant)
        else:
            await parts.holds.lift("org", tenant, org=tenant, actor=visit.actor)
        await parts.publish()
        return desk.pages.go(request, PATH)

    return [list_tenants, make_tenant, hold_tenant]
