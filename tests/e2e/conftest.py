"""A running stack of real processes with timed workers."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from migrations.upgrade import upgrade
from tests.e2e.kill_rig import Servers
from tests.engines import Engines
from tests.processes import Stack


@pytest.fixture
def stack_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pdgate-stack-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def stack(
    stack_folder: Path, redis_url: str, database_url: str, catalog_file: Path, models_dir: Path
) -> AsyncIterator[Stack]:
    """Gateway, scheduler, billing, one timed prefill and one timed decode worker: added, not started."""
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    stack.add_worker("prefill-0", role="prefill", environ={"WORKER_STEP_MS": "5"})
    stack.add_worker("decode-0", role="decode", environ={"WORKER_STEP_MS": "5"})
    yield stack
    stack.stop()


@pytest.fixture
async def real_stack(engines: Engines, stack_folder, database_url: str) -> AsyncIterator[Stack]:
    """Gateway, scheduler and billing in front of the engines that the whole run shares."""
    stack = Stack(
        folder=stack_folder,
        redis_url=engines.redis_url,
        database_url=database_url,
        catalog_file=engines.catalog_file,
        models_dir=engines.models_dir,
    )
    await stack.seed()
    stack.add_gateway(cpu_profile=True)
    stack.add_scheduler(cpu_profile=True)
    stack.add_billing()
    stack.start()
    try:
        await stack.ready(timeout_s=90)
        yield stack
    finally:
        stack.stop()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


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
