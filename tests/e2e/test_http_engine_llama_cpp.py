"""llama.cpp's own server on this CPU, behind the whole stack as a unified worker of the http engine."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import asyncpg
import httpx
import pytest

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
from tests.processes import REPOSITORY, Stack, engine_python

LLAMA = REPOSITORY / ".llama" / "bin" / "python"  # made by `make e2e`
pytestmark = [
    pytest.mark.engine,
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not LLAMA.exists(), reason="llama.cpp is installed by make e2e"),
]

HERE = Path(__file__).with_name("llama_cpp")
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
    async with client_of(stack) as client:
        text = await answers_by_the_servers_counts(client, server, database)

        # More at once than it has slots: they wait with us, none is lost.
        async with asyncio.TaskGroup() as tasks:
            many = [tasks.create_task(client.chat.completions.create(**ASK, max_tokens=32)) for _ in range(6)]
        assert {answer.result().choices[0].message.content for answer in many} == {text}

        await stops_when_its_client_leaves(client, partial(busy_slots, server))
        await comes_back_after_its_death(client, stack, server, text)
