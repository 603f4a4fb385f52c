"""HTTP/1.1 on the gateway's own loop, and what a client may cost before a request is whole.

A server with threads of its own wakes two of them for each request, and again for each write
(decision 91).

1. A head is whole within `head_timeout_s` of the connection's beginning, or of the end of the answer before; else the
   connection is closed. So it is when its client takes nothing of an answer for `stuck_s`.
2. There are `_MAX_CONNECTIONS`, or what the process' open files allow. Some more are answered 503, others closed.
3. `stop` closes the port and idle connections; the others end with their answers. Cancelling `serve` ends them all.
"""

import asyncio
import resource
import socket
import time
from email.utils import formatdate
from typing import Any, Final, cast

from litestar.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from contracts.beat import until_beat_s
from gateway.connections import Connection
from gateway.settings import Settings
from gateway.writer import SEND_S

_BACKLOG: Final = 1024
_MAX_CONNECTIONS: Final = 16_384
_REFUSED_AT_ONCE: Final = 256  # connections beyond, which are told so
_OTHER_FILES: Final = 512  # open for other things than connections
_LONGEST_LOOK_S: Final = 1.0
_ENDED_POLL_S: Final = 0.02


class HttpServer:
    """Serves an application on the running loop: `serve` until it returns after `stop`, or is cancelled."""

    def __init__(
        self,
        app: ASGIApp,
        address: tuple[str, int],
        *,
        head_timeout_s: float,
        stuck_s: float = SEND_S,
        max_connections: int = _MAX_CONNECTIONS,
    ) -> None:
        self._address = address
        self._head_timeout_s = head_timeout_s
        self._stuck_s = stuck_s
        self._max_connections = max_connections
        self._stopped = asyncio.Event()
        self._state = ServerState()
        self._connections: set[Connection] = set()
        self._config = Config(
            cast("Any", app),  # Litestar and uvicorn have types of their own for the same protocol
            loop="none",
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # a bad request is its client's business, and our faults are logged by the edge
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, int(head_timeout_s)),
        )
        self._config.load()
        self._second = 0

    async def serve(self) -> None:
        """Serve until `stop` was called and all connections have ended. Raises OSError when the port cannot be had."""
        server = await self._listen()
        try:
            await self._watch()
            server.close()
            for connection in list(self._connections):
                connection.shutdown()
            while self._connections or self._state.tasks:  # noqa: ASYNC110 - uvicorn tells nobody
                await asyncio.sleep(_ENDED_POLL_S)
        finally:
            server.close()
            for connection in list(self._connections):
                connection.transport.abort()

    def stop(self) -> None:
        """Take no more connections, and let `serve` return when those that are there have ended."""
        self._stopped.set()

    @property
    def num_connections(self) -> int:
        """Connections that are there, idle ones included."""
        return len(self._connections)

    async def _listen(self) -> asyncio.Server:
        host, port = self._address
        loop = asyncio.get_running_loop()
        if host == "::" and socket.has_dualstack_ipv6():  # every address, those of IPv4 too
            both = socket.create_server(
                (host, port), family=socket.AF_INET6, backlog=_BACKLOG, reuse_port=True, dualstack_ipv6=True
            )
            return await loop.create_server(self._connected, sock=both, backlog=_BACKLOG)
        return await loop.create_server(self._connected, host, port, backlog=_BACKLOG, reuse_port=True)

    async def _watch(self) -> None:
        """Close connections whose clients are too slow, until stopped."""
        loop = asyncio.get_running_loop()
        look_s = min(_LONGEST_LOOK_S, self._head_timeout_s / 2, self._stuck_s / 2)
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(until_beat_s(look_s)):
                    await self._stopped.wait()
            except TimeoutError:
                now_s = loop.time()
                for connection in list(self._connections):
                    if connection.is_overdue(now_s, head_timeout_s=self._head_timeout_s, stuck_s=self._stuck_s):
                        connection.transport.abort()

    def _connected(self) -> asyncio.Protocol:
        num_beyond = len(self._connections) - self._max_connections
        if num_beyond >= _REFUSED_AT_ONCE:
            return _Closed()
        return Connection(self._config, self._state, self._connections, self._date, refuses=num_beyond >= 0)

    def _date(self) -> None:
        """Let answers carry the time, which is made once a second."""
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]


class _Closed(asyncio.Protocol):
    """A connection that is not taken."""

    def connection_made(self, transport: Any) -> None:
        transport.abort()


def http_server(app: ASGIApp, settings: Settings) -> HttpServer:
    """Return a server for the application."""
    return HttpServer(
        app,
        settings.address,
        head_timeout_s=settings.head_timeout_s,
        max_connections=_most_connections(),
    )


def _most_connections() -> int:
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(_MAX_CONNECTIONS, max(max_files // 4, max_files - _OTHER_FILES))
