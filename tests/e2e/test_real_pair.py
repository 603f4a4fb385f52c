"""The whole stack over the real SGLang pair: what a client reads is what one unified engine says, and is billed."""

import asyncpg
import httpx
import openai
import pytest
from redis.asyncio import Redis

from tests.e2e.ledger_view import ledger_is_balanced, meters_of, nothing_is_reserved, request_row
from tests.engines import Engines
from tests.processes import Stack, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

QUESTIONS = (
    "What is the capital of France?",
    "The quick brown fox jumps over",
    "Once upon a time, in a small village near the sea, there lived",
    "def fibonacci(n):\n    ",
    "List of planets in the solar system: " * 12,
)
NUM_TOKENS = 32


async def ask(stack: Stack, model: str, question: str, *, stream: bool) -> tuple[str, dict, dict]:
    """Return (text, usage, pdgate object) of one greedy answer."""
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key=stack.api_key, max_retries=0, timeout=120
    ) as client:
        common = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
        }
        if not stream:
            answer = await client.chat.completions.create(**common)
            return answer.choices[0].message.content, answer.usage.model_dump(), answer.model_extra["pdgate"]
        text, usage, pdgate = "", {}, {}
        async for chunk in await client.chat.completions.create(
            **common, stream=True, stream_options={"include_usage": True}
        ):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            else:
                usage, pdgate = chunk.usage.model_dump(), chunk.model_extra["pdgate"]
        return text, usage, pdgate


async def worker_counts(database: asyncpg.Connection, rid: str) -> dict[str, int]:
    rows = await database.fetch("SELECT * FROM billing.attempt_cost WHERE request_id = $1::uuid", rid)
    by_phase = {row["phase"]: row for row in rows}
    assert set(by_phase) == {"prefill", "decode"}
    prompt = by_phase["prefill"]
    return {
        "prefill_computed": prompt["prompt_tokens"] - prompt["cached_tokens"],
        "prefill_cached": prompt["cached_tokens"],
        "decode": by_phase["decode"]["completion_tokens"],
    }


async def settled(database: asyncpg.Connection, rid: str) -> None:
    async def booked() -> bool:
        return await database.fetchval(
            "SELECT (SELECT count(*) FROM billing.usage_record WHERE request_id = $1::uuid) = 3"
            " AND (SELECT count(*) FROM billing.attempt_cost WHERE request_id = $1::uuid) = 2",
            rid,
        )

    await until(booked, 30)


async def test_the_pair_says_what_a_unified_engine_says_and_the_meters_are_the_workers(
    real_stack: Stack, engines: Engines, database: asyncpg.Connection
):
    for number, question in enumerate(QUESTIONS):
        stream = number % 2 == 0
        expected, _, one = await ask(real_stack, "reference", question, stream=stream)
        text, usage, pdgate = await ask(real_stack, "tiny", question, stream=stream)
        assert (one["path"], pdgate["path"], pdgate["hand_off"]) == ("unified", "pd", "direct")
        assert text == expected
        await settled(database, pdgate["rid"])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told = {
            "prefill_computed": usage["prompt_tokens"] - cached,
            "prefill_cached": cached,
            "decode": usage["completion_tokens"],
        }
        assert told == await meters_of(database, pdgate["rid"]) == await worker_counts(database, pdgate["rid"])
    assert await ledger_is_balanced(database)


async def test_without_the_kv_payload_the_stack_says_something_else(real_stack: Stack, engines: Engines):
    expected, _, _ = await ask(real_stack, "reference", QUESTIONS[4], stream=False)
    engines.faults.write_text("drop_kv")
    try:
        text, _, pdgate = await ask(real_stack, "tiny", "Another start. " + QUESTIONS[4], stream=False)
        whole, _, _ = await ask(real_stack, "reference", "Another start. " + QUESTIONS[4], stream=False)
    finally:
        engines.faults.unlink()
    assert pdgate["path"] == "pd"
    assert text != whole
    assert expected != whole


async def test_a_client_that_leaves_stops_the_engine_and_pays_for_what_it_did(
    real_stack: Stack, engines: Engines, database: asyncpg.Connection
):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTIONS[1]}],
        "temperature": 0,
        "max_tokens": 1500,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {real_stack.api_key}"}
    async with (
        httpx.AsyncClient(base_url=real_stack.url, headers=headers, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        rid = answer.headers["x-request-id"]
        seen = 0
        async for line in answer.aiter_lines():
            seen += '"content":"' in line
            if seen > 5:
                break
    await settled(database, rid)
    row = await request_row(database, rid)
    assert row["outcome"] == "client_left"
    meters = await meters_of(database, rid)
    assert meters == await worker_counts(database, rid)
    assert 5 <= meters["decode"] < 1000  # of 1,500 that the model would have made
    assert row["billable"]
    redis = Redis.from_url(real_stack.redis_url, socket_timeout=None)
    try:
        await until(lambda: nothing_is_reserved(redis), 15)
    finally:
        await redis.aclose()
