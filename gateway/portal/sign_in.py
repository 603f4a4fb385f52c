"""The pages at which people come in and leave: sign in, sign out, one-time links."""

from typing import TYPE_CHECKING, Any, Final

from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from redis.exceptions import RedisError

from contracts.errors import BadRequest, DependencyDown, NotFound, RateLimited
from gateway.portal.door import FORM_COOKIE, HOME, SIGN_IN, Door, safe_next
from gateway.portal.links import INVITE, RESET, Link, Links
from gateway.portal.pages import Pages
from gateway.portal.passwords import Passwords, Tries
from gateway.portal.people import Person
from gateway.portal.second_step import CodeStep
from gateway.portal.sessions import OPENID

if TYPE_CHECKING:
    from gateway.portal.openid import OpenId

_WORDS: Final = {
    "invite": ("Join", "Join"),
    "reset": ("New password", "Set the password"),
    "sign_in": ("Sign in", "Sign in"),
}

BACK: Final = "/portal/login/openid/callback"

AnyRequest = Request[Any, Any, Any]


class SignIn:
    """What the sign-in pages do."""

    def __init__(
        self,
        door: Door,
        pages: Pages,
        links: Links,
        passwords: Passwords,
        tries: Tries,
        step: CodeStep,
        *,
        provider: str = "",
        openid: "OpenId | None" = None,
    ) -> None:
        """`provider`: name of the OpenID provider; empty = none."""
        self.door = door
        self.pages = pages
        self._links = links
        self._passwords = passwords
        self._tries = tries
        self._step = step
        self._provider = provider
        self._openid = openid

    def show(
        self, request: AnyRequest, *, following: str, email: str = "", problem: str = "", status: int = 200
    ) -> Response[str]:
        """Return the sign-in page."""
        return self.pages.page(
            request,
            "login.html",
            status=status,
            next=following,
            email=email,
            problem=problem,
            provider=self._provider,
        )

    async def by_password(self, request: AnyRequest) -> Response[str]:
        """Sign in with e-mail and password."""
        fields = await self.door.form(request)
        email = str(fields.get("email", "")).strip().lower()
        password = str(fields.get("password", ""))
        following = safe_next(str(fields.get("next", "")))
        address = self.door.transport.address(request.scope)
        try:
            await self._tries.count(email, address)
        except RateLimited as error:
            response = self.show(request, following=following, email=email, problem=error.message, status=429)
            response.headers["retry-after"] = str(int(error.retry_after_s or 1))
            return response
        except (RedisError, OSError):
            raise DependencyDown("Nobody can sign in right now.", retry_after_s=2) from None
        found = await self.door.people.password_of(email)
        who, stored = found if found is not None else (None, None)
        right = await self._passwords.matches(stored, password)
        if who is None or not right or who.disabled:
            words = "E-mail or password is wrong."
            return self.show(request, following=following, email=email, problem=words, status=401)
        await self._tries.forget(email, address)
        return await self._step.let_in(request, who.id, how="password", following=following)

    async def go_to_provider(self, request: AnyRequest) -> Response[str]:
        """Send the browser to the OpenID provider."""
        openid = self._provided()
        browser, cookie = self.door.form_token(request)
        where = await openid.begin(
            browser=browser,
            following=safe_next(request.query_params.get("next")),
            redirect_uri=f"{self.door.transport.origin(request.scope)}{BACK}",
        )
        response = self.pages.go(request, where)
        if cookie is not None:
            response.set_cookie(cookie)
        return response

    async def come_back(self, request: AnyRequest) -> Response[str]:
        """Sign in who comes back from the provider."""
        given = request.query_params
        if not given.get("code"):
            raise BadRequest("The provider did not sign you in.")
        browser = request.cookies.get(FORM_COOKIE, "")
        who, following = await self._provided().end(state=given.get("state", ""), code=given["code"], browser=browser)
        response = self.pages.go(request, following)
        await self.door.begin(request, response, who.id, how=OPENID)
        return response

    def _provided(self) -> "OpenId":
        if self._openid is None:
            raise NotFound("There is no such page.")
        return self._openid

    async def show_link(
        self, request: AnyRequest, token: str, *, problem: str = "", status: int = 200
    ) -> Response[str]:
        """Return the page behind a one-time link; looking at it does not use it."""
        found = await self._open(token)
        known = await self._known(found)
        if known is not None and not await self._is_signed_in(request, known):
            return self.pages.go(request, f"{SIGN_IN}?next=/portal/invite/{token}")
        heading, action = _WORDS[found.kind]
        return self.pages.page(
            request,
            "link.html",
            status=status,
            link=found,
            token=token,
            known=known is not None,
            heading=heading,
            action=action,
            problem=problem,
        )

    async def use_link(self, request: AnyRequest, token: str) -> Response[str]:
        """Do what a one-time link is for, once."""
        fields = await self.door.form(request)
        password = str(fields.get("password", ""))
        found = await self._open(token)
        try:
            person_id = await self._use(request, found, token, password=password, name=str(fields.get("name", "")))
        except BadRequest as error:
            return await self.show_link(request, token, problem=error.message, status=400)
        session = await self.door.session_of(request)
        if session is not None and session.person_id == person_id:  # an invite of somebody who is signed in
            return self.pages.go(request, HOME)
        return await self._step.let_in(request, person_id, how="link", following=HOME)

    async def _use(self, request: AnyRequest, found: Link, token: str, *, password: str, name: str) -> str:
        if found.kind == RESET:
            person_id = await self._links.use_reset(token, await self._passwords.hash(password))
            await self.door.sessions.end_all(person_id)
            return person_id
        if found.kind == INVITE:
            known = await self._known(found)
            if known is None:
                hashed = await self._passwords.hash(password)
                return (await self._links.accept_as_new(token, email="", name=name, password_hash=hashed)).id
            if not await self._is_signed_in(request, known):
                raise NotFound("Sign in with the account that this invite is for, then open the link again.")
            await self._links.accept_as(token, known)
            return known.id
        return await self._links.use_sign_in(token)

    async def _open(self, token: str) -> Link:
        found = await self._links.find(token)
        if found is None:
            raise NotFound("This link was used, was withdrawn, or has expired. Ask for a new one.")
        return found

    async def _known(self, found: Link) -> Person | None:
        """Return the person that an invite is for, when there is one: a link alone must not open an account."""
        return await self.door.people.find_by_email(found.email) if found.kind == INVITE else None

    async def _is_signed_in(self, request: AnyRequest, who: Person) -> bool:
        session = await self.door.session_of(request)
        return session is not None and session.person_id == who.id


