"""Responses that may be retrieved, continued and cancelled later.

1. A response that is to be kept is `begun`: in this process with the request that makes it. If its id is known before
   its end, it is in Redis too, so that every gateway can show it.
2. Its end is `finished` without awaiting; `run` writes it to Redis, where it stays for the settings' time.
3. A cancellation at another gateway is a mark in Redis, which `run` looks for while responses run here.
4. A response whose gateway died before its end is told as failed.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys
from contracts.beat import beat
from contracts.errors import BadRequest, DependencyDown, NotFound
from gateway.schemas.response_objects import Response

log = structlog.get_logger()

MAX_RECORD_BYTES: Final = 1024 * 1024
_LOOK_S: Final = 0.5
_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 0.5
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024  # of records that Redis has not taken yet
_RUNNING: Final = ("queued", "in_progress")


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A response with what is needed to continue it."""

    org: str
    gateway_id: str
    response: Response
    input_items: Sequence[Any]
    conversation: Sequence[Any]  # chat messages, without instructions; with the answer once that is whole


class _Running(msgspec.Struct):
    kept: Kept
    cancel: Callable[[], None] | None = None


class _Record(msgspec.Struct, frozen=True):
    org: str
    raw: bytes


_decoder = msgspec.json.Decoder(Kept)


class ResponseBook:
    """See the module's docstring. `run` until cancelled."""

    def __init__(self, redis: Redis, *, gateway_id: str, ttl_s: float) -> None:
        self._redis = redis
        self._gateway_id = gateway_id
        self._ttl_s = int(ttl_s)
        self._running: dict[str, _Running] = {}
        self._unwritten: dict[str, _Record] = {}
        self._unwritten_bytes = 0
        self._news = asyncio.Event()

    def begun(self, kept: Kept, *, shown: bool) -> None:
        """Keep a response that is being made; `shown`: its id is known before its end."""
        self._running[kept.response.id] = _Running(kept)
        if shown:
            self._write(kept)

    def cancellable(self, response_id: str, cancel: Callable[[], None]) -> None:
        """Say how a response that has begun is cancelled; nothing if it has ended already."""
        running = self._running.get(response_id)
        if running is not None:
            running.cancel = cancel

    def finished(self, kept: Kept) -> None:
        """Keep the end of a response. Does not wait for Redis."""
        self._running.pop(kept.response.id, None)
        self._write(kept)

    def forget(self, response_id: str) -> None:
        """Drop a response that was refused after all."""
        self._running.pop(response_id, None)
        self._drop(response_id)

    async def find(self, org: str, response_id: str) -> Kept:
        """Return a response of an organisation as it stands.

        Raises:
            NotFound: unknown to this organisation, or kept no longer.
            DependencyDown: Redis does not answer.
        """
        running = self._running.get(response_id)
        if running is not None:
            kept = running.kept
        else:
            record = self._unwritten.get(response_id)
            raw = record.raw if record else await self._ask(self._redis.get(keys.response(org, response_id)))
            if not raw:
                raise _unknown(response_id)
            kept = _decoder.decode(raw)
        if kept.org != org:
            raise _unknown(response_id)
        if kept.response.status in _RUNNING and kept.gateway_id != self._gateway_id:
            alive = await self._ask(self._redis.exists(keys.gateway_lease(kept.gateway_id)))
            if not alive:
                return msgspec.structs.replace(kept, response=_lost(kept.response))
        return kept

    async def cancel(self, org: str, response_id: str) -> Kept:
        """Stop a response and return it; one that has ended is returned as it is.

        Raises:
            BadRequest: it did not end in time after it was told to.
            NotFound, DependencyDown: as `find`.
        """
        kept = await self.find(org, response_id)
        if kept.response.status not in _RUNNING:
            return kept
        running = self._running.get(response_id)
        if running is not None and running.cancel is not None:
            running.cancel()
        else:
            await self._ask(self._redis.set(keys.response_cancel(org, response_id), "1", ex=60))
        try:
            async with asyncio.timeout(4 * _LOOK_S + _TIMEOUT_S):
                while kept.response.status in _RUNNING:
                    await asyncio.sleep(_LOOK_S / 10)
                    kept = await self.find(org, response_id)
        except TimeoutError:
            raise BadRequest(f"The response '{response_id}' is ending. Retrieve it.") from None
        return kept

    async def delete(self, org: str, response_id: str) -> None:
        """Forget a response that has ended. Raises BadRequest, NotFound, DependencyDown."""
        kept = await self.find(org, response_id)
        if kept.response.status in _RUNNING:
            raise BadRequest(f"The response '{response_id}' is still running. Cancel it first.")
        self._drop(response_id)
        await self._ask(self._redis.delete(keys.response(org, response_id)))

    async def run(self) -> None:
        """Write what began and ended, and look for cancellations from other gateways."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_all())
            tasks.create_task(self._look_for_cancellations())

    def _write(self, kept: Kept) -> None:
        """Have a record written; a newer one of the same response takes its place."""
        response_id, raw = kept.response.id, msgspec.json.encode(kept)
        self._drop(response_id)
        if len(raw) > MAX_RECORD_BYTES or self._unwritten_bytes + len(raw) > MAX_WAITING_BYTES:
            log.warning("response_not_kept", id=response_id, num_bytes=len(raw))
            return
        self._unwritten[response_id] = _Record(kept.org, raw)
        self._unwritten_bytes += len(raw)
        self._news.set()

    def _drop(self, response_id: str) -> None:
        record = self._unwritten.pop(response_id, None)
        if record is not None:
            self._unwritten_bytes -= len(record.raw)

    async def _write_all(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unwritten:
                response_id, record = next(iter(self._unwritten.items()))
                try:
                    key = keys.response(record.org, response_id)
                    await self._ask(self._redis.set(key, record.raw, ex=self._ttl_s))
                except DependencyDown:
                    await asyncio.sleep(_RETRY_S)
                    continue
                if self._unwritten.get(response_id) is record:
                    self._drop(response_id)
                elif response_id not in self._unwritten:  # deleted while it was written
                    await self._forget(record.org, response_id)

    async def _forget(self, org: str, response_id: str) -> None:
        try:
            await self._ask(self._redis.delete(keys.response(org, response_id)))
        except DependencyDown:
            log.warning("response_not_forgotten", id=response_id)  # it expires

    async def _look_for_cancellations(self) -> None:
        while True:
            await beat(_LOOK_S)
            for response_id, running in tuple(self._running.items()):
                if not running.kept.response.background or running.cancel is None:
                    continue
                try:
                    asked = await self._ask(self._redis.getdel(keys.response_cancel(running.kept.org, response_id)))
                except DependencyDown:
                    break
                if asked:
                    running.cancel()

    async def _ask(self, command: Any) -> Any:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await command
        except (RedisError, OSError):
            raise DependencyDown("Stored responses cannot be reached right now.", retry_after_s=1) from None


def _lost(response: Response) -> Response:
    error = {"code": "server_error", "message": "The gateway that made this response ended before it was whole."}
    return msgspec.structs.replace(response, status="failed", error=error)


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.", param="response_id")
