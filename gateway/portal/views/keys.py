"""`/portal/keys`: projects and their keys; a key's secret is shown once, in the answer to the form that made it."""

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from contracts.errors import BadRequest, NotFound
from gateway.limits import Limits
from gateway.numerals import whole_number
from gateway.portal.door import AnyRequest, NotAllowed, Visit
from gateway.portal.figures import short
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk
from gateway.service_accounts import ServiceAccounts
from gateway.tenants import NoSuchTenant, publish_key_state

OVERLAP: Final = dt.timedelta(hours=1)
LIMIT_FIELDS: Final[Mapping[str, str]] = {
    "requests_per_minute": "Requests a minute",
    "tokens_per_minute": "Tokens a minute",
    "concurrent_requests": "Requests at once",
}
_MOST: Final = 10**12
_DAYS: Final = frozenset({"30", "90", "365"})
_SHORT_WORDS: Final = {
    "requests_per_minute": "requests/min",
    "prompt_tokens_per_minute": "prompt tokens/min",
    "uncached_prompt_tokens_per_minute": "uncached tokens/min",
    "generated_tokens_per_minute": "generated tokens/min",
    "tokens_per_minute": "tokens/min",
    "concurrent_requests": "at once",
}


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    """A key's secret, on its way to the one page that shows it."""

    name: str
    plaintext: str
    old_until: dt.datetime | None = None


def key_view_routes(desk: Desk, accounts: ServiceAccounts) -> list[HTTPRouteHandler]:
    """Return the handlers of projects and keys."""

    async def page(request: AnyRequest, visit: Visit, **values: Any) -> Response[str]:
        given = {"secret": None, "problem": ""} | values
        return desk.show(
            request,
            "keys",
            visit,
            projects=await desk.tenants.list_projects(visit.tenant),
            keys=await desk.tenants.list_keys(visit.tenant),
            accounts={one.id: one for one in await accounts.list(visit.tenant)},
            limits_text=limits_text,
            limit_fields=list(LIMIT_FIELDS.items()),
            model=desk.any_model(),
            **given,
        )

    @get("/portal/keys")
    async def list_keys(request: Request[Any, Any, Any]) -> Response[str]:
        """Show projects and keys."""
        return await page(request, await desk.enter(request, Right.READ))

    @post("/portal/projects", status_code=200)
    async def make_project(request: Request[Any, Any, Any]) -> Response[str]:
        """Make a project."""
        visit = await desk.enter(request, Right.PROJECTS)
        form = await desk.door.form(request, visit)
        await desk.tenants.create_project(visit.tenant, named(form.get("name")))
        return desk.pages.go(request, "/portal/keys")

    @post("/portal/keys", status_code=200)
    async def make_key(request: Request[Any, Any, Any]) -> Response[str]:
        """Make a key and show it, this once."""
        visit = await desk.enter(request, Right.KEYS)
        form = await desk.door.form(request, visit)
        days = str(form.get("days", ""))
        owner = await owner_of(accounts, visit, str(form.get("owner", "")))
        try:
            key, plaintext = await desk.tenants.create_key(
                visit.tenant,
                str(form.get("project", "")),
                named(form.get("name")),
                limits=_limits(form),
                expires_at=dt.datetime.now(dt.UTC) + dt.timedelta(days=int(days)) if days in _DAYS else None,
                owner=owner,
                actor=visit.actor,
            )
        except NoSuchTenant:
            raise NotFound("There is no such project.") from None
        await publish_key_state(desk.redis, key)
        return await page(request, visit, secret=Secret(name=key.name, plaintext=plaintext))

    @post("/portal/keys/{key_id:str}/rotate", status_code=200)
    async def rotate_key(request: Request[Any, Any, Any], key_id: FromPath[str]) -> Response[str]:
        """Give a key a new secret and show it, this once; the old one works an hour more."""
        visit = await desk.enter(request, Right.KEYS)
        await desk.door.form(request, visit)
        await check_changeable(desk, visit, key_id)
        try:
            key, plaintext = await desk.tenants.rotate(visit.tenant, key_id, overlap=OVERLAP, actor=visit.actor)
        except NoSuchTenant:
            raise NotFound("There is no such active key.") from None
        await publish_key_state(desk.redis, key)
        until = dt.datetime.now(dt.UTC) + OVERLAP
        return await page(request, visit, secret=Secret(name=key.name, plaintext=plaintext, old_until=until))

    @post("/portal/keys/{key_id:str}/revoke", status_code=200)
    async def revoke_key(request: Request[Any, Any, Any], key_id: FromPath[str]) -> Response[str]:
        """Revoke a key: at once, everywhere."""
        visit = await desk.enter(request, Right.KEYS)
        await desk.door.form(request, visit)
        await check_changeable(desk, visit, key_id)
        try:
            key = await desk.tenants.revoke(visit.tenant, key_id, actor=visit.actor)
        except NoSuchTenant:
            raise NotFound("There is no such active key.") from None
        await publish_key_state(desk.redis, key)
        return desk.pages.go(request, "/portal/keys")

    return [list_keys, make_project, make_key, rotate_key, revoke_key]


async def owner_of(accounts: ServiceAccounts, visit: Visit, account_id: str) -> str:
    """Return who owns a new key: a service account, or the visitor. Raises NotFound."""
    if account_id and account_id not in {one.id for one in await accounts.list(visit.tenant)}:
        raise NotFound("There is no such service account.")
    return account_id or visit.actor


async def check_changeable(desk: Desk, visit: Visit, key_id: str) -> None:
    """Raise NotFound, NotAllowed: who may not manage members gets no hand on a key that may."""
    found = await desk.tenants.find_key(visit.tenant, key_id)
    if found is None or found.state != "active":
        raise NotFound("There is no such active key.")
    if found.is_admin and not visit.may(Right.MEMBERS):
        raise NotAllowed(f"As {visit.role} of {visit.organisation.name} you may not change admin keys.")


def limits_text(limits: Limits) -> str:
    """Return limits in few words."""
    set_ones = [(words, getattr(limits, name)) for name, words in _SHORT_WORDS.items()]
    return ", ".join(f"{short(value)} {words}" for words, value in set_ones if value is not None) or "none"


def named(value: Any) -> str:
    """Return a name that somebody typed. Raises BadRequest."""
    text = str(value or "").strip()
    if not 0 < len(text) <= 200 or "\0" in text:
        raise BadRequest("A name has 1 to 200 characters.", param="name")
    return text


def _limits(form: Mapping[str, Any]) -> Limits:
    found: dict[str, int] = {}
    for name, words in LIMIT_FIELDS.items():
        text = str(form.get(name, "")).strip()
        if text:
            number = whole_number(text, most=_MOST)
            if number is None:
                raise BadRequest(f"{words}: a whole number, or nothing for no limit.", param=name)
            found[name] = number
    return Limits(**found)
