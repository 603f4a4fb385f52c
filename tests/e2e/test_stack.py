"""One request through every process, with timed workers: what the client reads is what is billed."""

import asyncpg
import httpx
import openai
import pytest
from redis.asyncio import Redis

from tests.e2e.ledger_view import ledger_is_balanced, meters_of, nothing_is_reserved, request_row
from tests.processes import Stack, until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def client_of(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=stack.api_key, max_retries=0, timeout=30)


async def worker_counts(database: asyncpg.Connection, rid: str) -> dict[str, int]:
    """The workers' own figures: the prompt from prefill, the output from decode."""
    rows = await database.fetch("SELECT * FROM billing.attempt_cost WHERE request_id = $1::uuid", rid)
    by_phase = {row["phase"]: row for row in rows}
    prompt = by_phase["prefill"]
    return {
        "prefill_computed": prompt["prompt_tokens"] - prompt["cached_tokens"],
        "prefill_cached": prompt["cached_tokens"],
        "decode": by_phase["decode"]["completion_tokens"],
    }


async def billed(database: asyncpg.Connection, rid: str) -> dict[str, int]:
    async def all_there() -> bool:
        return len(await meters_of(database, rid)) == 3 and bool(
            await database.fetchval("SELECT count(*) = 2 FROM billing.attempt_cost WHERE request_id = $1::uuid", rid)
        )

    await until(all_there, 15)
    return await meters_of(database, rid)


async def test_the_answer_the_usage_rows_and_the_workers_counts_agree(
    stack: Stack, database: asyncpg.Connection, redis: Redis
):
    stack.start()
    await stack.ready()
    async with client_of(stack) as client:
        whole = await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=20, temperature=0)
        rid = whole.model_extra["pdgate"]["rid"]
        assert whole.usage is not None
        assert whole.choices[0].message.content
        first = {
            "prefill_computed": whole.usage.prompt_tokens - whole.usage.prompt_tokens_details.cached_tokens,
            "prefill_cached": whole.usage.prompt_tokens_details.cached_tokens,
            "decode": whole.usage.completion_tokens,
        }
        assert first == await billed(database, rid) == await worker_counts(database, rid)

        text, usage, pdgate = "", None, None
        stream = await client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            if chunk.choices:
                assert chunk.usage is None
                assert chunk.system_fingerprint == "simulated", "every chunk says that a latency model made it"
                text += chunk.choices[0].delta.content or ""
            else:
                usage, pdgate = chunk.usage, chunk.model_extra["pdgate"]
        assert text == whole.choices[0].message.content, "a stream says what a whole answer says"
        assert pdgate["path"] == "pd"
        assert pdgate["hand_off"] == "direct"
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        second = {
            "prefill_computed": usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens,
            "prefill_cached": usage.prompt_tokens_details.cached_tokens,
            "decode": usage.completion_tokens,
        }
        assert second == await billed(database, pdgate["rid"]) == await worker_counts(database, pdgate["rid"])
        row = await request_row(database, pdgate["rid"])
        assert (row["path"], row["hand_off"], row["outcome"]) == ("pd", "direct", "finished")

    async with httpx.AsyncClient(base_url=stack.url, headers={"Authorization": f"Bearer {stack.api_key}"}) as http:
        shown = (await http.get(f"/v1/requests/{rid}")).json()
    assert shown["path"] == "pd"
    assert {record["meter"]: record["tokens"] for record in shown["meters"]} == first
    assert await ledger_is_balanced(database)
    await until(lambda: nothing_is_reserved(redis), 10)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_pays_for_what_the_worker_did_and_no_more(
    stack: Stack, database: asyncpg.Connection, redis: Redis, stream: bool
):
    stack.start()
    await stack.ready()
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 1500, "temperature": 0, "stream": stream}
    async with httpx.AsyncClient(
        base_url=stack.url, headers={"Authorization": f"Bearer {stack.api_key}"}, timeout=30
    ) as http:
        if stream:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                seen = 0
                async for line in answer.aiter_lines():
                    seen += '"content":"' in line
                    if seen > 5:
                        break
        else:
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/v1/chat/completions", json=body, timeout=1.0)

    async def settled() -> bool:
        return await database.fetchval("SELECT count(*) FROM billing.request") == 1

    await until(settled, 15)
    row = await database.fetchrow("SELECT * FROM billing.request")
    rid = str(row["request_id"])
    assert row["outcome"] == "client_left"
    meters = await billed(database, rid)
    assert meters == await worker_counts(database, rid)
    # 1,500 steps of 5 ms would take 7.5 s: the engine stopped soon after the client left.
    assert 0 < meters["decode"] < 1000
    assert await database.fetchval("SELECT bool_and(billable) FROM billing.usage_record")
    await until(lambda: nothing_is_reserved(redis), 10)
