"""The HTTP answers to a started request: an event stream, or one JSON body.

Both watch for the client's disconnect from the first moment. It is an event for the generation, which
then lets the output end; nothing is cancelled, so nothing has to be cleaned up by awaiting.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from litestar.enums import ScopeType
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Receive, Scope, Send

from contracts.errors import ServingError
from contracts.usage import UsageEvent
from gateway.idempotency import INCOMPLETE
from gateway.schemas.answers import money_text
from gateway.starter import Started
from gateway.writer import EventWriter
from observability.metrics import Instruments

CLIENT_CLOSED_REQUEST: Final = 499

SERVER_SEND: Final = "server_send"


def keep_server_send(app: ASGIApp) -> ASGIApp:
    """Return `app`, its requests' scopes holding the server's own `send`.

    Litestar passes handlers a coroutine around it that looks out for the start of the response. Once that is
    sent the detour is of no use and costs a tenth of the gateway's CPU per token.
    """

    async def with_server_send(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await app(scope, receive, send)
            return
        scope["state"][SERVER_SEND] = send
        try:
            await app(scope, receive, send)
        finally:
            del scope["state"][SERVER_SEND]  # the server's request has the scope: a circle for the garbage collector

    return with_server_send


class Whole(Protocol):
    """An answer that leaves as one body."""

    refusal: ServingError | None
    event: UsageEvent | None

    async def ended(self) -> None:
        """Wait for the end: then `refusal` or `event` is set, or neither when the client left."""
        ...

    def body(self, event: UsageEvent) -> bytes:
        """Return the body of a successful answer."""
        ...


class Answers:
    """Makes the answers, owns the tasks that wait for clients to leave, and counts what was answered."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Own the watching tasks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await asyncio.Event().wait()

    def watch(self, receive: Receive, left: Callable[[], None]) -> "asyncio.Task[None]":
        """Call `left` when the client disconnects; the caller cancels the task when it has answered."""
        assert self._tasks is not None, "answers run from the start of the application"
        return self._tasks.create_task(_wait_for_disconnect(receive, left))

    def answered(self, started: Started, status: int) -> None:
        """Count an answer whose status is sent."""
        labels = {"route": started.route, "status": str(status), "model": started.generations[0].terms.owner.model}
        self._instruments.requests.add(1, labels)

    async def whole(self, started: Started, output: Whole, receive: Receive) -> ASGIResponse:
        """Wait for the whole answer and return it. Raises what broke it off."""
        watcher = self.watch(receive, started.client_left)
        try:
            await output.ended()
        finally:
            watcher.cancel()
            started.client_left()
        if output.refusal is not None:
            raise output.refusal
        if output.event is None:
            self.answered(started, CLIENT_CLOSED_REQUEST)
            return ASGIResponse(body=b"", status_code=CLIENT_CLOSED_REQUEST, media_type="text/plain")
        self.answered(started, 200)
        headers = {
            **started.headers,
            "x-pdgate-path": str(output.event.path or ""),
            "x-pdgate-cached-tokens": str(output.event.tokens.prefill_cached),
            "x-pdgate-attempts": str(output.event.attempts),
            "x-pdgate-cost": money_text(output.event.cost),
            "openai-processing-ms": _processing_ms(started),
        }
        if started.sees_workers:
            headers["x-pdgate-workers"] = _workers(output.event.prefill_worker, output.event.decode_worker)
        return ASGIResponse(body=output.body(output.event), media_type="application/json", headers=headers)


class StreamAnswer(ASGIResponse):
    """Sends frames as they come. Litestar's own `Stream` cancels its iterator; here the source ends it."""

    __slots__ = ("_answers", "_started", "_writer")

    _should_set_content_length = False

    def __init__(self, started: Started, writer: EventWriter, answers: Answers) -> None:
        headers = {**started.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream", status_code=200)
        self._started = started
        self._writer = writer
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the head, then send frames until the output ends."""
        started, writer = self._started, self._writer
        watcher = self._answers.watch(receive, started.client_left)
        try:
            await writer.head()
            if writer.refusal is not None:
                raise writer.refusal
            self.headers.add("openai-processing-ms", _processing_ms(started))
            for name, value in _placed_headers(started).items():
                self.headers.add(name, value)
            await self.start_response(send)
            self._answers.answered(started, 200)
            if await writer.pump(scope["state"].get(SERVER_SEND, send)):
                scope["state"][INCOMPLETE] = not started.complete
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            started.client_left()  # changes nothing after a proper end


async def _wait_for_disconnect(receive: Receive, left: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left()


def _placed_headers(started: Started) -> dict[str, str]:
    """Return what is known of a stream's way when its head leaves; the last chunk has the final truth."""
    placed = started.generations[0].placed
    if placed is None:
        return {}
    headers = {"x-pdgate-path": str(placed.path)}
    if started.sees_workers:
        prefill = placed.prefill.worker_id if placed.prefill is not None else ""
        headers["x-pdgate-workers"] = _workers(prefill, placed.decode.worker_id)
    return headers


def _workers(prefill: str, decode: str) -> str:
    return f"prefill={prefill or decode}, decode={decode}"


def _processing_ms(started: Started) -> str:
    return str(int((time.monotonic() - started.generations[0].terms.arrived_s) * 1000))
