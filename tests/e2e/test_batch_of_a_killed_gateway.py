"""kill -9 of the gateway that runs a batch: every line is answered once, and billed once."""

import json

import asyncpg
import httpx
import pytest
from redis.asyncio import Redis

from tests.e2e.ledger_view import ledger_is_balanced, nothing_is_reserved, requests
from tests.processes import Stack, free_port, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

LINES = 300
CHAT = "/v1/chat/completions"


async def test_a_batch_whose_gateway_is_killed_answers_and_bills_every_line_once(
    stack: Stack, database: asyncpg.Connection, redis: Redis
):
    heir_port = free_port()
    stack.add_gateway("heir", port=heir_port)
    stack.start(*(name for name in stack.names if name != "heir"))
    await stack.ready()
    headers = {"authorization": f"Bearer {stack.api_key}"}
    async with (
        httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=30) as first,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{heir_port}", headers=headers, timeout=30) as heir,
    ):
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        lines = [
            json.dumps({"custom_id": f"line-{n}", "method": "POST", "url": CHAT, "body": asked}) for n in range(LINES)
        ]
        file = ("in.jsonl", "\n".join(lines).encode(), "application/jsonl")
        stored = (await first.post("/v1/files", files={"file": file}, data={"purpose": "batch"})).json()
        wanted = {"input_file_id": stored["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = f"/v1/batches/{(await first.post('/v1/batches', json=wanted)).json()['id']}"

        async def some_are_done() -> bool:
            counts = (await first.get(batch)).json()["request_counts"]
            assert counts["completed"] < LINES, "it was over before the gateway was killed"
            return bool(counts["completed"] >= LINES // 6)

        await until(some_are_done)
        stack.kill("gateway")
        stack.start("heir")

        async def is_completed() -> bool:
            try:
                return bool((await heir.get(batch)).json()["status"] == "completed")
            except httpx.TransportError:
                return False

        await until(is_completed, 90)
        done = (await heir.get(batch)).json()
        assert done["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        output = (await heir.get(f"/v1/files/{done['output_file_id']}/content")).text.splitlines()
    answers = [json.loads(line) for line in output]
    assert [one["custom_id"] for one in answers] == [f"line-{n}" for n in range(LINES)]
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in answers)

    async def all_is_billed() -> bool:
        rows = (await requests(database)).values()
        return {str(row["request_id"]) for row in rows} >= {one["response"]["request_id"] for one in answers}

    await until(all_is_billed)
    await until(lambda: nothing_is_reserved(redis))
    rows = (await requests(database)).values()
    paid = [row for row in rows if row["cost"]]
    assert len(paid) == LINES
    free = [row for row in rows if not row["cost"]]
    assert len(free) == len(rows) - LINES
    assert {row["outcome"] for row in free if row["cause"] != "repeated"} <= {"interrupted", "lost", "refused"}
    assert all(row["batch"] for row in rows)
    assert await ledger_is_balanced(database)
