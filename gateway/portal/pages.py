"""Rendering pages. Everything that comes from people or clients is escaped by Jinja; templates never mark it safe."""

from typing import Any, Final
from urllib.parse import quote

import structlog
from jinja2 import Environment, PackageLoader, StrictUndefined
from litestar import Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from contracts.errors import BadRequest, DependencyDown, NotFound, ServingError
from gateway.auth import DATABASE_ERRORS
from gateway.errors import error_headers
from gateway.portal.door import ACCOUNT, SIGN_IN, AnyRequest, Door, SecondFactorNeeded, SignInNeeded, Visit
from gateway.portal.figures import FILTERS
from gateway.portal.navigation import menu_of
from gateway.portal.sessions import Session
from gateway.portal.shelf import Shelf

log = structlog.get_logger()

_SEE_OTHER: Final = 303


class Pages:
    """Templates of the portal."""

    def __init__(self, door: Door, shelf: Shelf) -> None:
        self._door = door
        self.templates = Environment(
            loader=PackageLoader("gateway.portal"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.filters.update(FILTERS)
        self.templates.globals.update(menu=menu_of, asset=shelf.address)

    def page(
        self,
        request: AnyRequest,
        template: str,
        *,
        visit: Visit | None = None,
        session: Session | None = None,
        status: int = 200,
        **values: Any,
    ) -> Response[str]:
        """Return a page. Templates always have `visit`, `csrf`, `path` and `open_http`: plain http over a network.

        `session`: of who is signed in and may not visit anything yet.
        """
        cookie = None
        signed_in = visit or session
        if signed_in is not None:
            csrf = signed_in.csrf
        else:
            csrf, cookie = self._door.form_token(request)
        text = self.templates.get_template(template).render(
            visit=visit,
            csrf=csrf,
            path=request.url.path,
            open_http=self._door.transport.is_open(request.scope),
            **values,
        )
        response = Response(text, status_code=status, media_type="text/html")
        if cookie is not None:
            response.set_cookie(cookie)
        return response

    def go(self, request: AnyRequest, where: str) -> Response[str]:
        """Send the browser to another page of ours; HTMX follows by a header."""
        if request.headers.get("hx-request"):
            return Response("", status_code=204, headers={"hx-redirect": where}, media_type="text/html")
        return Response("", status_code=_SEE_OTHER, headers={"location": where}, media_type="text/html")

    def error_handlers(self) -> ExceptionHandlersMap:
        """Return what turns errors into pages: for the router of the portal.

        They are functions, since Litestar copies a router's parts deeply, and what a bound method is bound to with it.
        """

        def serving_error(request: AnyRequest, error: ServingError) -> Response[str]:
            return self._serving_error(request, error)

        def http_error(request: AnyRequest, error: HTTPException) -> Response[str]:
            return self._http_error(request, error)

        def database_error(request: AnyRequest, error: Exception) -> Response[str]:
            return self._database_error(request, error)

        def unexpected(request: AnyRequest, error: Exception) -> Response[str]:
            return self._unexpected(request, error)

        return {
            ServingError: serving_error,
            HTTPException: http_error,
            **dict.fromkeys(DATABASE_ERRORS, database_error),
            Exception: unexpected,
        }

    def _serving_error(self, request: AnyRequest, error: ServingError) -> Response[str]:
        if isinstance(error, SignInNeeded):
            here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            goes_back = request.method == "GET" and not request.headers.get("hx-request")
            return self.go(request, f"{SIGN_IN}?next={quote(here, safe='/')}" if goes_back else SIGN_IN)
        if isinstance(error, SecondFactorNeeded) and request.method == "GET":
            return self.go(request, ACCOUNT)
        response = self.page(request, "error.html", status=error.http_status, error=error)
        for name, value in error_headers(error).items():
            response.headers[name] = value
        return response

    def _http_error(self, request: AnyRequest, error: HTTPException) -> Response[str]:
        if error.status_code == 404:
            return self._serving_error(request, NotFound("There is no such page."))
        if error.status_code < 500:
            return self._serving_error(request, BadRequest(error.detail))
        return self._unexpected(request, error)

    def _database_error(self, request: AnyRequest, error: Exception) -> Response[str]:
        log.warning("database_unavailable", path=request.url.path, error=str(error))
        return self._serving_error(request, DependencyDown("The database does not answer right now.", retry_after_s=2))

    def _unexpected(self, request: AnyRequest, error: Exception) -> Response[str]:
        log.error("page_failed", path=request.url.path, exc_info=error)
        return self._serving_error(request, ServingError("The server failed on this page. It was noted."))
