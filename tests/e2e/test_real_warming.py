"""A system prompt computed ahead on the real engine: the first request finds it, and it costs prefill only."""

import asyncpg
import httpx
import pytest

from tests.e2e.ledger_view import meters_of
from tests.processes import Stack, until

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(600)]

SYSTEM = {"role": "system", "content": "You are a clerk of the harbour, and you know every ship. " * 8}
GREEDY = {"temperature": 0, "max_tokens": 16}


@pytest.mark.parametrize("model", ["tiny", "reference"])  # a pair, and a unified worker
async def test_the_first_request_after_a_warm_up_finds_its_system_prompt(
    real_stack: Stack, database: asyncpg.Connection, model: str
):
    headers = {"Authorization": f"Bearer {real_stack.api_key}"}
    async with httpx.AsyncClient(base_url=real_stack.url, headers=headers, timeout=120) as http:

        async def post(path: str, **body) -> dict:
            answer = await http.post(path, json={"model": model, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        async def ask(system: dict, question: str) -> dict:
            messages = [system, {"role": "user", "content": question}]
            return await post("/v1/chat/completions", messages=messages, **GREEDY)

        warmed = await post("/v1/prefixes/warm", messages=[SYSTEM])
        cold = await ask({"role": "system", "content": "Nobody warmed this. " + SYSTEM["content"]}, "Which ship?")
        first = await ask(SYSTEM, "Which ship?")
        again = await post("/v1/prefixes/warm", messages=[SYSTEM])
    assert (warmed["object"], warmed["replicas"]) == ("prefix.warmed", 1)
    assert warmed["usage"]["completion_tokens"] == 0
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] >= warmed["prompt_tokens"] - 8  # but for the end
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] < 64  # the template's own beginning
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= warmed["prompt_tokens"] - 1

    async def booked() -> bool:
        return len(await meters_of(database, warmed["pdgate"]["rid"])) == 3

    await until(booked, 30)
    assert await meters_of(database, warmed["pdgate"]["rid"]) == {
        "prefill_computed": warmed["prompt_tokens"],
        "prefill_cached": 0,
        "decode": 0,
    }
