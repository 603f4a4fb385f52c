"""An OpenAI-compatible endpoint: what it serves, what it accepts, and the bytes of a request to it."""

import asyncio
import enum
from typing import Any, Final

import msgspec

from pdgate.bench.answers import Answer
from pdgate.bench.texts import Scale, scale_of, words
from pdgate.bench.wire import Connections, Target, WireError

PROBE_WORDS: Final = (20, 220)
PROBE_TOKENS: Final = 2
_PROBE_S: Final = 60.0


class Route(enum.StrEnum):
    """Which of the two endpoints is called."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class EndpointError(Exception):
    """The endpoint cannot be measured; the message says why."""


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What of the common extensions an endpoint accepts."""

    usage: bool = True  # `stream_options.include_usage`
    exact: bool = True  # `ignore_eos` and `min_tokens`: answers as long as asked


class Endpoint:
    """Builds and sends requests."""

    def __init__(self, target: Target, *, key: str, model: str, route: Route, extra: dict[str, Any]) -> None:
        """`extra` are fields for every body."""
        self.target = target
        self.model = model
        self.route = route
        self.dialect = Dialect()
        self.connections = Connections(target)
        self._extra = extra
        self._authorization = f"Authorization: Bearer {key}\r\n" if key else ""

    def request(self, messages: list[Message], max_tokens: int) -> bytes:
        """Return the bytes of one streaming request."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "stream": True, "temperature": 0}
        if self.route is Route.CHAT:
            body["messages"] = messages
        else:
            body["prompt"] = "\n".join(message.content for message in messages)
        if self.dialect.usage:
            body["stream_options"] = {"include_usage": True}
        if self.dialect.exact:
            body |= {"ignore_eos": True, "min_tokens": max_tokens}
        path = "/v1/chat/completions" if self.route is Route.CHAT else "/v1/completions"
        return self._bytes("POST", path, msgspec.json.encode(body | self._extra))

    def _bytes(self, method: str, path: str, body: bytes) -> bytes:
        head = (
            f"{method} {self.target.path}{path} HTTP/1.1\r\nHost: {self.target.authority}\r\n{self._authorization}"
            f"Content-Type: application/json\r\nAccept: text/event-stream, application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def prepare(self) -> Scale:
        """Find the model and what the endpoint accepts, and measure its tokenizer.

        Raises:
            EndpointError: no connection, no model, or a refusal.
        """
        if not self.model:
            self.model = await self._first_model()
        few = await self._probe(PROBE_WORDS[0])
        many = await self._probe(PROBE_WORDS[1])
        if few.usage is None or many.usage is None:
            return Scale()
        return scale_of((PROBE_WORDS[0], few.usage.prompt_tokens), (PROBE_WORDS[1], many.usage.prompt_tokens))

    async def _probe(self, count: int) -> Answer:
        for dialect in (self.dialect, Dialect(exact=False), Dialect(exact=False, usage=False)):
            self.dialect = dialect
            answer = Answer()
            message = Message("user", words(f"probe {count}", count))
            await self._send(self.request([message], PROBE_TOKENS), answer)
            if answer.status not in (400, 422):
                break
        if answer.error is not None:
            raise EndpointError(
                f"{self.target.authority} refused a first request: {answer.error} {answer.said}".strip()
            )
        return answer

    async def _first_model(self) -> str:
        listing = _Listing()
        await self._send(self._bytes("GET", "/v1/models", b""), listing)
        name = listing.first()
        if name is None:
            raise EndpointError(f"{self.target.authority} names no model at /v1/models (status {listing.status})")
        return name

    async def _send(self, request: bytes, sink: "Answer | _Listing") -> None:
        try:
            async with asyncio.timeout(_PROBE_S):
                await self.connections.send(request, sink)
        except (WireError, TimeoutError) as error:
            raise EndpointError(str(error) or f"{self.target.authority} did not answer in {_PROBE_S:g} s") from None


class _Listing:
    """The body of `/v1/models`."""

    def __init__(self) -> None:
        self.status = 0
        self._body = b""

    def head(self, status: int, at_s: float) -> None:
        del at_s
        self.status = status

    def data(self, payload: bytes, at_s: float) -> None:
        del at_s
        self._body += payload

    def first(self) -> str | None:
        """Return the id of the first model, if there is one."""
        try:
            answer = msgspec.json.decode(self._body)
            return str(answer["data"][0]["id"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            return None