def sign_in_routes(sign_in: SignIn) -> list[HTTPRouteHandler]:
    """Return the handlers of the pages at which people come in and leave."""

    @get("/portal/login")
    async def show_sign_in(request: AnyRequest) -> Response[str]:
        """Show the sign-in page, or go on when somebody is signed in."""
        following = safe_next(request.query_params.get("next"))
        if await sign_in.door.session_of(request) is not None:
            return sign_in.pages.go(request, following)
        return sign_in.show(request, following=following)

    @post("/portal/login")
    async def sign_in_by_password(request: AnyRequest) -> Response[str]:
        """Sign in."""
        return await sign_in.by_password(request)

    @get("/portal/login/openid")
    async def go_to_provider(request: AnyRequest) -> Response[str]:
        """Go to the OpenID provider."""
        return await sign_in.go_to_provider(request)

    @get(BACK)
    async def come_back(request: AnyRequest) -> Response[str]:
        """Come back from the OpenID provider."""
        return await sign_in.come_back(request)

    @post("/portal/logout")
    async def sign_out(request: AnyRequest) -> Response[str]:
        """Sign out, everywhere when the form says so."""
        session, _ = await sign_in.door.signed_in(request)
        fields = await sign_in.door.form(request, session)
        response = sign_in.pages.go(request, SIGN_IN)
        await sign_in.door.leave(request, response, session, everywhere=bool(fields.get("everywhere")))
        return response

    @post("/portal/organisation")
    async def look_at_organisation(request: AnyRequest) -> Response[str]:
        """Look at another organisation."""
        visit = await sign_in.door.enter(request)
        fields = await sign_in.door.form(request, visit.session)
        await sign_in.door.look_at(request, visit, str(fields.get("organisation", "")))
        return sign_in.pages.go(request, HOME)

    @get("/portal/invite/{token:str}")
    async def show_link(request: AnyRequest, token: FromPath[str]) -> Response[str]:
        """Show what a one-time link is for."""
        return await sign_in.show_link(request, token)

    @post("/portal/invite/{token:str}")
    async def use_link(request: AnyRequest, token: FromPath[str]) -> Response[str]:
        """Use a one-time link."""
        return await sign_in.use_link(request, token)

    return [
        show_sign_in,
        sign_in_by_password,
        go_to_provider,
        come_back,
        sign_out,
        look_at_organisation,
        show_link,
        use_link,
    ]
