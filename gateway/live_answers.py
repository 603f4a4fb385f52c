"""Answers that are still being made, for requests that come again meanwhile (gateway.idempotency): on any replica.

1. Whoever has the claim hands over each message of its answer; `LiveAnswers.run` writes what came since the last look
   to a stream beside the claim, every `_EVERY_S` and for all answers at once. Whole answers cost two writes.
2. Who comes again reads that stream from its beginning and passes it on. Frames say how many bytes were before them,
   so a lost one is noticed: then the kept answer gives the rest.
3. It is over when the last frame came, when the answer is kept, or when claim or owner are gone: then the second
   client gets one error, and the key is free.

The stream is named by a word of the claim's own, so an answer is never continued by another claim's.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import structlog
from litestar.types import Send
from redis.exceptions import RedisError

from contracts.errors import ServingError
from contracts.resp import RespConnection

log = structlog.get_logger()

_EVERY_S: Final = 0.03
_SLOWEST_S: Final = 0.25  # between two looks at an answer in which nothing happens
_OWNER_CHECK_S: Final = 1.0
_READABLE_MS: Final = 60_000  # after its end, for those that are still reading
_FIELD: Final = "f"


class OwnerLost(ServingError):
    """The request that this one had joined was broken off by our fault; it cost nothing."""

    code, http_status = "idempotent_request_lost", 503


class Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an answer: `at` bytes of its body were before. `status` and headers are in the first."""

    at: int
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    end: bool = False


class Ended(msgspec.Struct, frozen=True):
    """How a claim ended for those who joined it: the whole answer's body, or None = there is none."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes | None = None


class Making:
    """The answer of one claim while it is made."""

    def __init__(self, key: str, dirty: Callable[["Making"], None], *, max_bytes: int) -> None:
        self.key = key
        self._dirty = dirty
        self._max_bytes = max_bytes
        self._at = 0
        self._offered = 0
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._waiting: list[bytes] = []
        self._too_large = False

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin the answer."""
        self._status, self._headers = status, headers
        self._dirty(self)

    def body(self, part: bytes) -> None:
        """Go on; beyond the largest answer that is kept nothing is shared either."""
        self._offered += len(part)
        self._too_large = self._offered > self._max_bytes
        if part and not self._too_large:
            self._waiting.append(part)
            self._dirty(self)

    def take(self, *, end: bool = False) -> bytes | None:
        """Return what came since the last time as a frame; None = nothing."""
        if self._too_large or not (self._waiting or self._status or end):
            return None
        part = b"".join(self._waiting)
        frame = Frame(at=self._at, status=self._status, headers=self._headers, body=part, end=end)
        self._at += len(part)
        self._waiting.clear()
        self._status, self._headers = 0, []
        return msgspec.msgpack.encode(frame)


class LiveAnswers:
    """Shares answers in the making, and joins them."""

    def __init__(self, connection: RespConnection) -> None:
        self._connection = connection
        self._changed: dict[str, Making] = {}
        self._any = asyncio.Event()

    def begin(self, key: str, *, max_bytes: int) -> Making:
        """Return a new answer, shared under `key`."""
        return Making(key, self._dirty, max_bytes=max_bytes)

    async def end(self, making: Making) -> None:
        """Share the rest of an answer that is whole."""
        self._changed.pop(making.key, None)
        frame = making.take(end=True)
        if frame is not None:
            await self._write([(making.key, frame)])

    async def run(self) -> None:
        """Share what changes, until cancelled."""
        while True:
            await self._any.wait()
            self._any.clear()
            await asyncio.sleep(_EVERY_S)  # what comes meanwhile goes along
            changed, self._changed = self._changed, {}
            frames = [(key, frame) for key, one in changed.items() if (frame := one.take()) is not None]
            if frames:
                await self._write(frames)

    async def join(
        self,
        key: str,
        send: Send,
        *,
        ended: Callable[[], Any],
        owner_lives: Callable[[], Any],
        deadline_s: float,
        broken: Callable[[ServingError], bytes],
    ) -> None:
        """Pass on an answer from its beginning.

        Args:
            key: of its stream.
            send: of the second client.
            ended: awaited for an Ended, once the claim is over; None before.
            owner_lives: awaited for whether its gateway is there.
            deadline_s: on the monotonic clock.
            broken: the event that ends a stream with an error.

        Raises:
            ServingError: before the head was sent.
        """
        reader = _Reader(self._connection, key, send)
        watch = _Watch(owner_lives, deadline_s)
        while not reader.done:
            try:
                over: Ended | None = await ended()  # before the stream: who ends a claim wrote its last frame first
                moved = await reader.pass_on()
                if over is not None and not reader.done:
                    await reader.pass_rest(over)
                await watch.look(moved=moved or reader.done)
            except RedisError as error:
                watch.pause_s = _SLOWEST_S  # the claim stands longer than this; the deadline ends it
                if time.monotonic() > deadline_s:
                    await reader.fail(OwnerLost(f"Redis does not answer: {error}", retry_after_s=1), broken)
            except ServingError as error:
                await reader.fail(error, broken)
            if not reader.done:
                await asyncio.sleep(watch.pause_s)

    def _dirty(self, making: Making) -> None:
        self._changed[making.key] = making
        self._any.set()

    async def _write(self, frames: Sequence[tuple[str, bytes]]) -> None:
        commands: list[tuple[str | bytes | int, ...]] = []
        for key, frame in frames:
            commands += [("XADD", key, "*", _FIELD, frame), ("PEXPIRE", key, _READABLE_MS)]
        try:
            await self._connection.call_all(commands)
        except RedisError as error:  # who joined finds the kept answer, or an error
            log.warning("live_answer_not_shared", error=str(error))


