"""A stack of real processes with timed workers."""

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.processes import Stack


@pytest.fixture
async def stack(redis_url: str, database_url: str, catalog_file: Path, models_dir: Path) -> AsyncIterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="pdgate-clients-"))
    stack = Stack(
        folder=folder, redis_url=redis_url, database_url=database_url, catalog_file=catalog_file, models_dir=models_dir
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    for role in ("prefill", "decode", "unified"):
        stack.add_worker(f"{role}-0", role=role, environ={"WORKER_STEP_MS": "5"})
    stack.start()
    try:
        await stack.ready()
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)
