"""A gateway with people and a week of their requests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contracts.catalog import Catalog
from tests.gateway.gateway_rig import running_rig
from tests.portal.portal_rig import PortalRig


@pytest.fixture
async def portal(
    redis_url: str, database_url: str, catalog_file: Path, catalog: Catalog, models_dir: Path, tmp_path: Path
) -> AsyncIterator[PortalRig]:
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        catalog=catalog,
        models_dir=models_dir,
        journal_dir=tmp_path / "journal",
    ) as running:
        rig = PortalRig(running)
        yield rig
        await rig.close()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the browsers' tests unread where they are deselected: Playwright belongs to `make e2e`."""
    if collection_path.name.endswith("_browser.py") and "not e2e" in config.option.markexpr:
        return True
    return None
