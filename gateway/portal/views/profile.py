"""What people change of themselves on `/portal/account`: their name, their time zone, their password."""

from typing import Any

import msgspec
from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler

from contracts.errors import BadRequest, RateLimited
from gateway.portal.door import ACCOUNT
from gateway.portal.views.account import Account, Shown, WrongSecret


def profile_routes(account: Account) -> list[HTTPRouteHandler]:
    """Return the handlers of a person's own forms."""
    door = account.desk.door

    @post(f"{ACCOUNT}/profile", status_code=200)
    async def set_profile(request: Request[Any, Any, Any]) -> Response[str]:
        """Set the name, and the time zone that pages show times in; an empty one is the browser's."""
        session, who, fields = await account.entered(request)
        try:
            await door.people.set_profile(
                who.id,
                name=str(fields.get("name", "")),
                email=who.email,
                time_zone=str(fields.get("time_zone", "")).strip(),
                actor=who.id,
            )
        except BadRequest as error:
            return await account.page(request, session, who, Shown(problem=error.message, status=error.http_status))
        return account.desk.pages.go(request, ACCOUNT)

    @post(f"{ACCOUNT}/password", status_code=200)
    async def set_password(request: Request[Any, Any, Any]) -> Response[str]:
        """Change the password: with the present one. Every other session of the person ends."""
        session, who, fields = await account.entered(request)
        try:
            await account.check_password(request, who, fields)
            hashed = await account.passwords.hash(str(fields.get("new_password", "")))
        except (WrongSecret, RateLimited, BadRequest) as error:
            shown = Shown(problem=error.message, status=error.http_status, about="password")
            return await account.page(request, session, who, shown)
        await door.people.set_password(who.id, hashed, actor=who.id)
        await door.keep_only(request, session)
        said = Shown(done="Your password is changed. You are signed out everywhere else.")
        return await account.page(request, session, msgspec.structs.replace(who, has_password=True), said)

    return [set_profile, set_password]
