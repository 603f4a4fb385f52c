"""A server of SGLang that runs already, on this CPU, behind the whole stack as a unified worker of the http engine."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import httpx
import openai
import pytest

from contracts.lifecycle import Role
from pdgate.libibverbs import library_environment
from tests.e2e.foreign_server import NAME, ForeignServer, stack_before
from tests.e2e.ledger_view import meters_of, request_row
from tests.engines import tiny_model
from tests.processes import Stack, engine_python, until
from workers.engines.sglang_options import CPU_TOKENS, SglangOptions, environment

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(840)]

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Once upon a time, near the sea"}], "temperature": 0}
ARGUMENTS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--mem-fraction-static", "0.9",
    "--max-total-tokens", str(CPU_TOKENS), "--enable-cache-report", "--skip-server-warmup", "--sleep-on-idle",
    "--served-model-name", NAME,
)  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForeignServer]:
    """`python -m sglang.launch_server`, as somebody else would have started it."""
    options = SglangOptions(
        role=Role.UNIFIED,
        model_path=str(tiny_model()),
        bootstrap_host="127.0.0.1",
        bootstrap_port=0,
        peer_timeout_s=60.0,
    )
    inherited = {**os.environ, **library_environment(Path(engine_python()).parents[2] / "lib")}
    variables = {**inherited, **environment(options, accelerator=False, inherited=inherited)}

    def command(port: int) -> list[str]:
        argv = [engine_python(), "-m", "sglang.launch_server", "--model-path", str(tiny_model())]
        return [*argv, "--host", "127.0.0.1", "--port", str(port), *ARGUMENTS]

    foreign = ForeignServer(tmp_path, command, variables)
    try:
        foreign.start()
        yield foreign
    finally:
        foreign.stop()


@pytest.fixture
async def stack(server: ForeignServer, stack_folder: Path, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    async with stack_before(server, stack_folder, redis_url, database_url) as stack:
        yield stack


async def test_a_server_that_runs_already_serves_tenants_with_its_own_counts_and_its_death_is_seen(
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
        assert told.usage.prompt_tokens_details.cached_tokens > 0  # SGLang's own count of the second turn
        rid = told.model_extra["pdgate"]["rid"]

        async def booked() -> bool:
            return len(await meters_of(database, rid)) == 3

        await until(booked, 30)
        meters = await meters_of(database, rid)
        assert meters["decode"] == 32
        assert meters["prefill_computed"] + meters["prefill_cached"] == told.usage.prompt_tokens
        assert not (await request_row(database, rid))["estimated"]

        # What it says through the stack is what it says when asked directly.
        plain = {"prompt": "def fibonacci(n):\n    ", "temperature": 0, "max_tokens": 32}
        through = await client.completions.create(model="tiny", **plain)
        async with httpx.AsyncClient(timeout=60) as http:
            direct = (await http.post(f"{server.url}/v1/completions", json={"model": "there", **plain})).json()
        assert through.choices[0].text == direct["choices"][0]["text"]
        assert through.usage.prompt_tokens == direct["usage"]["prompt_tokens"]

        # A client that leaves stops the server's work.
        stream = await client.chat.completions.create(**ASK, max_tokens=1500, stream=True, extra_body=IGNORE_EOS)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 5:
                break
        await stream.close()
        await until(lambda: idle(server), 30)

        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**ASK, max_tokens=4, logprobs=True)
        assert refused.value.param == "logprobs"

        server.stop()
        await stack.unready(timeout_s=60)
        await asyncio.to_thread(server.start)
        await stack.ready(timeout_s=120)
        again = await client.chat.completions.create(**ASK, max_tokens=32)
    assert again.choices[0].message.content == text


IGNORE_EOS = {"ignore_eos": True}


async def idle(server: ForeignServer) -> bool:
    """Whether nothing runs in the server."""
    async with httpx.AsyncClient(timeout=10) as http:
        page = (await http.get(f"{server.url}/v1/loads")).json()
    return all(load["num_running_reqs"] == load["num_waiting_reqs"] == 0 for load in page["loads"])