class _Watch:
    """How long to wait between two looks, and whether the owner is still there."""

    def __init__(self, owner_lives: Callable[[], Any], deadline_s: float) -> None:
        self._owner_lives = owner_lives
        self._deadline_s = deadline_s
        self._looked_s = time.monotonic()
        self.pause_s = _EVERY_S

    async def look(self, *, moved: bool) -> None:
        """Take notice of a look. Raises OwnerLost, RedisError."""
        now_s = time.monotonic()
        if moved:
            self.pause_s, self._looked_s = _EVERY_S, now_s
            return
        if now_s > self._deadline_s:
            raise OwnerLost("The request with this 'Idempotency-Key' did not end in time.", retry_after_s=1)
        self.pause_s = min(_SLOWEST_S, self.pause_s * 1.5)
        if now_s - self._looked_s > _OWNER_CHECK_S:
            self._looked_s = now_s
            if not await self._owner_lives():
                raise OwnerLost(
                    "The gateway that ran the request with this 'Idempotency-Key' is gone. Send it again.",
                    retry_after_s=1,
                )


class _Reader:
    """What one joined client has of the answer."""

    def __init__(self, connection: RespConnection, key: str, send: Send) -> None:
        self._connection = connection
        self._key = key
        self._send = send
        self._last = "-"
        self._sent = 0
        self._begun = False
        self._streams = False
        self._gap = False
        self.done = False

    async def pass_on(self) -> bool:
        """Send what is new; return whether there was anything."""
        entries: list[tuple[bytes, list[bytes]]] = await self._connection.call("XRANGE", self._key, self._last, "+")
        for entry_id, (_, raw) in entries:
            if self.done:
                break
            self._last = f"({entry_id.decode()}"
            frame = msgspec.msgpack.decode(raw, type=Frame)
            self._gap = self._gap or frame.at != self._sent or (not self._begun and not frame.status)
            if self._gap:
                continue  # the kept answer will have it
            if frame.status:
                await self._head(frame.status, frame.headers)
            self._sent += len(frame.body)
            if frame.body or frame.end:
                await self._body(frame.body, more=not frame.end)
            self.done = self.done or frame.end
        return bool(entries)

    async def pass_rest(self, over: Ended) -> None:
        """Send what is left of the kept answer. Raises OwnerLost when there is none."""
        if over.body is None:
            raise OwnerLost("The request with this 'Idempotency-Key' was broken off. Send it again.", retry_after_s=1)
        if not self._begun:
            await self._head(over.status, over.headers)
        await self._body(over.body[self._sent :], more=False)
        self.done = True

    async def fail(self, error: ServingError, broken: Callable[[ServingError], bytes]) -> None:
        """End with an error. Raises it when nothing was sent yet."""
        if not self._begun:
            raise error
        self.done = True
        await self._body(broken(error) if self._streams else b"", more=False)

    async def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._begun = True
        self._streams = any(name.lower() == b"content-type" and b"event-stream" in value for name, value in headers)
        marked = [*headers, (b"idempotent-replayed", b"true")]
        await self._message({"type": "http.response.start", "status": status, "headers": marked})

    async def _body(self, part: bytes, *, more: bool) -> None:
        await self._message({"type": "http.response.body", "body": part, "more_body": more})

    async def _message(self, message: Any) -> None:
        try:
            await self._send(message)
        except Exception as error:  # noqa: BLE001 - servers say so when the client is gone
            log.info("joined_client_left", error=repr(error))
            self.done = True
