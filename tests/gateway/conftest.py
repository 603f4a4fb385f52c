"""A gateway per test, on the event loop of the real process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import uvloop
from gateway_rig import Rig, running_rig

from contracts.catalog import Catalog


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def grpc_stays_up() -> None:
    """Hold one reference to grpc.aio: dropping the last one joins its polling thread, from wherever
    the garbage collector happens to run, and that can block between two tests' event loops."""

    async def hold() -> None:
        grpc.aio.init_grpc_aio()

    asyncio.run(hold())  # it asks for a loop, and after an async test of another folder there is none


@pytest.fixture
async def rig(
    redis_url: str, database_url: str, catalog_file: Path, catalog: Catalog, models_dir: Path, tmp_path: Path
) -> AsyncIterator[Rig]:
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        catalog=catalog,
        models_dir=models_dir,
        journal_dir=tmp_path / "journal",
    ) as running:
        yield running
