"""A frugal HTTP/1.1 client whose clock stops where bytes arrive.

A load generator is on the token path of everything it measures: what it spends on a chunk it adds to the next one.
So a response is read in the transport's own callback, with one clock reading per read, and nothing is decoded but
the framing of the body.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import msgspec

_MAX_HEAD: Final = 65_536
_NO_BODY: Final = frozenset({204, 304})


class WireError(Exception):
    """The connection or its framing failed; the message says how."""


class Sink(Protocol):
    """Who takes a response. Times are of the event loop's clock, seconds."""

    def head(self, status: int, at_s: float) -> None:
        """Take the status, when the head is complete."""

    def data(self, payload: bytes, at_s: float) -> None:
        """Take some bytes of the body."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go."""

    host: str
    port: int
    path: str  # in front of every path, without a slash at its end
    secure: bool

    @property
    def authority(self) -> str:
        """The Host header."""
        usual = 443 if self.secure else 80
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == usual else f"{host}:{self.port}"


def target_of(url: str) -> Target:
    """Return the parts of a base URL; `/v1` at its end is left away.

    Raises:
        ValueError: not an http(s) URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not like http://host:port")
    secure = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Target(host=parts.hostname, port=parts.port or (443 if secure else 80), path=path, secure=secure)


class Framing:
    """Takes the bytes after a head and gives those of the body."""

    def __init__(self, *, length: int | None, chunked: bool) -> None:
        self._left = length if length is not None else -1  # of the body or of the chunk; -1 = until the end
        self._chunked = chunked
        self._rest = b""
        if chunked:
            self._left = 0
        self.done = not chunked and length == 0

    def feed(self, data: bytes) -> bytes:
        """Return the payload in `data`. Raises WireError for a chunk size that is none."""
        if self._chunked:
            return self._dechunked(data)
        if self._left < 0:
            return data
        payload = data[: self._left]
        self._left -= len(payload)
        self.done = self._left == 0
        return payload

    def _dechunked(self, data: bytes) -> bytes:
        data = self._rest + data
        parts: list[bytes] = []
        at = 0
        while not self.done:
            if self._left > 2:  # of the chunk, its line end included
                parts.append(data[at : at + self._left - 2])
                at += len(parts[-1])
                self._left -= len(parts[-1])
            gone = min(self._left, len(data) - at)
            at += gone
            self._left -= gone
            end = data.find(b"\r\n", at)
            if self._left or end < 0:
                break
            size = _chunk_size(data[at:end])
            if size:
                at = end + 2
                self._left = size + 2
            elif data.find(b"\r\n\r\n", end) < 0:  # trailers, if any, end with an empty line
                break
            self.done = size == 0
        self._rest = data[at:]
        return b"".join(parts)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.split(b";", 1)[0], 16)
    except ValueError:
        raise WireError(f"bad chunk size {line[:20]!r}") from None


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._framing: Framing | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._keep = True
        self.answered = False  # whether any byte of the present response has come

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    @property
    def usable(self) -> bool:
        """Whether another request may be sent on it."""
        return self._keep and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Send a request and give its response to `sink`. Raises WireError."""
        assert self._transport is not None
        self._head, self._framing, self._sink, self.answered = b"", None, sink, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            if not self._done.done() or self._done.cancelled() or self._done.exception():
                self.close()
            self._sink = None

    def data_received(self, data: bytes) -> None:
        """Read the head, then the body."""
        now_s = self._clock_s()
        self.answered = True
        if self._sink is None:  # after the end, or unasked
            self._keep = False
            return
        try:
            if self._framing is None:
                self._head += data
                end = self._head.find(b"\r\n\r\n")
                if end < 0:
                    if len(self._head) > _MAX_HEAD:
                        self._fail(WireError("the head of the response is too long"))
                    return
                data = self._head[end + 4 :]
                self._framing = self._open(self._head[:end], self._sink, now_s)
            payload = self._framing.feed(data)
        except WireError as error:
            self._fail(error)
            return
        if payload:
            self._sink.data(payload, now_s)
        if self._framing.done:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a body that lasts until the end, or fail the request."""
        self._keep = False
        until_end = self._framing is not None and self._framing._left < 0  # noqa: SLF001 (same module)
        if until_end and exc is None:
            self._finish()
        else:
            self._fail(WireError("the connection was closed" + (f": {exc}" if exc else "")))

    def close(self) -> None:
        """Close at once."""
        self._keep = False
        if self._transport is not None:
            self._transport.abort()

    def _open(self, head: bytes, sink: Sink, now_s: float) -> Framing:
        lines = head.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise WireError(f"not an HTTP/1.1 response: {lines[0][:40]!r}")
        status = int(rest[:3])
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        self._keep = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length: int | None = int(headers["content-length"]) if headers.get("content-length", "").isdigit() else None
        sink.head(status, now_s)
        return Framing(length=0 if status in _NO_BODY else length, chunked=chunked)

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: WireError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Connections:
    """Kept-alive connections to one target; as many as there are requests at once."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.secure else None

    async def send(self, request: bytes, sink: Sink) -> None:
        """Send a request and give its response to `sink`.

        A kept connection that the server closed in the meantime, before a byte of the answer, is replaced once.

        Raises:
            WireError: no connection, or it broke.
        """
        while self._idle:
            kept = self._idle.pop()
            if not kept.usable:
                continue
            try:
                await self._on(kept, request, sink)
            except WireError:
                if kept.answered:
                    raise
                break
            return
        await self._on(await self._connect(), request, sink)

    async def _on(self, connection: Connection, request: bytes, sink: Sink) -> None:
        await connection.exchange(request, sink)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(loop.time), self.target.host, self.target.port, ssl=self._tls
            )
        except OSError as error:
            raise WireError(f"no connection to {self.target.authority}: {error}") from None
        return connection

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
