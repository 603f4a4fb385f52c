"""Valkey dies while its disk is slow, or with the power: it loses what it acknowledged, and every answer is billed.

A slow disk is one thread of Valkey that stands still: the one that syncs its file. While that has not ended, writes to
the file are held back for up to two seconds, and clients get their answers (`flushAppendOnlyFile` in Valkey's `aof.c`).
"""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from billing.database import create_engine
from contracts.resp import redis_client
from pdgate.services import Service, start_valkey
from tests.e2e.frozen_thread import FrozenThread
from tests.e2e.kill_rig import Load, Servers
from tests.e2e.ledger_view import restored
from tests.e2e.test_kill_rounds import check, ready_with_a_budget
from tests.processes import Stack, until

pytestmark = pytest.mark.chaos

SYNCER = "bio_aof"
HELD_BACK_S = 2.0  # Valkey writes after so long, whatever the disk does


async def stalled(service: Service, redis: Redis) -> FrozenThread:
    """Let the disk of a server stall, and wait until it has something to sync."""
    frozen = FrozenThread(service.process.pid, SYNCER)

    async def waits() -> bool:
        await redis.incr("so-that-there-is-something-to-sync")
        return bool((await redis.info("persistence"))["aof_pending_bio_fsync"])

    await until(waits, 10, every_s=0.01)
    return frozen


def kill(service: Service, frozen: FrozenThread | None) -> None:
    service.process.send_signal(signal.SIGKILL)
    if frozen is not None:
        frozen.bury()
    service.process.wait(10)


@pytest.mark.parametrize(("appendfsync", "lost"), [("everysec", True), ("no", False)])
async def test_a_server_that_is_killed_while_its_disk_is_slow_loses_what_it_held_back(kill_folder, appendfsync, lost):
    service = await asyncio.to_thread(start_valkey, kill_folder / "valkey")
    try:
        async with redis_client(service.url) as redis:
            frozen = await stalled(service, redis)
            await redis.config_set("appendfsync", appendfsync)  # under `no` nothing is synced, so nothing held back
            assert await redis.set("acknowledged", "yes")
        kill(service, frozen)
        service = await asyncio.to_thread(start_valkey, kill_folder / "valkey")
        async with redis_client(service.url) as redis:
            assert (await redis.get("acknowledged") is None) == lost
    finally:
        service.stop()


def sizes_of_files(servers: Servers) -> dict[Path, int]:
    return {path: path.stat().st_size for path in (servers.folder / "valkey").rglob("*.aof")}


def without_power(sizes: dict[Path, int]) -> None:
    """Take away what was written since: none of it had reached the disk."""
    for path, size in sizes.items():
        if path.exists():
            os.truncate(path, size)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["valkey", "valkey and gateway", "power of both"])
async def test_every_answer_is_billed_once_when_valkey_lost_what_it_acknowledged(
    killable: tuple[Stack, Servers], what: str
) -> None:
    """The gateway settles again what it had settled; where it was killed as well, the workers' journals say it."""
    stack, servers = killable
    engine, redis, load = create_engine(stack.database_url), redis_client(stack.redis_url), Load(stack)
    await ready_with_a_budget(stack, engine, redis)
    killed_s: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        for _ in range(3):
            begun = len(load.finished)
            await until(lambda begun=begun: len(load.finished) >= begun + 20, 120)
            service = servers.running["valkey"]
            stack.kill("billing", signal.SIGSTOP)  # or it would have posted some of what is to be lost
            frozen = None if what == "power of both" else await stalled(service, redis)
            sizes, until_s, begun = sizes_of_files(servers), time.monotonic() + 0.6 * HELD_BACK_S, len(load.finished)
            await until(lambda until_s=until_s: time.monotonic() > until_s, every_s=0.01)
            assert len(load.finished) > begun
            kill(service, frozen)
            if frozen is None:
                without_power(sizes)
            if what != "valkey":
                killed_s.append(time.monotonic())
                stack.kill("gateway")
            stack.kill("billing", signal.SIGCONT)
            await asyncio.to_thread(servers.start, "valkey")
            if what != "valkey":
                stack.start("gateway")
        load.stopping = True
    by = "gateway" if what == "valkey" else "billing"
    try:
        await until(lambda: restored(stack.log(by)), 60)
        await check(stack, redis, load, engine, killed_s, with_redis=True)
        print(json.dumps({"lost": what, "finished": len(load.finished), "restored": len(restored(stack.log(by)))}))  # noqa: T201 - `pytest -s` shows it
    finally:
        await redis.aclose()
        await engine.dispose()
