"""Whoever leaves, by whatever endpoint: each engine makes at most the token it was making.

Steps are long, and a stream beside them is their clock: what began after it can have no more tokens than it has.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator

import asyncpg
import httpx
import pytest
from redis.asyncio import Redis

from tests.e2e.ledger_view import ledger_is_balanced, nothing_is_reserved
from tests.processes import Stack, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

STEP_MS = 1500
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LEAVING = {  # name, path, body, samples of each request, requests
    "stream": (CHAT, {"messages": HELLO, "stream": True}, 1, 1),
    "whole": (CHAT, {"messages": HELLO}, 1, 1),
    "samples": (CHAT, {"messages": HELLO, "n": 3, "stream": True}, 3, 1),
    "prompts": (COMPLETIONS, {"prompt": ["one", "two", "three"]}, 1, 3),
    "messages": ("/v1/messages", {"messages": HELLO}, 1, 1),
    "messages-stream": ("/v1/messages", {"messages": HELLO, "stream": True}, 1, 1),
    "responses": ("/v1/responses", {"input": "Hello", "store": False}, 1, 1),
}
NUM_REQUESTS = sum(requests for *_, requests in LEAVING.values())


@pytest.fixture
async def slow_stack(stack_folder, redis_url: str, database_url: str, catalog_file, models_dir) -> AsyncIterator[Stack]:
    text = catalog_file.read_text().replace("tpot_ms = 100", "tpot_ms = 9000")
    patient = stack_folder / "models.toml"
    patient.write_text(text.replace("ttft_ms = 2000", "ttft_ms = 60000"))
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=patient,
        models_dir=models_dir,
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler(cpu_profile=True)
    stack.add_billing()
    stack.add_worker("prefill-0", role="prefill", environ={"WORKER_STEP_MS": "5"})
    stack.add_worker("decode-0", role="decode", environ={"WORKER_STEP_MS": str(STEP_MS)})
    stack.start()
    await stack.ready()
    yield stack
    stack.stop()


async def test_nobody_who_leaves_gets_more_than_the_step_that_ran(
    slow_stack: Stack, database: asyncpg.Connection, redis: Redis
):
    headers = {"authorization": f"Bearer {slow_stack.api_key}"}
    common = {"model": "tiny", "max_tokens": 400}

    async def leave_when_told(path: str, body: dict) -> None:
        length = {"max_output_tokens": 400, "model": "tiny"} if path == "/v1/responses" else common
        async with http.stream("POST", path, json={**length, **body}) as answer:
            async for _ in answer.aiter_bytes():
                pass

    async with httpx.AsyncClient(base_url=slow_stack.url, headers=headers, timeout=120) as http:
        clock = 0
        async with (
            http.stream("POST", CHAT, json={**common, "messages": HELLO, "stream": True}) as ticking,
            asyncio.TaskGroup() as tasks,
        ):
            lines = ticking.aiter_lines()

            async def tick() -> None:
                nonlocal clock
                async for line in lines:
                    if '"content":"' in line:
                        clock += 1
                        return
                raise AssertionError("the clock stopped")

            await tick()
            callers = [tasks.create_task(leave_when_told(path, body)) for path, body, *_ in LEAVING.values()]
            stored = (
                await http.post("/v1/responses", json={"model": "tiny", "input": "Hello", "background": True})
            ).json()
            line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {**common, "messages": HELLO}}
            file = await http.post(
                "/v1/files", files={"file": ("in.jsonl", json.dumps(line).encode())}, data={"purpose": "batch"}
            )
            wanted = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
            batch = (await http.post("/v1/batches", json=wanted)).json()
            for _ in range(5):
                await tick()
            running = json.loads((await http.get(f"/v1/batches/{batch['id']}")).text)["status"]
            assert running == "in_progress"
            await tick()
            for caller in callers:
                caller.cancel()
            assert (await http.post(f"/v1/responses/{stored['id']}/cancel")).status_code == 200
            assert (await http.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 200
            at_most = clock + 1
            for _ in range(3):
                await tick()  # the others' steps go on: what was left would get more tokens
    everything = NUM_REQUESTS + 3  # and the clock, the response and the batch's line

    async def all_settled() -> bool:
        return bool(await database.fetchval("SELECT count(*) FROM billing.request") == everything)

    await until(all_settled, 30)
    rows = await database.fetch(
        "SELECT r.outcome, r.request_id, u.tokens FROM billing.request r"
        " JOIN billing.usage_record u ON u.request_id = r.request_id AND u.meter = 'decode'"
    )
    assert {row["outcome"] for row in rows} == {"client_left"}
    ticking_id = uuid.UUID(ticking.headers["x-request-id"])
    (ticked,) = (row["tokens"] for row in rows if row["request_id"] == ticking_id)
    assert clock <= ticked <= clock + 1
    *singles, samples = sorted(row["tokens"] for row in rows if row["request_id"] != ticking_id)
    assert samples <= 3 * at_most
    assert singles[0] > 0
    assert singles[-1] <= at_most < ticked

    async def counted_alike() -> bool:
        """The workers' own counts say the same."""
        counted = await database.fetchval(
            "SELECT sum(completion_tokens) FROM billing.attempt_cost WHERE phase = 'decode'"
        )
        return bool(counted == sum(row["tokens"] for row in rows))

    await until(counted_alike, 30)
    await until(lambda: nothing_is_reserved(redis), 20)
    assert await ledger_is_balanced(database)
