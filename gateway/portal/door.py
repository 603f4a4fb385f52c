"""From a request to who makes it: `Door.enter` for every page, `Door.form` for every change.

Forms carry a secret of the session in the field `csrf`, scripts send it as `x-csrf-token`. Who is not signed in has no
session, so there the secret is in a cookie of its own (double submit). In both cases a browser that says that the
request comes from another site is refused.
"""

import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from litestar import Request, Response
from litestar.datastructures import Cookie, FormMultiDict
from redis.exceptions import RedisError

from contracts.errors import DependencyDown, PermissionDenied, ServingError
from gateway import bodies
from gateway.portal.people import People, Person, Place
from gateway.portal.roles import Right, Role, may
from gateway.portal.sessions import ABSOLUTE_S, OPENID, Session, Sessions
from gateway.portal.transport import Transport
from gateway.tenants import Organisation

HOME: Final = "/portal"
SIGN_IN: Final = "/portal/login"
ACCOUNT: Final = "/portal/account"
SESSION_COOKIE: Final = "pdgate_session"
FORM_COOKIE: Final = "pdgate_form"
CSRF_FIELD: Final = "csrf"
CSRF_HEADER: Final = "x-csrf-token"

_INSIDE: Final = re.compile(r"/portal(?:[/?#](?!.*\.\.)[\x21-\x5b\x5d-\x7e]*)?")  # no backslash, no way up

AnyRequest = Request[Any, Any, Any]


class SignInNeeded(ServingError):
    """Nobody is signed in; a page sends the browser to sign in first."""

    code, type, http_status = "sign_in_needed", "invalid_request_error", 401


class SecondFactorNeeded(PermissionDenied):
    """The organisation lets nobody in who signs in with a password alone; a page sends the browser to set a code up."""

    code = "second_factor_needed"


class ForgedForm(PermissionDenied):
    """A form that is not from our own page."""

    code = "csrf"


class NotAllowed(PermissionDenied):
    """The role may not do this."""

    code = "role"


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """A signed-in person, looking at one organisation."""

    person: Person
    session: Session
    organisation: Organisation
    role: Role  # in that organisation; OPERATOR for operators
    member: Role | None  # in that organisation, also of operators
    places: Sequence[Place]  # where else the person may look, this one included

    @property
    def csrf(self) -> str:
        """Return what our forms and scripts send along: the session's secret, and which organisation they are about."""
        return f"{self.session.csrf}.{self.tenant}"

    @property
    def tenant(self) -> str:
        """Return the organisation's id."""
        return self.organisation.id

    @property
    def actor(self) -> str:
        """Return who is written into the record of changes."""
        return self.person.id

    def may(self, right: Right | str) -> bool:
        """Return whether this person may do something here."""
        return may(self.role, Right(right)) or (self.member is not None and may(self.member, Right(right)))


