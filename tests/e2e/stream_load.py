"""Streams of a stack that is changed under them."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx

from tests.processes import Stack

STREAMS, TOKENS = 24, 120


async def streamed(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> tuple[str, str]:
    """Return text and finish reason of one answer, or what went wrong; releases `begun` with the first text."""
    text, finish = "", ""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"story {number}"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return text, f"error: {chunk['error']}"
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    if not text:
                        begun.release()
                    text += piece
                finish = choice["finish_reason"] or finish
    return text, finish


async def all_streams(
    stack: Stack, meanwhile: Callable[[], Awaitable[object]] | None = None, *, streams: int = STREAMS
) -> list[tuple[str, str]]:
    """Return what became of every stream; `meanwhile` is done once all have begun."""
    begun = asyncio.Semaphore(0)
    headers = {"authorization": f"Bearer {stack.api_key}"}
    async with (
        httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=180) as client,
        asyncio.TaskGroup() as tasks,
    ):
        running = [tasks.create_task(streamed(client, number, begun)) for number in range(streams)]
        if meanwhile is not None:
            for _ in range(streams):
                await begun.acquire()
            await meanwhile()
    return [one.result() for one in running]
