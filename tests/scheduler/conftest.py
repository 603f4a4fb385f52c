"""A pool per test."""

from collections.abc import AsyncIterator

import pytest
from rig import Rig, running_rig


@pytest.fixture
async def rig(redis_url: str) -> AsyncIterator[Rig]:
    async with running_rig(redis_url) as running:
        yield running
