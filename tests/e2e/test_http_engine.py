"""A server of SGLang that runs already, on this CPU, behind the whole stack as a unified worker of the http engine."""

import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import asyncpg
import httpx
import openai
import pytest

from contracts.lifecycle import Role
from pdgate.libibverbs import library_environment
from tests.e2e.foreign_server import (
    ASK,
    NAME,
    ForeignServer,
    answers_by_the_servers_counts,
    client_of,
    comes_back_after_its_death,
    stack_before,
    stops_when_its_client_leaves,
)
from tests.engines import tiny_model
from tests.processes import Stack, engine_python
from workers.engines.sglang_options import CPU_TOKENS, SglangOptions, environment

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(840)]

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


async def running(server: ForeignServer) -> int:
    """Return how many requests the server has, waiting ones too."""
    async with httpx.AsyncClient(timeout=10) as http:
        page = (await http.get(f"{server.url}/v1/loads")).json()
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in page["loads"])


async def test_a_server_that_runs_already_serves_tenants_with_its_own_counts_and_its_death_is_seen(
    stack: Stack, server: ForeignServer, database: asyncpg.Connection
):
    async with client_of(stack) as client:
        text = await answers_by_the_servers_counts(client, server, database)
        await stops_when_its_client_leaves(client, partial(running, server))
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**ASK, max_tokens=4, logprobs=True)
        assert refused.value.param == "logprobs"
        await comes_back_after_its_death(client, stack, server, text)
