"""`/portal/account`: a person's own second factor (and profile: views.profile). Also for who may visit nothing yet.

Setting one up and taking it away want the password again, so that a browser left open is not enough; taking it away
also wants a code. Every change ends the person's other sessions.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.datastructures import FormMultiDict
from litestar.handlers import HTTPRouteHandler
from redis.exceptions import RedisError

from contracts.errors import BadRequest, DependencyDown, RateLimited, ServingError
from gateway.portal.door import ACCOUNT, AnyRequest, NotAllowed, SecondFactorNeeded, Visit
from gateway.portal.factors import Enrolment, Factors
from gateway.portal.passwords import Passwords, Tries
from gateway.portal.people import Person
from gateway.portal.roles import Right
from gateway.portal.sessions import Session
from gateway.portal.views.desk import Desk


class WrongSecret(BadRequest):
    """The password or the code is not right."""

    code, http_status = "wrong_secret", 401


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer shows beside the state."""

    problem: str = ""
    about: str = ""  # the part of the page that the problem is about; empty = the second factor
    done: str = ""
    status: int = 200
    enrolment: Enrolment | None = None
    codes: Sequence[str] = ()  # recovery codes, this once


NOTHING = Shown()


class Account:
    """What the account page does."""

    def __init__(self, desk: Desk, factors: Factors, passwords: Passwords, tries: Tries) -> None:
        self.desk = desk
        self.factors = factors
        self.passwords = passwords
        self._tries = tries

    async def page(self, request: AnyRequest, session: Session, who: Person, shown: Shown = NOTHING) -> Response[str]:
        """Return the page: inside the portal, or alone while an organisation asks for a second factor first."""
        visit, needed = await self._visit(request)
        fresh = await self.desk.door.people.find(who.id) or who
        return self.desk.pages.page(
            request,
            "views/account.html",
            visit=visit,
            session=session,
            status=shown.status,
            who=fresh,
            needed=needed,
            left=await self.factors.recovery_left(who.id) if fresh.has_second_factor else 0,
            shown=shown,
        )

    async def entered(self, request: AnyRequest) -> tuple[Session, Person, FormMultiDict]:
        """Return who sends a form of the page, and its fields. Raises SignInNeeded, ForgedForm."""
        session, who = await self.desk.door.signed_in(request)
        return session, who, await self.desk.door.form(request, session)

    async def check_password(self, request: AnyRequest, who: Person, fields: FormMultiDict) -> None:
        """Raise WrongSecret, RateLimited, DependencyDown unless the form has the person's password."""
        address = self.desk.door.transport.address(request.scope)
        try:
            await self._tries.count(who.email, address)
        except (RedisError, OSError):
            raise DependencyDown("Passwords cannot be checked right now.", retry_after_s=2) from None
        found = await self.desk.door.people.password_of(who.email)
        if not await self.passwords.matches(found[1] if found else None, str(fields.get("password", ""))):
            raise WrongSecret("The password is wrong.", param="password")
        await self._tries.forget(who.email, address)

    async def count_code(self, who: Person) -> None:
        """Count a code before it is looked at. Raises RateLimited, DependencyDown."""
        try:
            await self._tries.count_code(who.id)
        except (RedisError, OSError):
            raise DependencyDown("Codes cannot be checked right now.", retry_after_s=2) from None

    async def check_code(self, who: Person, fields: FormMultiDict) -> None:
        """Raise WrongSecret, RateLimited, DependencyDown unless the form has a code that was not used."""
        await self.count_code(who)
        if await self.factors.check(who.id, str(fields.get("code", ""))) is None:
            raise WrongSecret("This code is wrong, was used, or is too old.", param="code")
        await self._tries.forget_codes(who.id)

    async def confirmed(self, who: Person, fields: FormMultiDict) -> Sequence[str]:
        """Put the pending secret in force and return the recovery codes. Raises WrongSecret, RateLimited."""
        await self.count_code(who)
        codes = await self.factors.confirm(who.id, str(fields.get("code", "")))
        if codes is None:
            raise WrongSecret("This code is wrong. Does the clock of your phone go right?", param="code")
        await self._tries.forget_codes(who.id)
        return codes

    async def _visit(self, request: AnyRequest) -> tuple[Visit | None, str]:
        """Return the visit, and what the organisation asks for that stands in the way of one."""
        try:
            return await self.desk.door.enter(request, Right.READ), ""
        except SecondFactorNeeded as error:
            return None, error.message
        except NotAllowed:  # a member of nothing
            return None, ""


def account_routes(account: Account) -> list[HTTPRouteHandler]:
    """Return the handlers of the account page."""
    factors, door = account.factors, account.desk.door

    @get(ACCOUNT)
    async def show_account(request: Request[Any, Any, Any]) -> Response[str]:
        """Show the state of the second factor."""
        session, who = await door.signed_in(request)
        return await account.page(request, session, who)

    @post(f"{ACCOUNT}/second-factor", status_code=200)
    async def set_up(request: Request[Any, Any, Any]) -> Response[str]:
        """Make a secret and show it; it is in force once a code of it was sent."""
        session, who, fields = await account.entered(request)
        try:
            await account.check_password(request, who, fields)
            enrolment = await factors.begin(who.id, account=who.email)
        except (WrongSecret, RateLimited) as error:
            return await account.page(request, session, who, _problem(error))
        return await account.page(request, session, who, Shown(enrolment=enrolment))

    @post(f"{ACCOUNT}/second-factor/confirm", status_code=200)
    async def confirm(request: Request[Any, Any, Any]) -> Response[str]:
        """Put the secret in force and show the recovery codes, this once."""
        session, who, fields = await account.entered(request)
        try:
            codes = await account.confirmed(who, fields)
        except (WrongSecret, RateLimited) as error:
            pending = await factors.pending(who.id, account=who.email)
            again = msgspec.structs.replace(_problem(error), enrolment=pending)
            return await account.page(request, session, who, again)
        await door.keep_only(request, session)
        return await account.page(request, session, who, Shown(codes=codes))

    @post(f"{ACCOUNT}/second-factor/codes", status_code=200)
    async def renew_codes(request: Request[Any, Any, Any]) -> Response[str]:
        """Make new recovery codes and show them, this once."""
        session, who, fields = await account.entered(request)
        try:
            await account.check_code(who, fields)
        except (WrongSecret, RateLimited) as error:
            return await account.page(request, session, who, _problem(error))
        return await account.page(request, session, who, Shown(codes=await factors.renew_codes(who.id)))

    @post(f"{ACCOUNT}/second-factor/off", status_code=200)
    async def take_away(request: Request[Any, Any, Any]) -> Response[str]:
        """Take the second factor away: with the password and a code."""
        session, who, fields = await account.entered(request)
        try:
            await account.check_password(request, who, fields)
            await account.check_code(who, fields)
        except (WrongSecret, RateLimited) as error:
            return await account.page(request, session, who, _problem(error))
        await factors.remove(who.id, actor=who.id)
        await door.keep_only(request, session)
        return account.desk.pages.go(request, ACCOUNT)

    return [show_account, set_up, confirm, renew_codes, take_away]


def _problem(error: ServingError) -> Shown:
    return Shown(problem=error.message, status=error.http_status)
