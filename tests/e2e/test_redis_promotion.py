"""A replica of Redis that lagged is promoted: what is lost is bounded, printed, and comes back by itself."""

import asyncio
import json
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import pytest
from redis.asyncio import Redis

from billing.attempts import AttemptSink
from billing.database import create_engine
from billing.partitions import Partitions
from billing.reconcile import Kind, reconcile
from billing.restore import read_journals, restore
from contracts import keys
from contracts.identity import NUM_SHARDS
from contracts.resp import redis_client
from pdgate.services import start_valkey
from tests.e2e.kill_rig import CALLERS, Load, Servers
from tests.e2e.ledger_view import ledger_is_balanced, meters_of, requests, restored
from tests.processes import Stack, free_port, until


async def _replica(servers: Servers, primary: Redis) -> Redis:
    """Start a replica that has all of the primary's data."""
    port = free_port()
    await primary.config_set("port", port)
    servers.running["replica"] = await asyncio.to_thread(start_valkey, servers.folder / "replica")
    replica = redis_client(servers.running["replica"].url)
    await replica.execute_command("REPLICAOF", "127.0.0.1", port)

    async def level() -> bool:
        return bool((await replica.info("replication"))["master_link_status"] == "up")

    await until(level, 30)
    return replica


def _take_over(servers: Servers) -> None:
    """Give the replica the primary's address: a Unix socket keeps its listener when it is renamed."""
    replica, primary = (Path(servers.running[name].url.removeprefix("unix://")) for name in ("replica", "valkey"))
    replica.replace(primary)


async def dead_letters(redis: Redis) -> list[object]:
    """Return what billing could not post."""
    found: list[object] = []
    for shard in range(NUM_SHARDS):
        found += await redis.xrange(keys.dead_letters(shard))
    return found


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_a_lagging_replica_that_is_promoted_loses_what_it_lacked_and_it_comes_back(
    killable: tuple[Stack, Servers],
) -> None:
    """The worst case: billing stands still while the replica is cut off, so that usage is in Redis alone."""
    stack, servers = killable
    stack.start()
    await stack.ready(timeout_s=120)
    redis, engine = redis_client(stack.redis_url), create_engine(stack.database_url)
    database = await asyncpg.connect(stack.database_url)
    replica = await _replica(servers, redis)
    load = Load(stack)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        await until(lambda: len(load.finished) >= 20, 120)
        stack.kill("billing", signal.SIGSTOP)
        await replica.execute_command("REPLICAOF", "NO", "ONE")  # from here on it gets nothing more
        cut_s, before = time.monotonic(), frozenset(load.finished)
        await until(lambda: len(load.finished) >= len(before) + 20, 120)
        await asyncio.to_thread(servers.kill, "valkey")
        window_s, after = time.monotonic() - cut_s, frozenset(load.finished)
        await asyncio.to_thread(_take_over, servers)
        stack.kill("billing", signal.SIGCONT)
        await until(lambda: len(load.finished) >= len(after) + 10, 180)  # the stack serves again
        load.stopping = True

    async def quiet() -> bool:
        waiting = await redis.keys("pdgate:*:usage")
        return not sum([await redis.xlen(key) for key in waiting])

    await until(quiet, 60)

    async def all_billed() -> bool:
        return load.finished.keys() <= (await requests(database)).keys()

    try:
        await until(all_billed, 90)
    except TimeoutError:
        missing = load.finished.keys() - (await requests(database)).keys()
        pytest.fail(f"not billed: {missing}; dead {await dead_letters(redis)}")
    by_gateway, by_journals = (restored(stack.log(name)) for name in ("gateway", "billing"))
    lost = by_gateway | by_journals
    sink = AttemptSink(engine, Partitions(engine))
    journals = await asyncio.to_thread(read_journals, stack.folder)
    again = await restore(engine, redis, sink, journals, settled_within_ms=0)
    async with engine.connect() as conn:
        today = datetime.now(UTC).date()
        books = await reconcile(conn, from_day=today, to_day=today, now_ms=int(time.time() * 1000), grace_s=600)
    row = {
        "fault": "replica promoted, billing still",
        "window_s": round(window_s, 2),
        "finished": len(load.finished),
        "finished_in_window": len(after - before),
        "lost": len(lost),
        "settled_again": len(by_gateway),
        "from_journals": len(by_journals - by_gateway),
        "doubled": len(again.requests),
        "ledger_differs": sum(books.num_differences[kind] for kind in (Kind.RECORDS, Kind.PRICE, Kind.LEDGER)),
    }
    print(json.dumps(row))  # noqa: T201 - `pytest -s` shows it
    # Lost can only be what ended in the window, or was running when it began or ended: a caller each.
    assert 0 < len(lost) <= len(after - before) + 2 * CALLERS
    assert (row["doubled"], row["ledger_differs"]) == (0, 0)
    for rid, usage in load.finished.items():
        meters = await meters_of(database, rid)
        assert meters["decode"] == usage["completion_tokens"]
        assert meters["prefill_computed"] + meters["prefill_cached"] == usage["prompt_tokens"]
    assert await ledger_is_balanced(database)
    await database.close()
    await replica.aclose()
    await redis.aclose()
    await engine.dispose()
