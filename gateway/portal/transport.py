"""What is around every page: no plain http but on this machine, strict headers, nothing kept by caches."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Final

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.scopes import client_address, forwarded, within

CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=()",
}
_HSTS: Final = "max-age=31536000"
_REFUSAL: Final = (
    b"This page is not served over plain http, since passwords and sessions could be read on the way. Use https, or"
    b" open it on the machine itself as http://localhost. GATEWAY_ALLOW_HTTP=1 allows plain http everywhere.\n"
)


class Transport:
    """How requests come in: over TLS or not, and from where."""

    def __init__(self, *, allow_http: bool, trusted_proxies: Sequence[str]) -> None:
        """`trusted_proxies`: networks whose `x-forwarded-for` and `x-forwarded-proto` are believed."""
        self._allow_http = allow_http
        self._trusted = trusted_proxies

    def is_https(self, scope: Scope) -> bool:
        """Return whether the browser's connection is encrypted."""
        if scope["scheme"] == "https":
            return True
        proto = forwarded(scope["headers"], b"x-forwarded-proto").rsplit(",", 1)[-1].strip()
        return proto == "https" and within(_peer(scope), self._trusted)

    def address(self, scope: Scope) -> str:
        """Return the address of the browser."""
        return client_address(_peer(scope), forwarded(scope["headers"]), self._trusted)

    def cookies_are_secure(self, scope: Scope) -> bool:
        """Return whether cookies are `Secure`: browsers take such ones over https, and from this machine."""
        return self.is_https(scope) or is_local(_header(scope, b"host"))

    def is_open(self, scope: Scope) -> bool:
        """Return whether the page comes over a network in plain text, which only GATEWAY_ALLOW_HTTP allows."""
        return not self.cookies_are_secure(scope)

    def origin(self, scope: Scope) -> str:
        """Return the origin of our own pages, as the browser sees it."""
        return f"{'https' if self.is_https(scope) else 'http'}://{_header(scope, b'host')}"

    def guard_pages(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with the headers of every page, refusing plain http. Litestar middleware."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if self.is_open(scope) and not self._allow_http:
                await _refuse(send)
                return
            await app(scope, receive, _with_headers(send, https=self.is_https(scope)))

        return guarded


def is_local(host: str) -> bool:
    """Return whether a `Host` header names this machine."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _with_headers(send: Send, *, https: bool) -> Send:
    added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    if https:
        added.append((b"strict-transport-security", _HSTS.encode()))

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {bytes(name).lower() for name, _ in message["headers"]}
            fresh = [*added, (b"cache-control", b"no-store")]
            message["headers"] = [*message["headers"], *(pair for pair in fresh if pair[0] not in given)]
        await send(message)

    return send_with_headers


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(_REFUSAL)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSAL, "more_body": False})


def _peer(scope: Scope) -> str:
    client = scope["client"]
    return client[0] if client else ""


def _header(scope: Scope, wanted: bytes) -> str:
    for name, value in scope["headers"]:
        if name == wanted:
            return value.decode("latin-1")
    return ""
