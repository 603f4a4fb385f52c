"""A frugal streaming client: keep-alive HTTP/1.1 connections, SSE read as bytes, clocks per stream.

It parses only what it must (chunk borders are never looked at: an SSE event ends in a blank line
inside one chunk), so that on two cores the client's own share stays small. Its CPU is printed apart.
"""

import asyncio
import json
import time
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

    def __init__(self, *, keep_body: bool) -> None:
        self._keep = keep_body
        self._stream = Stream()
        self._done: asyncio.Future[Stream] | None = None
        self._transport: asyncio.Transport | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        stream = self._stream
        if not stream.status:
            stream.status = int(data[9:12])
        if self._keep or stream.status != 200:
            stream.body += data
        if b'"content":"' in data and b'"content":""' not in data:
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

    async def send(self, request: bytes, deadline_s: float) -> Stream:
        assert self._transport is not None
        self._stream = Stream(started=time.perf_counter())
        self._tail = b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(deadline_s):
            return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


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


async def run(
    host: str, port: int, requests: list[list[bytes]], *, keep_body: bool = False, deadline_s: float = 120
) -> list[Stream]:
    """Send each inner list over a connection of its own, one request after the other; all connections at once."""
    loop = asyncio.get_running_loop()
    seen: list[Stream] = []

    async def connection(work: list[bytes]) -> None:
        _, client = await loop.create_connection(lambda: Client(keep_body=keep_body), host, port)
        try:
            seen.extend([await client.send(request, deadline_s) for request in work])
        finally:
            client.close()

    async with asyncio.TaskGroup() as tasks:
        for work in requests:
            tasks.create_task(connection(work))
    return seen
