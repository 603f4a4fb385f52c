"""A small server of `/v1/completions` for the http engine, with the differences between real ones as switches."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from granian.constants import Interfaces
from granian.server.embed import Server
from litestar import Litestar, get, post
from litestar.exceptions import HTTPException
from litestar.params import JSONBody
from litestar.response import Stream

from tests.processes import free_port

WORDS = ("The ", "capital ", "of ", "France ", "is ", "Paris", ".")


class OpenaiServer:
    """Says `WORDS`, one event each, and keeps what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.left = 0  # clients that closed their connection
        self.healthy = True
        self.tells_usage = True
        self.held = asyncio.Event()  # cleared: nothing is said after the first word
        self.held.set()

    async def words(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        said = 0
        try:
            for word in WORDS[: body["max_tokens"]]:
                said += 1
                yield self._event({"choices": [{"index": 0, "text": word, "finish_reason": None}]})
                await self.held.wait()
            reason = "length" if said < len(WORDS) else "stop"
            yield self._event({"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
            if self.tells_usage:
                usage = {
                    "prompt_tokens": len(body["prompt"]),
                    "completion_tokens": said,
                    "prompt_tokens_details": {"cached_tokens": 4},
                }
                yield self._event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise

    @staticmethod
    def _event(event: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def app(self) -> Litestar:
        @get("/health")
        async def health() -> str:
            if not self.healthy:
                raise HTTPException(status_code=503)
            return "ok"

        @get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": "there", "max_model_len": 512}]}

        @post("/v1/completions", status_code=200)
        async def completions(data: JSONBody[dict[str, Any]]) -> Stream:
            self.asked.append(data)
            if data.get("temperature") == 99:
                raise HTTPException(status_code=400, detail="temperature is out of range")
            return Stream(self.words(data), media_type="text/event-stream")

        return Litestar([health, models, completions], openapi_config=None)


@asynccontextmanager
async def running_server() -> AsyncIterator[OpenaiServer]:
    server, port = OpenaiServer(), free_port()
    server.url = f"http://127.0.0.1:{port}"
    embedded = Server(server.app(), address="127.0.0.1", port=port, interface=Interfaces.ASGI, log_enabled=False)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(embedded.serve())
        try:
            yield server
        finally:
            server.held.set()
            embedded.stop()
            await running
