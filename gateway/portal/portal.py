"""The one place that builds the portal: its parts and its router."""

from collections.abc import Sequence

from litestar import Router
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.portal.door import Door
from gateway.portal.factors import Factors
from gateway.portal.links import Links
from gateway.portal.pages import Pages
from gateway.portal.passwords import Passwords, Tries
from gateway.portal.people import People
from gateway.portal.second_step import CodeStep, Steps, code_routes
from gateway.portal.sessions import Sessions
from gateway.portal.shelf import Shelf, shelf_routes
from gateway.portal.sign_in import SignIn, sign_in_routes
from gateway.portal.transport import Transport
from gateway.settings import Settings


class Portal:
    """The parts of the portal. Building it connects to nothing."""

    def __init__(self, settings: Settings, engine: AsyncEngine, redis: Redis) -> None:
        self.transport = Transport(allow_http=settings.allow_http, trusted_proxies=settings.trusted_proxies)
        self.people = People(engine)
        self.links = Links(engine)
        self.sessions = Sessions(redis, idle_s=settings.session_idle_s, absolute_s=settings.session_absolute_s)
        self.passwords = Passwords()
        self.door = Door(self.sessions, self.people, self.transport)
        self.shelf = Shelf()
        self.pages = Pages(self.door, self.shelf)
        openid, provider = None, ""
        if settings.openid_issuer:
            # Here and not at the top: without a provider nobody needs an HTTP client and signatures in memory.
            from gateway.portal.openid import OpenId  # noqa: PLC0415

            provider = settings.openid_name
            openid = OpenId(
                redis,
                self.people,
                issuer=settings.openid_issuer,
                client_id=settings.openid_client_id,
                client_secret=settings.openid_client_secret,
            )
        self.tries = Tries(redis)
        self.factors = Factors(engine)
        self.step = CodeStep(self.door, self.pages, self.factors, self.tries, Steps(redis))
        self.sign_in = SignIn(
            self.door,
            self.pages,
            self.links,
            self.passwords,
            self.tries,
            self.step,
            provider=provider,
            openid=openid,
        )

    def router(self, views: Sequence[HTTPRouteHandler]) -> Router:
        """Return every page, behind the guard of the transport. `views`: those of who is signed in."""

        def guard(app: ASGIApp) -> ASGIApp:  # a function: see Pages.error_handlers
            return self.transport.guard_pages(app)

        return Router(
            "/",
            route_handlers=[*views, *shelf_routes(self.shelf), *sign_in_routes(self.sign_in), *code_routes(self.step)],
            middleware=[guard],
            exception_handlers=self.pages.error_handlers(),
            include_in_schema=False,
        )

    def close(self) -> None:
        """Let its threads go."""
        self.passwords.close()
