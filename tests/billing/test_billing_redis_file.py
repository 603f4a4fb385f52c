"""Redis with a full disk: what was acknowledged is there after its next start, also on a server that was promoted."""

import asyncio
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from billing.redis_file import AppendOnlyFile
from contracts.resp import redis_client
from pdgate.services import start_valkey
from tests.processes import free_port, until

DISK_MB = 16


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={DISK_MB}m,mode=755"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "pdgate-test", str(folder)], check=False)
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    balloon = folder / "balloon"
    with balloon.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1000)):
            pass
    return balloon


async def test_a_promoted_server_starts_again_after_its_disk_was_full(small_disk: Path, tmp_path: Path):
    old = start_valkey(tmp_path / "old")
    new = start_valkey(small_disk / "new")
    try:
        async with redis_client(old.url) as first, redis_client(new.url) as redis:
            port = free_port()
            await first.config_set("port", port)
            await redis.execute_command("REPLICAOF", "127.0.0.1", port)

            async def has_copied() -> bool:
                state = await redis.info()
                return state["master_link_status"] == "up" and not state["aof_rewrite_in_progress"]

            await until(has_copied, 20)
            await redis.execute_command("REPLICAOF", "NO", "ONE")
            acknowledged = {}
            file = AppendOnlyFile(redis)

            async def write(name: str) -> bool:
                try:
                    await redis.set(name, name * 100)
                except ResponseError:
                    return False
                acknowledged[name] = name * 100
                return True

            for number in range(50):
                assert await write(f"before-{number}")
            balloon = fill(small_disk)

            async def refuses() -> bool:
                await write(f"full-{len(acknowledged)}")
                await file.look()
                return file.failing

            await until(refuses, 20)
            assert not await write("refused")
            balloon.unlink()

            async def writes_again() -> bool:
                return await write(f"after-{len(acknowledged)}")

            await until(writes_again, 20)

            async def rewritten() -> bool:
                await file.look()
                state = await redis.info("persistence")
                return state["aof_rewrites"] > before and not state["aof_rewrite_in_progress"]

            before = (await redis.info("persistence"))["aof_rewrites"]
            await until(rewritten, 20)
            assert not file.failing
            assert await write("last")
        new.stop()
        new = await asyncio.to_thread(start_valkey, small_disk / "new")
        async with redis_client(new.url) as redis:
            assert {name: await redis.get(name) for name in acknowledged} == {
                name: value.encode() for name, value in acknowledged.items()
            }
    finally:
        old.stop()
        new.stop()
