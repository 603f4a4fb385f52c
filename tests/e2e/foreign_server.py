"""A server that somebody else started, and the whole stack with one worker of the http engine before it."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import httpx
import openai
import pytest

from tests.e2e.ledger_view import meters_of, request_row
from tests.engines import BOOT_S, catalogue_entry, tiny_model
from tests.processes import Stack, free_port, until

NAME = "there"
"""What the server calls the model."""

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Once upon a time, near the sea"}], "temperature": 0}


class ForeignServer:
    """A process with an OpenAI-compatible API on a port of its own, which it keeps when it is started again."""

    def __init__(self, folder: Path, command: Callable[[int], list[str]], variables: Mapping[str, str]) -> None:
        """`command`: what starts it on a port."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self._command, self._variables = folder, command, variables
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; its log is the failure's text."""
        with (self._folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self.port), env=self._variables, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + BOOT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail((self._folder / "server.log").read_text()[-3000:])
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Kill it."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait(20)


@asynccontextmanager
async def stack_before(
    server: ForeignServer, folder: Path, redis_url: str, database_url: str, **worker: str
) -> AsyncIterator[Stack]:
    """Run the stack with the server as its only worker. `worker`: more of that worker's environment."""
    catalog_file = folder / "models.toml"
    catalog_file.write_text(catalogue_entry("tiny").replace('tool_parser = "hermes"\n', ""))
    stack = Stack(
        folder=folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=tiny_model().parent,
    )
    await stack.seed()
    stack.add_gateway(cpu_profile=True)
    stack.add_scheduler(cpu_profile=True)
    stack.add_billing()
    environ = {"WORKER_HTTP_URL": server.url, "WORKER_HTTP_MODEL": NAME} | worker
    stack.add_worker("http-0", role="unified", engine="http", environ=environ)
    stack.start()
    try:
        await stack.ready(timeout_s=90)
        yield stack
    finally:
        stack.stop()


def client_of(stack: Stack) -> openai.AsyncOpenAI:
    """Return the official client of the stack, without retries of its own."""
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=stack.api_key, max_retries=0, timeout=120)


async def answers_by_the_servers_counts(
    client: openai.AsyncOpenAI, server: ForeignServer, database: asyncpg.Connection
) -> str:
    """Ask whole, as a stream, and directly; compare texts and meters with the server's own; return the text."""
    whole = await client.chat.completions.create(**ASK, max_tokens=32)
    text, told = "", None
    async for chunk in await client.chat.completions.create(
        **ASK, max_tokens=32, stream=True, stream_options={"include_usage": True}
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        else:
            told = chunk
    assert text == whole.choices[0].message.content
    assert whole.model_extra["pdgate"]["path"] == "unified"
    assert (whole.usage.completion_tokens, told.usage.completion_tokens) == (32, 32)
    assert told.usage.prompt_tokens_details.cached_tokens > 0  # the server's own count of the second turn
    rid = told.model_extra["pdgate"]["rid"]

    async def booked() -> bool:
        return len(await meters_of(database, rid)) == 3

    await until(booked, 30)
    meters = await meters_of(database, rid)
    assert meters["decode"] == 32
    assert meters["prefill_computed"] + meters["prefill_cached"] == told.usage.prompt_tokens
    assert not (await request_row(database, rid))["estimated"]

    # What it says through the stack is what it says when asked directly, and its tokenizer agrees with ours.
    plain = {"prompt": "def fibonacci(n):\n    ", "temperature": 0, "max_tokens": 32}
    through = await client.completions.create(model="tiny", **plain)
    async with httpx.AsyncClient(timeout=60) as http:
        direct = (await http.post(f"{server.url}/v1/completions", json={"model": NAME, **plain})).json()
    assert through.choices[0].text == direct["choices"][0]["text"]
    assert through.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
    return text


async def stops_when_its_client_leaves(client: openai.AsyncOpenAI, running: Callable[[], Awaitable[int]]) -> None:
    """Leave a long stream. `running`: how many requests the server computes."""
    stream = await client.chat.completions.create(**ASK, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == 5:
            break
    assert await running() == 1
    await stream.close()

    async def idle() -> bool:
        return await running() == 0

    await until(idle, 30)


async def comes_back_after_its_death(
    client: openai.AsyncOpenAI, stack: Stack, server: ForeignServer, text: str
) -> None:
    """Kill the server, see that nothing is sent there, start it again and get the same text."""
    server.stop()
    await stack.unready(timeout_s=60)
    await asyncio.to_thread(server.start)
    await stack.ready(timeout_s=120)
    again = await client.chat.completions.create(**ASK, max_tokens=32)
    assert again.choices[0].message.content == text
