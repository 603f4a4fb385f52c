"""One HTTP/1 connection: uvicorn's protocol over httptools, and what is otherwise where it is not enough.

1. A head has `_MAX_HEADERS` headers and `_MAX_HELD_BYTES` at most, beyond what one read brings; so has what comes in
   a body besides it, as trailers do. Trailers are read and forgotten: who sends one may not be who wrote the headers.
2. A wish to speak another protocol is ignored. The body of such a request is read as any.
3. Answers come in the order of requests. What cannot be read ends the connection behind the answers that are due.
4. Who is answered while it still sends its body is read on before the connection is closed: a reset would reach it
   before the answer.
5. An answer that breaks off ends the connection at once, whatever is unsent. A client that leaves is told to all
   requests of its connection.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Final

import httptools
import msgspec
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from contracts.errors import NoCapacity, openai_body
from gateway.errors import error_headers

log = structlog.get_logger()

_MAX_HEADERS: Final = 128
_MAX_HELD_BYTES: Final = 128 * 1024
_MAX_PIPELINED: Final = 16
_FRAMING: Final = frozenset((b"content-length", b"transfer-encoding"))
_ALWAYS_ANSWERED: Final = "/livez"  # who restarts a full process breaks what runs in it
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_NEVER: Final = float("inf")

Send = Callable[[Any], Coroutine[Any, Any, None]]


class Connection(HttpToolsProtocol):
    """See the module's docstring. `refuses`: all requests are answered with 503."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        peers: "set[Connection]",
        date: Callable[[], None],
        *,
        refuses: bool = False,
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._peers = peers
        self._date = date
        self._refuses = refuses
        self._held_bytes = 0  # read since something was complete that is kept elsewhere
        self._moved = False
        self._in_head = False
        self._muted = False  # while the parser is told what it knew already
        self._deaf = False
        self.lingers = False  # the last answer is out, and the body of its request is not
        self._answered: RequestResponseCycle | None = None  # the latest request that was begun to be answered
        self._unsent_bytes = 0
        self._stuck_since_s = self.loop.time()
        self.waits_since_s = self._stuck_since_s  # for a head; never while a request is under way

    def is_overdue(self, now_s: float, *, head_timeout_s: float, stuck_s: float) -> bool:
        """Return whether a head is missing for too long, or the client takes nothing of what is unsent."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes:
            self._unsent_bytes = unsent_bytes
            self._stuck_since_s = now_s
        if unsent_bytes:
            if self.waits_since_s != _NEVER:
                self.waits_since_s = now_s  # the answer before is still being read
            return now_s - self._stuck_since_s > stuck_s
        return now_s - self.waits_since_s > head_timeout_s

    # -- the transport calls ------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self._peers.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the requests that nobody waits for them."""
        self._peers.discard(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        answered = self._answered
        if answered is not None and not answered.response_complete:  # uvicorn tells only the latest that came
            answered.disconnected = True
            answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._unset_keepalive_if_required()
        if self._deaf:
            return
        self._moved = False
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._break_off(lambda: self.send_400_response("Invalid HTTP request received."))
            return
        if self._moved:
            self._held_bytes = 0
            return
        self._held_bytes += len(data)
        if self._held_bytes > _MAX_HELD_BYTES:
            self._break_off(self._say_too_large)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._stay_with_http()
            else:
                return

    def _stay_with_http(self) -> None:
        """Have the body read of a request that wants another protocol: the parser takes the request to be over."""
        self.parser = httptools.HttpRequestParser(self)
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self._muted = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        self._muted = False
        if not framing:
            super().on_message_complete()

    def _break_off(self, answer: Callable[[], None]) -> None:
        """End the connection, since nothing more can be read of it; say why if that is the next answer due."""
        if self.transport.is_closing():
            return
        due, latest = self._answered, self.cycle
        if due is None or due.response_complete or (latest is due and due.more_body and not due.response_started):
            answer()
        elif latest is due and due.more_body:
            self.transport.close()
        else:  # those that are whole are answered
            if latest.more_body:
                self.pipeline.popleft()
                latest = self.cycle = self.pipeline[0][0] if self.pipeline else due
            latest.keep_alive = False
            self._deaf = True

    def _say_too_large(self) -> None:
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    # -- the parser calls ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a head."""
        if self._muted:
            return
        if self.lingers or len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests")  # what becomes of it: see `_break_off`
        self._in_head = self._moved = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; forget a trailer."""
        if not self._in_head:
            return
        if len(self.headers) >= _MAX_HEADERS:
            raise ValueError("too many headers")  # the parser gives up, and the client is told 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request, or put it behind the one before."""
        if self._muted:
            return
        if self.parser.get_http_version() not in ("1.1", "1.0"):
            raise ValueError("no such version")
        self._date()
        self.waits_since_s = _NEVER
        self._in_head = False
        self._moved = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a body. That of an upgrade is yet to come, whatever the parser says."""
        if not (self._muted or self.parser.should_upgrade()):
            self._moved = True
            super().on_message_complete()
            if self.lingers and self.cycle.response_complete:
                self.transport.close()

    # -- the application answers --------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Begin the next request, or wait for its head."""
        self.waits_since_s = self.loop.time()
        if self.lingers and not self.cycle.more_body:
            self.transport.close()
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.waits_since_s = _NEVER
        self._answered = cycle
        if self._refuses and cycle.scope["path"] != _ALWAYS_ANSWERED:
            app, cycle.keep_alive = _refuse, False

        async def run(scope: Any, receive: Any, send: Any) -> None:
            if cycle.waiting_for_100_continue or not cycle.keep_alive:
                send = _careful(self, cycle, send)
            try:
                await app(scope, receive, send)
            except Exception:
                if not (cycle.disconnected or self.transport.is_closing()):
                    log.exception("request_failed", path=scope["path"])
                raise
            finally:
                if cycle.response_started and not (cycle.response_complete or cycle.disconnected):
                    cycle.disconnected = True
                    self.transport.abort()

        super()._start_asgi_task(cycle, run)


def _careful(connection: Connection, cycle: RequestResponseCycle, send: Send) -> Send:
    """Return `send` for a request that is the connection's last, or may become it.

    A client of HTTP/1.0 knows no chunks. One that is answered without the leave that it waits for may send its body or
    its next request: nobody can tell which.
    """
    until_closed = False

    async def careful(message: Any) -> None:
        nonlocal until_closed
        if message["type"] != "http.response.start":
            if until_closed:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)
            return
        unasked = cycle.waiting_for_100_continue
        cycle.keep_alive = cycle.keep_alive and not unasked
        names = {name.lower() for name, _ in message.get("headers", ())}
        if cycle.scope["http_version"] == "1.0" and b"content-length" not in names:
            until_closed = True
            cycle.chunked_encoding = False
        await send(message)
        if cycle.more_body and not (cycle.keep_alive or unasked):
            connection.lingers = cycle.keep_alive = True

    return careful


async def _refuse(_scope: Any, _receive: Any, send: Send) -> None:
    error = NoCapacity("This gateway has all the connections that it can hold.", retry_after_s=1)
    body = msgspec.json.encode(openai_body(error))
    headers = {
        **error_headers(error),
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.http_status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
