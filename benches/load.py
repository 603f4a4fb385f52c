"""A frugal streaming client: keep-alive HTTP/1.1 connections, SSE read as bytes, clocks per stream.

It parses only what it must (chunk borders are never looked at: an SSE event ends in a blank line
inside one chunk), so that on two cores the client's own share stays small. Its CPU is printed apart.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

END = b"data: [DONE]"


@dataclass
class Stream:
    """What the client saw of one request."""

    status: int = 0
    started: float = 0.0
    first_byte: float = 0.0  # of the first event with content
    ended: float = 0.0
    events: list[float] = field(default_factory=list)  # arrival of each read that held content
    body: bytearray = field(default_factory=bytearray)

    @property
    def ttfb_ms(self) -> float:
        return (self.first_byte - self.started) * 1000


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, *, keep_body: bool, quick_ack: bool = False) -> None:
        """With `quick_ack` what arrives is acknowledged at once instead of after the kernel's delay."""
        self._keep = keep_body
        self._quick_ack = quick_ack
        self._stream = Stream()
        self._done: asyncio.Future[Stream] | None = None
        self._transport: asyncio.Transport | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._quick_ack:
            self._acknowledge()
        stream = self._stream
        if not stream.status:
            stream.status = int(data[9:12])
        if self._keep or stream.status != 200:
            stream.body += data
        if b'"content":"' in data and (b'"content":""' not in data or _says_more(data)):
            if not stream.first_byte:
                stream.first_byte = now
            stream.events.append(now)
        window = self._tail + data
        if END in window or (stream.status != 200 and (b"\r\n\r\n" in window)) or window.endswith(b"0\r\n\r\n"):
            if not window.endswith(b"0\r\n\r\n") and stream.status == 200:
                self._tail = window[-64:]
                return
            self._tail = b""
            stream.ended = now
            if self._done is not None and not self._done.done():
                self._done.set_result(stream)
        else:
            self._tail = window[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("closed before the end of the stream"))

    def _acknowledge(self) -> None:
        assert self._transport is not None
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1
        )  # the kernel takes it back; so after each read

    async def send(self, request: bytes, deadline_s: float) -> Stream:
        assert self._transport is not None
        if self._quick_ack:
            self._acknowledge()
        self._stream = Stream(started=time.perf_counter())
        self._tail = b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(deadline_s):
            return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _says_more(data: bytes) -> bool:
    """Return whether a read with an empty delta, the role's, also holds one with text."""
    return data.count(b'"content":"') > data.count(b'"content":""')


def chat_request(host: str, key: str, model: str, *, prompt: str, max_tokens: int) -> bytes:
    """Return the bytes of one streaming chat request."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@asynccontextmanager
async def connected(host: str, port: int, *, keep_body: bool = False, quick_ack: bool = False) -> AsyncIterator[Client]:
    """Give one open connection."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(keep_body=keep_body, quick_ack=quick_ack), host, port)
    try:
        yield client
    finally:
        client.close()


async def run(
    host: str,
    port: int,
    requests: list[list[bytes]],
    *,
    keep_body: bool = False,
    deadline_s: float = 120,
    quick_ack: bool = False,
) -> list[Stream]:
    """Send each inner list over a connection of its own, one request after the other; all connections at once."""
    seen: list[Stream] = []

    async def connection(work: list[bytes]) -> None:
        async with connected(host, port, keep_body=keep_body, quick_ack=quick_ack) as client:
            seen.extend([await client.send(request, deadline_s) for request in work])

    async with asyncio.TaskGroup() as tasks:
        for work in requests:
            tasks.create_task(connection(work))
    return seen
