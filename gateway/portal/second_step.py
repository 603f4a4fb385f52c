"""The step between a right password and a session: a one-time code, for who has a second factor.

1. `Steps.begin` keeps who gave the right password, under the hash of a random token that the browser has in a cookie,
   for five minutes. It opens nothing but the page that asks for the code.
2. Codes are counted per person before they are looked at: five in a quarter of an hour, wherever they come from.
3. A right one ends the step and begins a session.
"""

import hashlib
import secrets
from typing import Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys
from contracts.errors import DependencyDown, RateLimited
from gateway.portal.door import ACCOUNT, SIGN_IN, AnyRequest, Door
from gateway.portal.factors import BY_CODE, Factors
from gateway.portal.pages import Pages
from gateway.portal.passwords import Tries

CODE_PAGE: Final = "/portal/login/code"
STEP_COOKIE: Final = "pdgate_step"
STEP_S: Final = 300


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who gave the right password, or used a link, and owes a code."""

    person_id: str
    how: str  # password | link
    following: str  # page to go to


class Steps:
    """Sign-ins that wait for a code. Errors: RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def begin(self, waiting: Waiting) -> str:
        """Return the token of a step."""
        token = secrets.token_urlsafe(32)
        await self._redis.set(keys.second_step(_hash(token)), msgspec.msgpack.encode(waiting), ex=STEP_S)
        return token

    async def find(self, token: str) -> Waiting | None:
        """Return who waits under a token."""
        raw: Any = await self._redis.get(keys.second_step(_hash(token))) if token else None
        return msgspec.msgpack.decode(raw, type=Waiting) if raw else None

    async def end(self, token: str) -> bool:
        """Use a step up; False when somebody else did."""
        return bool(await self._redis.delete(keys.second_step(_hash(token))))


class CodeStep:
    """What the page that asks for a code does, and the way in for who needs none."""

    def __init__(self, door: Door, pages: Pages, factors: Factors, tries: Tries, steps: Steps) -> None:
        self._door = door
        self._pages = pages
        self._factors = factors
        self._tries = tries
        self._steps = steps

    async def let_in(self, request: AnyRequest, person_id: str, *, how: str, following: str) -> Response[str]:
        """Sign a person in, or ask for the code first where they have a second factor."""
        if not await self._factors.in_force(person_id):
            response = self._pages.go(request, following)
            await self._door.begin(request, response, person_id, how=how)
            return response
        try:
            token = await self._steps.begin(Waiting(person_id=person_id, how=how, following=following))
        except (RedisError, OSError):
            raise DependencyDown("Nobody can sign in right now.", retry_after_s=2) from None
        response = self._pages.go(request, CODE_PAGE)
        response.set_cookie(self._door.cookie(request, STEP_COOKIE, token, max_age_s=STEP_S))
        return response

    async def show(self, request: AnyRequest, *, problem: str = "", status: int = 200) -> Response[str]:
        """Return the page that asks for a code; without a step, the way back to the sign-in."""
        if await self._waiting(request) is None:
            return self._pages.go(request, SIGN_IN)
        return self._pages.page(request, "code.html", status=status, problem=problem)

    async def take(self, request: AnyRequest) -> Response[str]:
        """Sign in with a code."""
        fields = await self._door.form(request)
        waiting = await self._waiting(request)
        if waiting is None:
            return self._pages.go(request, SIGN_IN)
        try:
            how = await self._checked(waiting.person_id, str(fields.get("code", "")))
        except RateLimited as error:
            response = await self.show(request, problem=error.message, status=429)
            response.headers["retry-after"] = str(int(error.retry_after_s or 1))
            return response
        if how is None:
            return await self.show(request, problem="This code is wrong, was used, or is too old.", status=401)
        if not await self._steps.end(request.cookies.get(STEP_COOKIE, "")):
            return self._pages.go(request, SIGN_IN)
        response = self._pages.go(request, waiting.following if how == BY_CODE else ACCOUNT)
        response.set_cookie(self._door.cookie(request, STEP_COOKIE, "", max_age_s=0))
        await self._door.begin(request, response, waiting.person_id, how=f"{waiting.how}+{how}")
        return response

    async def _waiting(self, request: AnyRequest) -> Waiting | None:
        try:
            return await self._steps.find(request.cookies.get(STEP_COOKIE, ""))
        except (RedisError, OSError):
            raise DependencyDown("Nobody can sign in right now.", retry_after_s=2) from None

    async def _checked(self, person_id: str, code: str) -> str | None:
        """Return by what a code was right. Raises RateLimited, DependencyDown."""
        try:
            await self._tries.count_code(person_id)
            how = await self._factors.check(person_id, code)
            if how is not None:
                await self._tries.forget_codes(person_id)
        except (RedisError, OSError):
            raise DependencyDown("Nobody can sign in right now.", retry_after_s=2) from None
        return how


def code_routes(step: CodeStep) -> list[HTTPRouteHandler]:
    """Return the handlers of the page that asks for a code."""

    @get(CODE_PAGE)
    async def show_code_page(request: Request[Any, Any, Any]) -> Response[str]:
        """Ask for a one-time code."""
        return await step.show(request)

    @post(CODE_PAGE)
    async def sign_in_by_code(request: Request[Any, Any, Any]) -> Response[str]:
        """Sign in with it."""
        return await step.take(request)

    return [show_code_page, sign_in_by_code]


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
