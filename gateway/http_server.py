"""HTTP/1.1 on the gateway's own loop: uvicorn's protocol, and what a client may cost before a request is whole.

A server with threads of its own wakes two of them for each request, and again for each write
(decision 91).

1. A head is whole within `head_timeout_s` of the connection's beginning, or of the end of the answer before; else the
   connection is closed. It has `_MAX_HEADERS` headers and `_MAX_HEAD_BYTES` at most, beyond what one read brings.
2. An answer that breaks off, of a client that is too slow perhaps, ends the connection at once, whatever is unsent.
3. `stop` closes the port and idle connections; the others end with their answers. Cancelling `serve` ends them all.
"""

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, Final, cast

from litestar.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from contracts.beat import until_beat_s
from gateway.settings import Settings

_BACKLOG: Final = 1024
_MAX_CONNECTIONS: Final = 16_384
_MAX_HEADERS: Final = 128
_MAX_HEAD_BYTES: Final = 128 * 1024
_LONGEST_LOOK_S: Final = 1.0
_ENDED_POLL_S: Final = 0.02
_TOO_LARGE: Final = b"HTTP/1.1 431 \r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_NEVER: Final = float("inf")


class HttpServer:
    """Serves an application on the running loop: `serve` until it returns after `stop`, or is cancelled."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._address = settings.address
        self._head_timeout_s = settings.head_timeout_s
        self._stopped = asyncio.Event()
        self._state = ServerState()
        self._connections: set[_Connection] = set()
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
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=max(1, int(settings.head_timeout_s)),
        )
        self._config.load()
        self._second = 0

    async def serve(self) -> None:
        """Serve until `stop` was called and all connections have ended. Raises OSError when the port cannot be had."""
        host, port = self._address
        server = await asyncio.get_running_loop().create_server(
            self._connected, host, port, backlog=_BACKLOG, reuse_port=True
        )
        try:
            await self._watch_heads()
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

    async def _watch_heads(self) -> None:
        """Close connections that have been without a whole head for too long, until stopped."""
        loop = asyncio.get_running_loop()
        look_s = min(_LONGEST_LOOK_S, self._head_timeout_s / 2)
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(until_beat_s(look_s)):
                    await self._stopped.wait()
            except TimeoutError:
                since_s = loop.time() - self._head_timeout_s
                for connection in [c for c in self._connections if c.waits_since_s < since_s]:
                    connection.transport.abort()

    def _connected(self) -> "_Connection":
        return _Connection(self._config, self._state, self._connections, self._date)

    def _date(self) -> None:
        """Let answers carry the time, which is made once a second."""
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]


class _Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: Config, state: ServerState, peers: "set[_Connection]", date: Callable[[], None]) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._peers = peers
        self._date = date
        self._head_bytes: int | None = None  # of a head that began in an earlier read
        self._in_head = False
        self.waits_since_s = self.loop.time()  # for a head; never while a request is under way

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        self._peers.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._peers.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        if self._head_bytes is None:  # it began in this read, perhaps behind the body of a request before
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = None
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= _MAX_HEADERS:
            raise ValueError("too many headers")  # the parser gives up, and the client is told 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._date()
        self.waits_since_s = _NEVER
        self._in_head = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self.waits_since_s = self.loop.time()
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.waits_since_s = _NEVER

        async def run(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            finally:
                if cycle.response_started and not (cycle.response_complete or cycle.disconnected):
                    cycle.disconnected = True
                    self.transport.abort()

        super()._start_asgi_task(cycle, run)


def http_server(app: ASGIApp, settings: Settings) -> HttpServer:
    """Return a server for the application."""
    return HttpServer(app, settings)
