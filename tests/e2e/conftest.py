"""A running stack of real processes with timed workers."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

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
async def database(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()
