"""llama.cpp's own server on this CPU, behind the whole stack as a unified worker of the http engine."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import httpx
import openai
import pytest

from tests.e2e.foreign_server import NAME, ForeignServer, stack_before
from tests.e2e.ledger_view import meters_of, request_row
from tests.engines import tiny_model
from tests.processes import REPOSITORY, Stack, engine_python, until

LLAMA = REPOSITORY / ".llama" / "bin" / "python"  # made by `make e2e`
pytestmark = [
    pytest.mark.engine,
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not LLAMA.exists(), reason="llama.cpp is installed by make e2e"),
]

HERE = Path(__file__).with_name("llama_cpp")
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Once upon a time, near the sea"}], "temperature": 0}
SLOTS = "2"  # of serve.py


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForeignServer]:
    weights = tmp_path / "tiny.gguf"
    subprocess.run(
        [engine_python(), str(HERE / "to_gguf.py"), str(tiny_model()), str(weights)], check=True, timeout=120
    )
    foreign = ForeignServer(
        tmp_path, lambda port: [str(LLAMA), str(HERE / "serve.py"), str(weights), str(port), NAME], os.environ
    )
    try:
        foreign.start()
        yield foreign
    finally:
        foreign.stop()


@pytest.fixture
async def stack(server: ForeignServer, stack_folder: Path, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    async with stack_before(
        server, stack_folder, redis_url, database_url, WORKER_MAX_RUNNING=SLOTS, WORKER_MAX_TOTAL_TOKENS="4096"
    ) as stack:
        yield stack


async def busy_slots(server: ForeignServer) -> int:
    """Return how many of the server's slots compute."""
    async with httpx.AsyncClient(timeout=10) as http:
        slots = (await http.get(f"{server.url}/slots")).json()
    return sum(slot["is_processing"] for slot in slots)


async def test_llama_cpp_serves_tenants_with_its_own_counts_and_its_death_is_seen(
    stack: Stack, server: ForeignServer, database: asyncpg.Connection
):
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key=stack.api_key, max_retries=0, timeout=120
    ) as client:
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
        assert told.usage.prompt_tokens_details.cached_tokens > 0  # its own count of the second turn
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

        # More at once than it has slots: they wait with us, none is lost.
        async with asyncio.TaskGroup() as tasks:
            many = [tasks.create_task(client.chat.completions.create(**ASK, max_tokens=32)) for _ in range(6)]
        assert {answer.result().choices[0].message.content for answer in many} == {text}

        # A client that leaves stops the server's work.
        stream = await client.chat.completions.create(
            **ASK, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 5:
                break
        assert await busy_slots(server) == 1
        await stream.close()

        async def idle() -> bool:
            return await busy_slots(server) == 0

        await until(idle, 30)

        server.stop()
        await stack.unready(timeout_s=60)
        await asyncio.to_thread(server.start)
        await stack.ready(timeout_s=120)
        again = await client.chat.completions.create(**ASK, max_tokens=32)
    assert again.choices[0].message.content == text
