"""`pdgate why` finds a request wherever it is: waiting, running, settled, billed."""

import asyncio
import json
import os
import subprocess
import sys

import httpx

from billing.database import create_engine
from contracts import keys
from contracts.catalog import read_catalog
from contracts.identity import new_rid
from contracts.resp import redis_client
from contracts.wire import FIELD, decode_inbox
from pdgate.story import Story, rid_of, story_of
from tests.processes import REPOSITORY, Stack, until


def why(stack: Stack, rid: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "DATABASE_URL": stack.database_url, "REDIS_URL": stack.redis_url,
        "PDGATE_CATALOG": str(stack.catalog_file), "SCHEDULER_DECISION_LOG": str(stack.folder / "decisions"),
    }  # fmt: skip
    command = [sys.executable, "-m", "pdgate.cli", "why", rid, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


async def told(stack: Stack, name: str) -> Story:
    engine = create_engine(stack.database_url)
    try:
        async with redis_client(stack.redis_url) as redis, engine.connect() as db:
            return await story_of(
                rid_of(name),
                redis=redis,
                db=db,
                catalog=read_catalog(stack.catalog_file),
                decisions=stack.folder / "decisions",
            )
    finally:
        await engine.dispose()


async def test_a_request_is_found_while_it_runs_when_it_is_settled_and_when_it_is_billed(stack: Stack) -> None:
    stack.add_scheduler(environ={"SCHEDULER_DECISION_LOG": str(stack.folder / "decisions")})
    stack.start()
    await stack.ready()
    stack.kill("billing")  # so that what is settled stays unbilled for a while
    body = {
        "model": "tiny", "stream": True, "max_tokens": 400, "min_tokens": 400,
        "messages": [{"role": "user", "content": "Tell me of the sea"}],
    }  # fmt: skip
    headers = {"authorization": f"Bearer {stack.api_key}"}
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        rid = answer.headers["x-request-id"]
        pieces = answer.aiter_bytes()
        await anext(pieces)
        running = await told(stack, rid)
        async for _ in pieces:
            pass
    assert (running.status, running.organisation, running.bill) == ("running", stack.org, None)
    (placed,) = running.decisions
    assert (placed.path, placed.prefill, placed.decode) == ("pd", "prefill-0", "decode-0")
    assert (running.running_ms or 0) > 0

    async def is_settled() -> bool:
        return (await told(stack, rid)).status == "settled"

    await until(is_settled, 10)
    settled = await told(stack, f"chatcmpl-{rid}")
    assert settled.bill is not None
    assert settled.bill.outcome == "finished"
    assert settled.attempts == ()

    stack.start("billing")

    async def all_posted() -> bool:
        got = await told(stack, rid)
        return got.status == "billed" and len(got.attempts) == 2 and got.blame_from == "decision_log"

    await until(all_posted, 30, every_s=0.2)
    billed = await told(stack, rid)
    assert billed.bill == settled.bill
    meters = {meter.meter: meter for meter in billed.bill.meters}
    assert meters["decode"].tokens == 400
    assert meters["decode"].worker == "decode-0"
    assert sum(meter.cost for meter in meters.values()) == billed.bill.cost > 0
    (placed,) = billed.decisions
    assert placed.reason
    assert {(row.phase, row.worker) for row in billed.attempts} == {("prefill", "prefill-0"), ("decode", "decode-0")}
    assert billed.blamed == "none"
    screen = await asyncio.to_thread(why, stack, rid)
    assert screen.returncode == 0
    for said in ("nobody: all targets were met", "prefill-0 → decode-0", placed.reason, "EUR"):
        assert said in screen.stdout
    printed = json.loads((await asyncio.to_thread(why, stack, rid, "--json")).stdout)
    assert (printed["rid"], printed["status"], printed["bill"]["cost"]) == (rid, "billed", billed.bill.cost)


async def test_a_request_that_waits_is_found_in_the_inbox(stack: Stack, redis) -> None:
    stack.start("gateway", "scheduler", "prefill-0", "decode-0")
    await stack.ready()
    stack.kill("scheduler")
    pool = read_catalog(stack.catalog_file).pools[0]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "anyone there?"}]}
    headers = {"authorization": f"Bearer {stack.api_key}"}
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
        await until(lambda: redis.xlen(keys.inbox(pool)), 10)
        ((_, fields),) = await redis.xrange(keys.inbox(pool))
        rid = decode_inbox(fields[FIELD.encode()]).rid
        got = await told(stack, rid)
        asking.cancel()
    assert (got.status, got.tier, got.decisions) == ("queued", "default", ())


def test_an_unknown_request_is_a_clear_error(redis_url, database_url, catalog_file, tmp_path) -> None:
    stack = Stack(
        folder=tmp_path, redis_url=redis_url, database_url=database_url, catalog_file=catalog_file, models_dir=tmp_path
    )
    rid = new_rid(1_700_000_000_000)
    done = why(stack, rid)
    assert done.returncode == 2
    assert f"request {rid} is unknown" in done.stderr
    assert why(stack, "nonsense").returncode == 2
