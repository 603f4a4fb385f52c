"""What owners and operators do about second factors of others, on `/portal/members`."""

from typing import Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.portal.factors import Factors
from gateway.portal.people import People
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk
from gateway.portal.views.people import check_about


def member_factor_routes(desk: Desk, people: People, factors: Factors) -> list[HTTPRouteHandler]:
    """Return the handlers of members' second factors."""

    @post("/portal/members/second-factor", status_code=200)
    async def need_factor(request: Request[Any, Any, Any]) -> Response[str]:
        """Let nobody in without a second factor, or everybody again."""
        visit = await desk.enter(request, Right.OWNERS)
        form = await desk.door.form(request, visit)
        await factors.need(visit.tenant, on=form.get("on") == "1", actor=visit.actor)
        return desk.pages.go(request, "/portal/members")

    @post("/portal/members/{person_id:str}/second-factor-off", status_code=200)
    async def reset_factor(request: Request[Any, Any, Any], person_id: FromPath[str]) -> Response[str]:
        """Take the second factor of who lost phone and recovery codes away, and end their sessions. For operators."""
        visit = await desk.enter(request, Right.FLEET)
        await desk.door.form(request, visit)
        await check_about(people, visit, person_id)
        await factors.remove(person_id, actor=visit.actor)
        await desk.door.sessions.end_all(person_id)
        return desk.pages.go(request, "/portal/members")

    return [need_factor, reset_factor]
