"""kill -9 of one process under load: finished requests are billed once, interrupted ones cost nothing."""

import asyncio
import json

import asyncpg
import httpx
import pytest
from redis.asyncio import Redis

from tests.e2e.ledger_view import ledger_is_balanced, meters_of, nothing_is_reserved, requests
from tests.processes import Stack, until

NUM_STREAMS = 24
NUM_TOKENS = 300


class Seen:
    """What one client read."""

    def __init__(self) -> None:
        self.rid = ""
        self.text = ""
        self.usage: dict | None = None
        self.done = False


async def one_stream(
    http: httpx.AsyncClient, number: int, seen: Seen, *, model: str = "tiny", max_tokens: int = NUM_TOKENS
) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell story {number}"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            seen.rid = answer.headers.get("x-request-id", "")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    seen.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if event.get("usage"):
                        seen.usage = event["usage"]
                    elif event.get("choices"):
                        seen.text += event["choices"][0]["delta"].get("content") or ""
    except httpx.TransportError:
        return  # the gateway died under it


async def load(stack: Stack, kill: str, *, after_tokens: int, restart: bool = True) -> list[Seen]:
    """Run all streams; when the first has produced some text, kill a process and start it again."""
    seen = [Seen() for _ in range(NUM_STREAMS)]
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    async with (
        httpx.AsyncClient(
            base_url=stack.url, headers=headers, timeout=60, limits=httpx.Limits(max_connections=100)
        ) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for number, s in enumerate(seen):
            tasks.create_task(one_stream(http, number, s))
        await until(lambda: sum(len(s.text) for s in seen) > after_tokens, 30, every_s=0.01)
        stack.kill(kill)
        if restart:
            stack.start(kill)
    return seen


async def check_the_books(seen: list[Seen], database: asyncpg.Connection, redis: Redis) -> None:
    await until(lambda: nothing_is_reserved(redis), 60)
    finished = [s for s in seen if s.done]

    async def all_billed() -> bool:
        rows = await requests(database)
        return all(s.rid in rows for s in finished)

    await until(all_billed, 30)
    rows = await requests(database)
    for s in finished:
        assert rows[s.rid]["outcome"] == "finished"
        meters = await meters_of(database, s.rid)
        assert meters["decode"] == s.usage["completion_tokens"] == NUM_TOKENS
        assert meters["prefill_computed"] + meters["prefill_cached"] == s.usage["prompt_tokens"]
    for s in seen:
        row = rows.get(s.rid)
        if not s.done and row is not None and row["outcome"] != "finished":
            # `finished` here = the gateway acknowledged the end and died before the client read it
            billable = await database.fetchval(
                "SELECT bool_or(billable OR cost > 0) FROM billing.usage_record WHERE request_id = $1::uuid", s.rid
            )
            assert not billable
    assert await ledger_is_balanced(database)


@pytest.mark.parametrize("process", ["billing", "scheduler", "gateway"])
async def test_killing_a_process_loses_and_doubles_nothing(
    stack: Stack, database: asyncpg.Connection, redis: Redis, process: str
):
    stack.start()
    await stack.ready()
    seen = await load(stack, process, after_tokens=200)
    if process == "gateway":
        assert not all(s.done for s in seen), "the gateway was killed too late to prove anything"
    else:
        assert all(s.done for s in seen), f"killing {process} cut a stream"
    await check_the_books(seen, database, redis)
    await stack.ready()
    again = await load(stack, "billing", after_tokens=0)
    assert all(s.done for s in again)
    await check_the_books(again, database, redis)


async def workers_agree(database: asyncpg.Connection) -> None:
    """The workers that are left confirm what was billed: a continuation says what it went on from."""

    async def all_recorded() -> bool:
        missing = await database.fetchval(
            "SELECT count(*) FROM billing.request AS r WHERE NOT EXISTS (SELECT 1 FROM billing.attempt_cost AS a"
            " WHERE a.request_id = r.request_id AND a.attempt = r.attempts AND a.phase <> 'prefill')"
        )
        return bool(missing == 0)

    await until(all_recorded, 30)
    wrong = await database.fetch(
        "SELECT r.request_id, u.tokens, a.completion_tokens, a.prompt_tokens - p.tokens AS delivered_before"
        " FROM billing.request AS r JOIN billing.attempt_cost AS a ON a.request_id = r.request_id"
        " AND a.attempt = r.attempts AND a.phase <> 'prefill'"
        " JOIN billing.usage_record AS u ON u.request_id = r.request_id AND u.meter = 'decode'"
        " JOIN (SELECT request_id, sum(tokens) AS tokens FROM billing.usage_record"
        " WHERE meter IN ('prefill_computed', 'prefill_cached') GROUP BY 1) AS p ON p.request_id = r.request_id"
        " WHERE r.outcome = 'finished' AND u.tokens <> a.completion_tokens + a.prompt_tokens - p.tokens"
    )
    assert not wrong, [dict(row) for row in wrong]


@pytest.mark.parametrize("spare", ["decode", "unified"])
async def test_killing_a_decode_worker_cuts_no_stream(
    stack: Stack, database: asyncpg.Connection, redis: Redis, spare: str
):
    """Every answer goes on elsewhere; what the client reads is what one undisturbed worker would have said."""
    stack.start()
    await stack.ready()
    undisturbed = [s.text for s in await load(stack, "billing", after_tokens=0)]
    stack.add_worker("spare", role=spare, environ={"WORKER_STEP_MS": "5"})
    stack.start("spare")
    await until(lambda: "worker_ready" in stack.log("spare"), 30)
    seen = await load(stack, "decode-0", after_tokens=2000)
    assert all(s.done for s in seen), "killing the decode worker cut a stream"
    assert [s.text for s in seen] == undisturbed
    await check_the_books(seen, database, redis)
    assert "continues" in stack.log("gateway"), "the worker was killed too late to prove anything"
    rows = await requests(database)
    assert max(rows[s.rid]["attempts"] for s in seen) == 2
    await workers_agree(database)


async def test_a_standby_scheduler_leads_when_the_leader_dies(stack: Stack, database: asyncpg.Connection, redis: Redis):
    stack.start()
    await stack.ready()
    stack.add_scheduler("standby")
    stack.start("standby")
    seen = await load(stack, "scheduler", after_tokens=200, restart=False)
    assert all(s.done for s in seen)
    await check_the_books(seen, database, redis)
    again = await load(stack, "billing", after_tokens=0)
    assert all(s.done for s in again), "the standby does not serve"
    await check_the_books(again, database, redis)
