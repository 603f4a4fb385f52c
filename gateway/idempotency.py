"""`Idempotency-Key`: a request that is sent again is answered by the first answer and charged once.

An ASGI application around the whole one, so every endpoint has it and a request without the header pays for one look
at its headers.

1. The claim is the first durable write: a key of the organisation's shard, named by tenant, endpoint and header.
2. Whoever has the claim runs the request. A client that leaves does not stop it: it may come back with the same key.
3. The whole answer (status below 300, not broken off, up to `MAX_BYTES`) replaces the claim for 24 hours.
   Any other end frees the key, since it cost nothing.
4. Meanwhile the same body joins the answer (gateway.live_answers): a stream from its beginning, others at their end.
   In the admin API, whose answers may show secrets, it is answered 409. Another body is always answered 422.
5. When the gateway that has the claim is dead, who joined gets one error, and the key is free: its request was settled
   at no cost.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec
import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from redis.exceptions import RedisError

from contracts import keys
from contracts.errors import BadRequest, DependencyDown, ServingError, openai_body
from contracts.resp import RespConnection
from gateway.auth import Authenticator, credential, headers_of
from gateway.bodies import read_body
from gateway.errors import error_headers
from gateway.live_answers import Ended, LiveAnswers, Making
from gateway.schemas.messages import anthropic_body
from gateway.sse import error_event

log = structlog.get_logger()

KEEP_MS: Final = 24 * 3_600_000
MAX_BYTES: Final = 4 * 2**20
INCOMPLETE: Final = "incomplete"
"""Set in a request's state when its answer broke off after the first byte."""

ENDPOINTS: Final = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/batches")
)
ADMIN: Final = "/admin/v1/"
SECRET: Final = "secret"  # noqa: S105 - the name of a mark
"""Set in a request's state when its answer shows a secret, which is kept nowhere."""
_HEADER: Final = b"idempotency-key"
_MAX_KEY_CHARACTERS: Final = 255
_SLACK_MS: Final = 60_000
_MOST_JOINED: Final = 256  # of one process; each looks at Redis some times a second

# Takes the key if it is free or still has the value that its dead owner left.
_TAKE: Final = """
local known = redis.call('GET', KEYS[1])
if known and known ~= ARGV[1] then return known end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return false
"""
# Replaces or deletes a claim of ours.
_END: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""


class KeyInUse(ServingError):
    """The first request with this idempotency key still runs."""

    code, type, http_status = "idempotency_key_in_use", "invalid_request_error", 409


class KeyReused(ServingError):
    """The idempotency key belongs to another body."""

    code, type, http_status = "idempotency_key_reused", "invalid_request_error", 422


