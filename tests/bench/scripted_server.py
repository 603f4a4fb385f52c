"""A real HTTP server whose answers the test writes: what an endpoint may do to a client, exactly."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Answerer = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request and the connection to answer it on."""

    def __init__(self, number: int, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.path = path
        self.body = body
        self._writer = writer

    async def head(self, status: int = 200, *, length: int | None = None) -> None:
        framing = f"Content-Length: {length}" if length is not None else "Transfer-Encoding: chunked"
        await self.raw(f"HTTP/1.1 {status} X\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, value: object) -> None:
        await self.chunk(b"data: %b\n\n" % (value if isinstance(value, bytes) else json.dumps(value).encode()))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def answer(self, tokens: int = 2, **usage: int) -> None:
        """Send a whole answer at once; the prompt counts two tokens a word unless `usage` says otherwise."""
        await self.head()
        for number in range(tokens):
            await self.event({"choices": [{"index": 0, "delta": {"content": f" w{number}"}}]})
        words = sum(len(m["content"].split()) for m in self.body.get("messages", []))
        counts = {"prompt_tokens": 7 + 2 * words, "completion_tokens": tokens, **usage}
        await self.event({"choices": [], "usage": counts})
        await self.event(b"[DONE]")
        await self.end()

    async def refuse(self, status: int, code: str) -> None:
        body = json.dumps({"error": {"message": "no", "code": code}}).encode()
        await self.head(status, length=len(body))
        await self.raw(body)

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def drop(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def scripted(answerer: Answerer, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, list[Exchange]]]:
    """Serve; give the URL and the requests that came."""
    seen: list[Exchange] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length")
                )
                body = await reader.readexactly(length)
                exchange = Exchange(len(seen), head.split(" ")[1], json.loads(body or b"{}"), writer)
                seen.append(exchange)
                await answerer(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()
