"""vLLM's own server on this CPU, behind the whole stack as a unified worker of the http engine."""

import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import asyncpg
import httpx
import openai
import pytest

from tests.e2e.foreign_server import (
    NAME,
    ForeignServer,
    answers_by_the_servers_counts,
    client_of,
    comes_back_after_its_death,
    stack_before,
    stops_when_its_client_leaves,
)
from tests.engines import tiny_model
from tests.processes import REPOSITORY, Stack

VLLM = REPOSITORY / ".vllm" / "bin" / "python"  # made by `make e2e`
pytestmark = [
    pytest.mark.engine,
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is installed by make e2e"),
]

AT_ONCE = "2"
CONTEXT_TOKENS = "2048"


def command(port: int) -> list[str]:
    """Return what serves SmolLM2, whose tokenizer the tiny model has: vLLM has no CPU kernel for heads of 16."""
    words = {
        "model": str(tiny_model().parent / "smollm2"),
        "served-model-name": NAME,
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": CONTEXT_TOKENS,
        "max-num-seqs": AT_ONCE,
        "block-size": "32",  # of its prefix cache; the prompts are short
    }
    options = [text for name, value in words.items() for text in (f"--{name}", value)]
    return [
        *(str(VLLM), "-m", "vllm.entrypoints.openai.api_server", *options),
        *("--enforce-eager", "--enable-prompt-tokens-details"),
    ]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForeignServer]:
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    foreign = ForeignServer(tmp_path, command, {**os.environ, **own})
    try:
        foreign.start()
        yield foreign
    finally:
        foreign.stop()


@pytest.fixture
async def stack(server: ForeignServer, stack_folder: Path, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    async with stack_before(
        server,
        stack_folder,
        redis_url,
        database_url,
        WORKER_MAX_RUNNING=AT_ONCE,
        WORKER_MAX_TOTAL_TOKENS="4096",
        WORKER_HTTP_FIELDS='{"return_token_ids": true}',
    ) as stack:
        yield stack


async def num_running(server: ForeignServer) -> int:
    """Return how many requests the server computes, by its own gauge."""
    async with httpx.AsyncClient(timeout=10) as http:
        page = (await http.get(f"{server.url}/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
    return round(sum(float(line.rpartition(" ")[2]) for line in lines))


async def cached_tokens(client: openai.AsyncOpenAI, prompt: str) -> int:
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt}], max_tokens=2
    )
    return answer.usage.prompt_tokens_details.cached_tokens


async def test_vllm_serves_tenants_with_its_own_counts_and_its_death_is_seen(
    stack: Stack, server: ForeignServer, database: asyncpg.Connection
):
    async with client_of(stack) as client:
        text = await answers_by_the_servers_counts(client, server, database)

        # What one tenant had computed is not found by another: vLLM keeps to the salt of its cache.
        story = "Tell me of the sea and of those who live there. " * 20
        assert await cached_tokens(client, story) < 48  # no more than the template's first blocks
        assert await cached_tokens(client, story) > 100
        await stack.seed()  # another organisation and key
        async with client_of(stack) as other:
            assert await cached_tokens(other, story) == 0
            assert await cached_tokens(other, story) > 100

        await stops_when_its_client_leaves(client, partial(num_running, server))
        await comes_back_after_its_death(client, stack, server, text)
