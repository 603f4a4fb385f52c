"""Which methods a path has: HEAD wherever there is GET, and `Allow` with every 405."""

from collections.abc import Sequence

from litestar import Litestar
from litestar.enums import ScopeType
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp, Message, Receive, Scope, Send


def answer_head(app: ASGIApp) -> ASGIApp:
    """Return `app` with HEAD answered as GET without its body (RFC 9110, section 9.3.2)."""

    async def with_head(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP or scope["method"] != "HEAD":
            await app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message["body"] = b""
            await send(message)

        # The server looks at its own scope for whether a body is due.
        await app({**scope, "method": "GET"}, receive, send_head)

    return with_head


def allowed_methods(app: Litestar, path: str) -> Sequence[str]:
    """Return the methods of a path, in alphabetical order; none when there is no such path."""
    parts = [part for part in path.split("/") if part]
    for route in app.routes:
        if isinstance(route, HTTPRoute) and _matches(route, parts):
            methods = {str(method) for method in route.methods}
            return sorted(methods | ({"HEAD"} if "GET" in methods else set()))
    return ()


def _matches(route: HTTPRoute, parts: Sequence[str]) -> bool:
    pattern = route.path_components
    rest = bool(pattern) and not isinstance(pattern[-1], str) and pattern[-1].full.endswith(":path")
    if len(parts) < len(pattern) if rest else len(parts) != len(pattern):
        return False
    return all(not isinstance(want, str) or want == got for want, got in zip(pattern, parts, strict=False))
