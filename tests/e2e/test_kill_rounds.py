"""kill -9 of any process at random points under load, round after round: nothing is lost, doubled or kept reserved."""

import asyncio
import math
import os
import random
import re
import shutil
import time
from datetime import UTC, datetime

import asyncpg
import pytest
import structlog
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.attempts import AttemptSink
from billing.budgets import Budget, Budgets, set_budget
from billing.database import create_engine
from billing.partitions import Partitions
from billing.restore import read_journals, restore
from contracts import keys
from contracts.identity import NUM_SHARDS
from contracts.resp import redis_client
from tests.e2e.kill_rig import Load, Servers
from tests.e2e.ledger_view import (
    ledger_is_balanced,
    meters_of,
    nothing_is_reserved,
    requests,
    restored,
    what_is_reserved,
)
from tests.processes import Stack, until

log = structlog.get_logger()

PROCESSES = ("decode-0", "prefill-0", "gateway", "scheduler", "billing")
SERVERS = ("valkey", "postgres")
EURO = 10**9
UNACKNOWLEDGED_S = 1.0  # gateway/attach.py:ACK_WITHIN_S is 100 ms; the rest is a busy machine, on both sides
ROUNDS = int(os.environ.get("PDGATE_KILL_ROUNDS", "200"))


async def rounds(stack: Stack, servers: Servers, number: int, *, seed: int) -> None:
    engine = create_engine(stack.database_url)
    redis = redis_client(stack.redis_url)
    await ready_with_a_budget(stack, engine, redis)
    choose = random.Random(seed)
    victims = [*PROCESSES, *SERVERS]
    load = Load(stack)
    gateway_killed_s: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        for round_number in range(number):
            before = len(load.finished)
            await until(lambda before=before: len(load.finished) >= before + 3, 90, every_s=0.02)
            await asyncio.sleep(choose.uniform(0, 0.3))  # the point is random, not the order
            victim = victims[round_number % len(victims)] if number <= len(victims) else choose.choice(victims)
            if victim in SERVERS:
                await asyncio.to_thread(servers.kill, victim)
                await asyncio.to_thread(servers.start, victim)
            else:
                if victim == "gateway":
                    gateway_killed_s.append(time.monotonic())
                stack.kill(victim)
                stack.start(victim)
        before = len(load.finished)
        await until(lambda: len(load.finished) >= before + 5, 90, every_s=0.05)
        load.stopping = True
    try:
        await check(stack, redis, load, engine, gateway_killed_s)
    finally:
        await redis.aclose()
        await engine.dispose()


async def ready_with_a_budget(stack: Stack, engine: AsyncEngine, redis: Redis) -> None:
    """Start the stack, whose organisation has a budget that it will not reach."""
    budget = Budget(organisation=stack.org, scope="org", scope_id=stack.org, amount=1000 * EURO)
    async with engine.begin() as conn:
        await set_budget(conn, budget)
    stack.start()
    await stack.ready(timeout_s=60)
    await until(lambda: redis.hexists(keys.budget(stack.org, "org", stack.org), "limit"), 30)


