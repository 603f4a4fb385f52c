"""kill -9 of any process at random points under load, round after round: nothing is lost, doubled or kept reserved."""

import asyncio
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import httpx
import pytest
from redis.asyncio import Redis

from billing.attempts import AttemptSink
from billing.budgets import Budget, Budgets, set_budget
from billing.database import create_engine
from billing.partitions import Partitions
from billing.restore import read_journals, restore
from contracts import keys
from contracts.resp import redis_client
from migrations.upgrade import upgrade
from pdgate.services import Service, ServiceError, start_postgres, start_valkey
from tests.e2e.ledger_view import ledger_is_balanced, meters_of, nothing_is_reserved, requests
from tests.processes import Stack, until

CALLERS = 8
PROCESSES = ("decode-0", "prefill-0", "gateway", "scheduler", "billing")
SERVERS = ("valkey", "postgres")
EURO = 10**9
ROUNDS = int(os.environ.get("PDGATE_KILL_ROUNDS", "200"))


class Servers:
    """Valkey and PostgreSQL of this test alone, since they are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, Service] = {}

    def start(self, name: str) -> Service:
        """Start a server; a killed PostgreSQL's last backends may hold its memory for a moment."""
        start = {"valkey": start_valkey, "postgres": start_postgres}[name]
        deadline_s = time.monotonic() + 30
        while True:
            try:
                self.running[name] = start(self.folder / name)
            except ServiceError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)
            else:
                return self.running[name]

    def kill(self, name: str) -> None:
        process = self.running[name].process
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def stop(self) -> None:
        for service in self.running.values():
            service.stop()


@pytest.fixture
def kill_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pdgate-kill-"))
    folder.chmod(0o755)  # PostgreSQL's own user must get in
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def killable(kill_folder: Path, catalog_file: Path, models_dir: Path) -> AsyncIterator[tuple[Stack, Servers]]:
    folder = kill_folder
    servers = Servers(folder)
    redis_url = (await asyncio.to_thread(servers.start, "valkey")).url
    database_url = (await asyncio.to_thread(servers.start, "postgres")).url
    await asyncio.to_thread(upgrade, database_url)
    stack = Stack(
        folder=folder, redis_url=redis_url, database_url=database_url, catalog_file=catalog_file, models_dir=models_dir
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    for role in ("prefill", "decode"):
        stack.add_worker(f"{role}-0", role=role, environ={"WORKER_STEP_MS": "5"})
    stack.add_worker("unified-0", role="unified", environ={"WORKER_STEP_MS": "5"})
    yield stack, servers
    stack.stop()
    await asyncio.to_thread(servers.stop)


class Load:
    """Callers that ask again and again; notes which answers they read to the end."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.finished: dict[str, dict[str, int]] = {}  # rid -> usage
        self.broken: set[str] = set()
        self.stopping = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=2 * CALLERS)
        headers = {"Authorization": f"Bearer {self.stack.api_key}"}
        async with (
            httpx.AsyncClient(base_url=self.stack.url, headers=headers, timeout=60, limits=limits) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(CALLERS):
                tasks.create_task(self._call(http, number))

    async def _call(self, http: httpx.AsyncClient, number: int) -> None:
        count = 0
        while not self.stopping:
            count += 1
            body = {
                "model": "tiny", "max_tokens": 20 + number * 10, "temperature": 0, "stream": True,
                "messages": [{"role": "user", "content": f"Tell story {number} part {count}"}],
                "stream_options": {"include_usage": True},
            }  # fmt: skip
            if not await self._stream(http, body):
                await asyncio.sleep(0.1)  # as clients do: what is down is not asked in a tight loop

    async def _stream(self, http: httpx.AsyncClient, body: dict[str, object]) -> bool:
        rid, usage = "", None
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                rid = answer.headers.get("x-request-id", "")
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]" and usage is not None:
                        self.finished[rid] = usage
                        return True
                    if line.startswith("data: {"):
                        usage = json.loads(line[6:]).get("usage") or usage
        except httpx.TransportError:
            pass
        self.broken.add(rid)
        return False


async def rounds(stack: Stack, servers: Servers, number: int, *, seed: int) -> None:
    engine = create_engine(stack.database_url)
    redis = redis_client(stack.redis_url)
    budget = Budget(organisation=stack.org, scope="org", scope_id=stack.org, amount=1000 * EURO)
    async with engine.begin() as conn:
        await set_budget(conn, budget)
    stack.start()
    await stack.ready(timeout_s=60)
    await until(lambda: redis.hexists(keys.budget(stack.org, "org", stack.org), "limit"), 30)
    choose = random.Random(seed)
    victims = [*PROCESSES, *SERVERS]
    load = Load(stack)
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
                stack.kill(victim)
                stack.start(victim)
        before = len(load.finished)
        await until(lambda: len(load.finished) >= before + 5, 90, every_s=0.05)
        load.stopping = True
    try:
        await check(stack, redis, load, engine)
    finally:
        await redis.aclose()
        await engine.dispose()


async def check(stack: Stack, redis: Redis, load: Load, engine) -> None:
    database = await asyncpg.connect(stack.database_url)
    # What nobody settled is swept two minutes after its deadline; that is not waited for, so nothing may need it.
    await until(lambda: nothing_is_reserved(redis), 90)

    async def all_billed() -> bool:
        rows = await requests(database)
        return all(rid in rows for rid in load.finished)

    await until(all_billed, 60)
    rows = await requests(database)
    for rid, usage in load.finished.items():
        meters = await meters_of(database, rid)
        assert rows[rid]["outcome"] == "finished"
        assert meters["decode"] == usage["completion_tokens"]
        assert meters["prefill_computed"] + meters["prefill_cached"] == usage["prompt_tokens"]
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


async def test_each_process_killed_once_under_load_loses_doubles_and_keeps_nothing(killable):
    await rounds(*killable, 7, seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_two_hundred_kills_at_random_points_lose_double_and_keep_nothing(killable):
    await rounds(*killable, ROUNDS, seed=int(time.time()))


@pytest.mark.chaos
async def test_what_a_lost_redis_took_along_is_restored_from_the_workers_journals(killable):
    """Redis comes back empty, as after the promotion of a replica that had nothing: every answer is billed once."""
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
    await asyncio.to_thread(servers.kill, "valkey")
    await asyncio.to_thread(shutil.rmtree, servers.folder / "valkey")
    await asyncio.to_thread(servers.start, "valkey")
    journals = await asyncio.to_thread(read_journals, stack.folder)
    done = await restore(engine, redis, AttemptSink(engine, Partitions(engine)), journals)
    assert set(done.requests) >= load.finished.keys()
    stack.start("billing")
    database = await asyncpg.connect(stack.database_url)

    async def all_billed() -> bool:
        return load.finished.keys() <= (await requests(database)).keys()

    await until(all_billed, 60)
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
