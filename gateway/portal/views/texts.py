"""`/portal/texts`: whether prompts and answers are stored, and what else is kept; those of one request.

The consent is the organisation's own; operators who are no members have neither right.
"""

from typing import Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from contracts.errors import BadRequest, NotFound
from gateway.admin.text_routes import TextDesk
from gateway.numerals import whole_number
from gateway.portal.door import Visit
from gateway.portal.roles import RIGHTS, Right, Role
from gateway.portal.views.desk import Desk
from gateway.text_book import MOST_DAYS, Talk

PATH: Final = "/portal/texts"
READERS: Final = ", ".join(f"{role}s" for role in Role if Right.TEXTS in RIGHTS[role])


def text_view_routes(desk: Desk, texts: TextDesk) -> list[HTTPRouteHandler]:
    """Return the handlers of stored prompts and answers."""

    @get(PATH)
    async def show_consent(request: Request[Any, Any, Any]) -> Response[str]:
        """Show whether texts are stored, for how long, and who may read them."""
        visit = await desk.enter(request, Right.READ)
        consent = await texts.book.consent(visit.tenant)
        return desk.show(request, "texts", visit, consent=consent, most=MOST_DAYS, readers=READERS)

    @post(PATH, status_code=200)
    async def give(request: Request[Any, Any, Any]) -> Response[str]:
        """Have texts stored from now on, or for another number of days."""
        visit = await desk.enter(request, Right.STORAGE)
        form = await desk.door.form(request, visit)
        days = whole_number(str(form.get("days", "")).strip(), most=MOST_DAYS)
        if not days:
            raise BadRequest(f"Days: a whole number from 1 to {MOST_DAYS}.", param="days")
        await texts.give(visit.tenant, days=days, actor=visit.actor)
        return desk.pages.go(request, PATH)

    @post(f"{PATH}/off", status_code=200)
    async def withdraw(request: Request[Any, Any, Any]) -> Response[str]:
        """Store nothing any more and delete what there is."""
        visit = await desk.enter(request, Right.STORAGE)
        await desk.door.form(request, visit)
        await texts.withdraw(visit.tenant, actor=visit.actor)
        return desk.pages.go(request, PATH)

    @post("/portal/requests/{rid:str}/texts/delete", status_code=200)
    async def delete_texts(request: Request[Any, Any, Any], rid: FromPath[str]) -> Response[str]:
        """Delete what is stored of one request."""
        visit = await desk.enter(request, Right.STORAGE)
        await desk.door.form(request, visit)
        await texts.delete(visit.tenant, rid, actor=visit.actor)
        return desk.pages.go(request, f"/portal/requests/{rid}")

    return [show_consent, give, withdraw, delete_texts]


async def talk_of(texts: TextDesk, visit: Visit, rid: str) -> Talk | None:
    """Return what is stored of a request, for those who may read it."""
    if visit.organisation.texts_since is None or not visit.may(Right.TEXTS):
        return None
    try:
        return await texts.find(visit.tenant, rid)
    except NotFound:
        return None


def readable(prompt: str) -> str:
    """Return a body with its fields on lines of their own; one that was cut off stays as it is."""
    try:
        return msgspec.json.format(prompt, indent=2)
    except msgspec.DecodeError:
        return prompt