class Door:
    """Lets people in. Errors: SignInNeeded, NotAllowed, ForgedForm, DependencyDown."""

    def __init__(self, sessions: Sessions, people: People, transport: Transport) -> None:
        self.sessions = sessions
        self.people = people
        self.transport = transport

    async def enter(self, request: AnyRequest, right: Right = Right.READ) -> Visit:
        """Return the visit of a request.

        The organisation is the one in the query parameter `org`, so that links can be shared, else the one that the
        session looks at, else the first.
        """
        session = await self.session_of(request)
        arriving = await self.people.arriving(session.person_id) if session is not None else None
        if session is None or arriving is None or arriving[0].disabled:
            raise SignInNeeded("Sign in first.")
        who, places = arriving
        wanted = request.query_params.get("org", "")
        here = next((place for place in places if place.organisation.id == wanted), None)
        if wanted and here is None:
            raise NotAllowed("You are no member of this organisation.")
        if here is not None and request.method == "GET" and session.organisation_id != wanted:
            await self._look_at(request, session, wanted)  # so that the next page is about the same
        if here is None:
            here = next((place for place in places if place.organisation.id == session.organisation_id), None)
        if here is None and not places:
            raise NotAllowed("You are no member of any organisation. Ask for an invite.")
        here = here or places[0]
        check_factor(session, who, here.organisation)
        visit = Visit(
            person=who,
            session=session,
            organisation=here.organisation,
            role=here.role,
            member=here.member,
            places=places,
        )
        if not visit.may(right):
            raise NotAllowed(f"As {here.role} of {here.organisation.name} you may not do this.")
        return visit

    async def signed_in(self, request: AnyRequest) -> tuple[Session, Person]:
        """Return who is signed in, member of something or not. Raises SignInNeeded."""
        session = await self.session_of(request)
        who = await self.people.find(session.person_id) if session is not None else None
        if session is None or who is None or who.disabled:
            raise SignInNeeded("Sign in first.")
        return session, who

    async def form(self, request: AnyRequest, visit: Visit | Session | None = None) -> FormMultiDict:
        """Return the fields of a form of ours, of the visitor or of who is not signed in. Raises ForgedForm."""
        fields = await bodies.read_by(request.form(), timeout_s=bodies.FORM_S)
        self.check_csrf(request, visit, str(fields.get(CSRF_FIELD, "")))
        return fields

    def check_csrf(self, request: AnyRequest, visit: Visit | Session | None, given: str = "") -> None:
        """Check that a change comes from our own page: by its `csrf` field, `given`, or header. Raises ForgedForm."""
        origin = request.headers.get("origin")
        elsewhere = origin is not None and origin != self.transport.origin(request.scope)
        if elsewhere or request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise ForgedForm("This form comes from another site.")
        session = visit.session if isinstance(visit, Visit) else visit
        expected = session.csrf if session is not None else request.cookies.get(FORM_COOKIE, "")
        sent, _, about = (request.headers.get(CSRF_HEADER, "") or given).partition(".")
        if not expected or not hmac.compare_digest(expected.encode(), sent.encode()):
            raise ForgedForm("This form is too old. Go back, load the page again and repeat.")
        if isinstance(visit, Visit) and about and about != visit.tenant:  # a page of before, in another tab
            raise ForgedForm(f"You look at {visit.organisation.name} now. Load the page again and repeat.")

    async def session_of(self, request: AnyRequest) -> Session | None:
        """Return the session of a request, if it has one that lives."""
        token = request.cookies.get(SESSION_COOKIE, "")
        try:
            return await self.sessions.find(token)
        except (RedisError, OSError):
            raise DependencyDown("Sessions cannot be read right now.", retry_after_s=2) from None

    async def begin(self, request: AnyRequest, response: Response[Any], person_id: str, *, how: str) -> None:
        """Sign a person in: a new session, whatever token the browser had; the cookie goes into `response`."""
        try:
            token = await self.sessions.begin(person_id, how=how, replaces=request.cookies.get(SESSION_COOKIE, ""))
        except (RedisError, OSError):
            raise DependencyDown("Nobody can sign in right now.", retry_after_s=2) from None
        await self.people.signed_in(person_id, how=how, address=self.transport.address(request.scope))
        response.set_cookie(self.cookie(request, SESSION_COOKIE, token, max_age_s=ABSOLUTE_S))
        response.set_cookie(self.cookie(request, FORM_COOKIE, "", max_age_s=0))

    async def leave(self, request: AnyRequest, response: Response[Any], session: Session, *, everywhere: bool) -> None:
        """Sign a person out, here or everywhere."""
        if everywhere:
            await self.sessions.end_all(session.person_id)
        await self.sessions.end(request.cookies.get(SESSION_COOKIE, ""), session)
        response.set_cookie(self.cookie(request, SESSION_COOKIE, "", max_age_s=0))

    async def keep_only(self, request: AnyRequest, session: Session) -> None:
        """End every other session of a person: what they sign in with has changed."""
        try:
            await self.sessions.end_others(request.cookies.get(SESSION_COOKIE, ""), session.person_id)
        except (RedisError, OSError):
            raise DependencyDown("Other sessions cannot be ended right now.", retry_after_s=2) from None

    async def look_at(self, request: AnyRequest, visit: Visit, organisation_id: str) -> None:
        """Make the session look at another organisation. Raises NotAllowed."""
        if organisation_id not in {place.organisation.id for place in visit.places}:
            raise NotAllowed("You are no member of this organisation.")
        await self._look_at(request, visit.session, organisation_id)

    async def _look_at(self, request: AnyRequest, session: Session, organisation_id: str) -> None:
        try:
            await self.sessions.look_at(request.cookies.get(SESSION_COOKIE, ""), session, organisation_id)
        except (RedisError, OSError):
            raise DependencyDown("Sessions cannot be changed right now.", retry_after_s=2) from None

    def form_token(self, request: AnyRequest) -> tuple[str, Cookie | None]:
        """Return the secret for a form of who is not signed in, and the cookie to set if it is new."""
        known = request.cookies.get(FORM_COOKIE, "")
        if known:
            return known, None
        token = secrets.token_urlsafe(32)
        return token, self.cookie(request, FORM_COOKIE, token, max_age_s=ABSOLUTE_S)

    def cookie(self, request: AnyRequest, name: str, value: str, *, max_age_s: int) -> Cookie:
        """Return a cookie that scripts and other sites do not see; the pages' own ones go to the portal only."""
        return Cookie(
            key=name,
            value=value,
            path="/" if name == SESSION_COOKIE else HOME,
            max_age=max_age_s,
            httponly=True,
            secure=self.transport.cookies_are_secure(request.scope),
            samesite="lax",
        )


def check_factor(session: Session, who: Person, organisation: Organisation) -> None:
    """Raise SecondFactorNeeded where an organisation asks for a second factor and a password is all there is.

    Who comes from an OpenID provider has what the provider asks for.
    """
    if organisation.needs_second_factor and not who.has_second_factor and session.how != OPENID:
        raise SecondFactorNeeded(f"{organisation.name} asks for a second factor. Set one up for your account first.")


def safe_next(text: str | None) -> str:
    """Return where to go after signing in: a page of the portal and nothing else, whatever a link says."""
    if text is None or _INSIDE.fullmatch(text) is None or text.startswith("/portal/login"):
        return HOME
    return text