class AnswerNotKept(ServingError):
    """The first answer was too large to be kept, or shows a secret; the request is not run again."""

    code, type, http_status = "idempotent_answer_not_kept", "invalid_request_error", 409
    should_retry = False


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a key holds: a claim (`status` 0), or an answer; `too_large`: without its body, or with a secret.

    `live`: names the stream that shares the answer while it is made; empty = it is not shared.
    """

    v: int = 1
    body_sha256: bytes
    gateway_id: str
    live: str = ""
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    too_large: bool = False


class _Recorder:
    """Passes an answer on and keeps a copy, whether or not the client is still there."""

    def __init__(self, send: Send, making: Making | None, keep: Callable[["_Recorder"], Awaitable[None]]) -> None:
        """`keep` is awaited before the last message leaves: a client that has it all may ask again at once."""
        self._send = send
        self._making = making
        self._keep = keep
        self._gone = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []
        self.num_bytes = 0
        self.whole = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
            if self._making is not None:
                self._making.head(self.status, self.headers)
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            self.num_bytes += len(body)
            if self._making is not None:
                self._making.body(bytes(body))
            if self.num_bytes <= MAX_BYTES:
                self.chunks.append(bytes(body))
            else:
                self.chunks.clear()
            if not message.get("more_body", False):
                self.whole = True
                await self._keep(self)
        if self._gone:
            return
        try:
            await self._send(message)
        except Exception as error:  # noqa: BLE001 - servers say so when the client is gone; the answer is still kept
            log.info("idempotent_client_left", error=repr(error))
            self._gone = True


class Idempotency:
    """The application around the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        auth: Authenticator,
        connection: RespConnection,
        live: LiveAnswers,
        gateway_id: str,
        max_body_bytes: int,
        body_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: how long a request may run; a claim stands a little longer."""
        self._app = app
        self._auth = auth
        self._connection = connection
        self._live = live
        self._num_joined = 0
        self._take = connection.register_script(_TAKE)
        self._end = connection.register_script(_END)
        self._gateway_id = gateway_id
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._claim_ms = int(timeout_s * 1000) + _SLACK_MS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != ScopeType.HTTP or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == _HEADER and (scope["path"] in ENDPOINTS or scope["path"].startswith(ADMIN)):
                try:
                    await self._once(scope, receive, send, value.decode("latin-1"))
                except ServingError as error:
                    await _answer(send, error)
                return
        await self._app(scope, receive, send)

    async def _once(self, scope: Scope, receive: Receive, send: Send, header: str) -> None:
        if not 0 < len(header) <= _MAX_KEY_CHARACTERS or not header.isprintable():
            raise BadRequest(
                f"'Idempotency-Key' has 1 to {_MAX_KEY_CHARACTERS} printable characters.", param="Idempotency-Key"
            )
        caller = await self._auth.authenticate(credential(headers_of(scope)))
        body = await read_body(receive, max_bytes=self._max_body_bytes, timeout_s=self._body_timeout_s)
        org = caller.organisation_id
        place = keys.idempotent(org, hashlib.sha256(f"{org}\n{scope['path']}\n{header}".encode()).hexdigest())
        shared = uuid.uuid4().hex if scope["path"] in ENDPOINTS else ""
        claim = Kept(body_sha256=hashlib.sha256(body).digest(), gateway_id=self._gateway_id, live=shared)
        raw = msgspec.msgpack.encode(claim)
        try:
            kept = await self._claim(place, raw, claim.body_sha256)
        except RedisError:
            raise DependencyDown("Idempotency keys cannot be checked right now.", retry_after_s=1) from None
        if kept is not None and kept.status:
            await _replay(send, kept)
            return
        if kept is not None:
            await self._join(scope["path"], send, place, kept)
            return
        making = self._live.begin(f"{place}:{shared}", max_bytes=MAX_BYTES) if shared else None

        async def keep(answer: _Recorder) -> None:
            state = scope["state"]
            broken, secret = bool(state.get(INCOMPLETE)), bool(state.get(SECRET))
            if making is not None and answer.whole:
                await self._live.end(making)
            await self._finish(place, raw, claim, answer, broken=broken, secret=secret)

        recorder = _Recorder(send, making, keep)
        try:
            await self._app(scope, _once_then_never(body), recorder.send)
        finally:
            if not recorder.whole:
                await keep(recorder)

    async def _claim(self, place: str, raw: bytes, body_sha256: bytes) -> Kept | None:
        """Take the key, or return the answer that is kept or made (status 0). Raises ServingError, RedisError."""
        left_behind: bytes = b""
        while True:
            known: bytes | None = await self._take(keys=[place], args=[left_behind, raw, self._claim_ms])
            if known is None:
                return None
            kept = msgspec.msgpack.decode(known, type=Kept)
            if kept.body_sha256 != body_sha256:
                raise KeyReused("This 'Idempotency-Key' was used with another body. Use a new key.")
            if kept.too_large:
                raise _not_kept()
            if kept.status:
                return kept
            if await self._connection.call("EXISTS", keys.gateway_lease(kept.gateway_id)):
                if kept.live and self._num_joined < _MOST_JOINED:
                    return kept
                raise KeyInUse("A request with this 'Idempotency-Key' is running.", retry_after_s=1)
            left_behind = known

    async def _join(self, path: str, send: Send, place: str, claim: Kept) -> None:
        """Pass on the answer that another request makes. Raises ServingError before the first byte."""

        async def ended() -> Ended | None:
            raw: bytes | None = await self._connection.call("GET", place)
            known = None if raw is None else msgspec.msgpack.decode(raw, type=Kept)
            if known is None or known.live != claim.live:
                return Ended()
            if known.too_large:
                raise _not_kept()
            return Ended(known.status, known.headers, known.body) if known.status else None

        async def owner_lives() -> bool:
            return bool(await self._connection.call("EXISTS", keys.gateway_lease(claim.gateway_id)))

        log.info("idempotent_joined", path=path)
        self._num_joined += 1
        try:
            await self._live.join(
                f"{place}:{claim.live}",
                send,
                ended=ended,
                owner_lives=owner_lives,
                deadline_s=time.monotonic() + self._claim_ms / 1000,
                broken=partial(_broken_event, path),
            )
        finally:
            self._num_joined -= 1

    async def _finish(
        self, place: str, raw: bytes, claim: Kept, recorder: _Recorder, *, broken: bool, secret: bool
    ) -> None:
        value: bytes = b""
        if recorder.whole and not broken and 200 <= recorder.status < 300:
            fits = recorder.num_bytes <= MAX_BYTES and not secret
            kept = msgspec.structs.replace(
                claim,
                status=recorder.status,
                headers=recorder.headers if fits else [],
                body=b"".join(recorder.chunks),
                too_large=not fits,
            )
            value = msgspec.msgpack.encode(kept)
        try:
            await self._end(keys=[place], args=[raw, value, KEEP_MS])
        except RedisError as error:  # the claim ends by itself
            log.warning("idempotent_answer_not_kept", error=str(error))


def _once_then_never(body: bytes) -> Receive:
    """Return a `receive` that gives the body, and never says that the client left."""
    given = False

    async def receive() -> Any:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.Event().wait()

    return receive


def _not_kept() -> AnswerNotKept:
    return AnswerNotKept("The first answer is not kept: too large, or it shows a secret. It is not run again.")


def _broken_event(path: str, error: ServingError) -> bytes:
    """Return the event that ends a stream of an endpoint with an error, as the endpoint's own."""
    if path == "/v1/messages":
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(anthropic_body(error))
    if path == "/v1/responses":
        about = {"type": "error", "code": error.code, "message": str(error), "param": None}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(about)
    return error_event(openai_body(error))


async def _replay(send: Send, kept: Kept) -> None:
    headers = [*kept.headers, (b"idempotent-replayed", b"true")]
    await send({"type": "http.response.start", "status": kept.status, "headers": headers})
    await send({"type": "http.response.body", "body": kept.body, "more_body": False})


async def _answer(send: Send, error: ServingError) -> None:
    body = msgspec.json.encode(openai_body(error))
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.http_status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