async def check(
    stack: Stack,
    redis: Redis,
    load: Load,
    engine: AsyncEngine,
    gateway_killed_s: list[float],
    *,
    with_redis: bool = False,
) -> None:
    """Wait until everything is settled, and compare what callers read with the books.

    `with_redis`: it was killed together with the gateway, so what neither acknowledged has no row either.
    """

    def killed_s_after(rid: str) -> float:
        return min((abs(killed_s - load.ended_s[rid]) for killed_s in gateway_killed_s), default=math.inf)

    database = await asyncpg.connect(stack.database_url)
    # What nobody settled is swept two minutes after its deadline; that is not waited for, so nothing may need it.
    try:
        await until(lambda: nothing_is_reserved(redis), 90)
    except TimeoutError:
        left = await what_is_reserved(redis)
        raise AssertionError(told_of(stack, "reserved after 90 s", left)) from None

    async def all_billed() -> bool:
        missing = load.finished.keys() - (await requests(database)).keys()
        return not {rid for rid in missing if not with_redis or killed_s_after(rid) >= UNACKNOWLEDGED_S}

    try:
        await until(all_billed, 60)
    except TimeoutError:
        missing = sorted(load.finished.keys() - (await requests(database)).keys())
        streams = [keys.usage_stream(shard) for shard in range(NUM_SHARDS)]
        waiting = [f"{name}: {entries}" for name in streams if (entries := await redis.xrange(name))]
        graves = [keys.dead_letters(shard) for shard in range(NUM_SHARDS)]
        dead = [f"dead: {entries}" for name in graves if (entries := await redis.xrange(name))]
        raise AssertionError(told_of(stack, "not billed after 60 s", [*missing, *waiting, *dead])) from None
    rows = await requests(database)
    unacknowledged: list[float] = []
    for rid, usage in load.finished.items():
        row = rows.get(rid)
        if row is None or row["cause"] == "gateway_dead":  # killed after its last byte to the client, before its word
            by = row and (row["settled_by"], row["recorded_at"].isoformat(), row["finish_reason"], row["estimated"])
            assert killed_s_after(rid) < UNACKNOWLEDGED_S, (killed_s_after(rid), rid, by)
            unacknowledged.append(round(killed_s_after(rid), 3))
            continue
        meters = await meters_of(database, rid)
        assert rows[rid]["outcome"] == "finished", dict(rows[rid])
        assert meters["decode"] == usage["completion_tokens"]
        assert meters["prefill_computed"] + meters["prefill_cached"] == usage["prompt_tokens"]
    log.info(
        "kill_rounds",
        finished=len(load.finished),
        broken=len(load.broken),
        unacknowledged_s=unacknowledged,
        restored={by: len(restored(stack.log(by))) for by in ("gateway", "billing")},
    )
    assert len(unacknowledged) <= len(gateway_killed_s)
    assert all(row["cost"] == 0 for row in rows.values() if row["outcome"] not in ("finished", "client_left"))
    assert await ledger_is_balanced(database)
    cost = await database.fetchval("SELECT coalesce(sum(cost), 0) FROM billing.request")
    posted = await database.fetchval(
        "SELECT coalesce(sum(amount), 0) FROM billing.ledger_entry JOIN billing.account ON id = account_id"
        " WHERE kind = 'receivable'"
    )
    assert cost == posted
    await Budgets(engine, redis).sync(now=datetime.now(UTC))
    raw = await redis.hgetall(keys.budget(stack.org, "org", stack.org))
    assert int(raw.get(b"reserved", 0)) == 0, "reserved money is back to zero"
    assert int(raw[b"spent"]) == cost
    await database.close()


def told_of(stack: Stack, what: str, found: list[str]) -> str:
    """Return what was found, and each line of a log that names one of its requests."""
    rids = set(re.findall(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f-]{21}", " ".join(found)))
    logs = [f"{name}: {line}" for name in stack.names for line in stack.log(name).splitlines()]
    lines = [line for line in logs if any(rid in line for rid in rids)]
    return "\n".join([f"{what}, at {time.time():.1f}:", *found, *lines, "the last of all logs:", *logs[-20:]])


async def test_each_process_killed_once_under_load_loses_doubles_and_keeps_nothing(killable):
    await rounds(*killable, 7, seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_two_hundred_kills_at_random_points_lose_double_and_keep_nothing(killable):
    await rounds(*killable, ROUNDS, seed=int(time.time()))


@pytest.mark.chaos
async def test_what_a_lost_redis_took_along_is_restored_from_the_workers_journals(killable):
    """Redis comes back empty, as after the promotion of a replica that had nothing, and the gateway died with it."""
    stack, servers = killable
    stack.start(
        "gateway", "scheduler", "prefill-0", "decode-0", "unified-0"
    )  # no billing: every usage event is in Redis alone
    await stack.ready(timeout_s=60)
    load = Load(stack)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        await until(lambda: len(load.finished) >= 30, 90)
        load.stopping = True
    redis = redis_client(stack.redis_url)
    engine = create_engine(stack.database_url)
    await until(lambda: nothing_is_reserved(redis), 60)
    marked = {mark[0] for mark in (await asyncio.to_thread(read_journals, stack.folder)).delivered}
    await until(lambda: load.finished.keys() <= marked or reread(stack, marked), 30)
    stack.kill("gateway")  # it would settle again what it had settled
    await asyncio.to_thread(servers.kill, "valkey")
    await asyncio.to_thread(shutil.rmtree, servers.folder / "valkey")
    await asyncio.to_thread(servers.start, "valkey")
    stack.start("gateway", "billing")
    database = await asyncpg.connect(stack.database_url)

    async def all_billed() -> bool:
        return load.finished.keys() <= (await requests(database)).keys()

    await until(all_billed, 90)
    assert restored(stack.log("billing")) >= load.finished.keys()
    journals = await asyncio.to_thread(read_journals, stack.folder)
    again = await restore(engine, redis, AttemptSink(engine, Partitions(engine)), journals)
    assert again.requests == ()
    for rid, usage in load.finished.items():
        meters = await meters_of(database, rid)
        assert meters["decode"] == usage["completion_tokens"]
        assert meters["prefill_computed"] + meters["prefill_cached"] == usage["prompt_tokens"]
    assert await ledger_is_balanced(database)
    await database.close()
    await redis.aclose()
    await engine.dispose()


def reread(stack: Stack, marked: set[str]) -> bool:
    marked |= {mark[0] for mark in read_journals(stack.folder).delivered}
    return False
