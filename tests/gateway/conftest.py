"""A gateway per test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_rig import Rig, running_rig

from contracts.catalog import Catalog


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
