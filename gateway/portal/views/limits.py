"""`/portal/limits`: what an organisation, its projects and its keys may use at most; a request must pass all three."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler

from contracts.errors import BadRequest, NotFound
from gateway.admin.organisations import Organisations
from gateway.limits import Limits
from gateway.numerals import whole_number
from gateway.portal.door import NotAllowed, Visit
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk

FIELDS: Final[Mapping[str, str]] = {
    "requests_per_minute": "Requests a minute",
    "prompt_tokens_per_minute": "Prompt tokens a minute",
    "uncached_prompt_tokens_per_minute": "Uncached prompt tokens a minute",
    "generated_tokens_per_minute": "Generated tokens a minute",
    "tokens_per_minute": "Tokens a minute, both kinds",
    "concurrent_requests": "Requests at once",
}
RIGHTS: Final[Mapping[str, Right]] = {"org": Right.FLEET, "project": Right.PROJECTS, "key": Right.KEYS}
_MOST: Final = 10**12


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Whose limits: `name` is `org:ID`, `project:ID` or `key:ID`."""

    name: str
    words: str
    limits: Limits
    may_change: bool

    @property
    def kind(self) -> str:
        """Return org, project or key."""
        return self.name.partition(":")[0]

    def value(self, field: str) -> int | None:
        """Return one limit."""
        found: int | None = getattr(self.limits, field)
        return found


def limit_view_routes(desk: Desk, parts: Organisations) -> list[HTTPRouteHandler]:
    """Return the handlers of limits."""

    async def holders(visit: Visit) -> Sequence[Holder]:
        def holder(kind: str, id_: str, words: str, limits: Limits, *, admins: bool = False) -> Holder:
            may_change = visit.may(RIGHTS[kind]) and (not admins or visit.may(Right.MEMBERS))
            return Holder(name=f"{kind}:{id_}", words=words, limits=limits, may_change=may_change)

        projects = await desk.tenants.list_projects(visit.tenant)
        keys = [one for one in await desk.tenants.list_keys(visit.tenant) if one.state == "active"]
        return [
            holder("org", visit.tenant, "The whole organisation", visit.organisation.limits),
            *(holder("project", one.id, f"Project {one.name}", one.limits) for one in projects),
            *(holder("key", one.id, f"Key {one.name or one.prefix}", one.limits, admins=one.is_admin) for one in keys),
        ]

    @get("/portal/limits")
    async def list_limits(request: Request[Any, Any, Any]) -> Response[str]:
        """Show every limit, and the form of the one that the address names."""
        visit = await desk.enter(request, Right.READ)
        found = await holders(visit)
        wanted = request.query_params.get("of", "")
        chosen = next((one for one in found if one.name == wanted and one.may_change), None)
        return desk.show(request, "limits", visit, holders=found, chosen=chosen, fields=list(FIELDS.items()))

    @post("/portal/limits", status_code=200)
    async def set_limits(request: Request[Any, Any, Any]) -> Response[str]:
        """Replace the limits of one; every gateway knows within the second."""
        visit = await desk.enter(request, Right.READ)
        form = await desk.door.form(request, visit)
        chosen = next((one for one in await holders(visit) if one.name == form.get("of")), None)
        if chosen is None:
            raise NotFound("There is no such organisation, project or active key.")
        if not chosen.may_change:
            raise NotAllowed(f"As {visit.role} of {visit.organisation.name} you may not change these limits.")
        limits = msgspec.structs.replace(chosen.limits, **{name: limit(form, name) for name in FIELDS})
        await _set(parts, visit, chosen, limits)
        await parts.publish()
        return desk.pages.go(request, "/portal/limits")

    return [list_limits, set_limits]


def limit(form: Mapping[str, Any], name: str) -> int | None:
    """Return a limit that somebody typed; None = none of that kind. Raises BadRequest."""
    text = str(form.get(name, "")).strip()
    if not text:
        return None
    number = whole_number(text, most=_MOST)
    if number is None:
        raise BadRequest(f"{FIELDS[name]}: a whole number, or nothing for no limit.", param=name)
    return number


async def _set(parts: Organisations, visit: Visit, chosen: Holder, limits: Limits) -> None:
    kind, _, id_ = chosen.name.partition(":")
    if kind == "org":
        await parts.bounds.set_organisation(visit.tenant, limits=limits, actor=visit.actor)
    elif kind == "project":
        scopes = (await parts.project(visit.tenant, id_)).scopes
        await parts.bounds.set_project(visit.tenant, id_, limits=limits, scopes=scopes, actor=visit.actor)
    elif (key := await parts.tenants.find_key(visit.tenant, id_)) is not None:
        await parts.bounds.set_key(visit.tenant, id_, limits=limits, scopes=key.scopes, actor=visit.actor)
