"""A pool per test, on the event loop of the real process."""

from collections.abc import AsyncIterator

import pytest
import uvloop
from rig import Rig, running_rig


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def rig(redis_url: str) -> AsyncIterator[Rig]:
    async with running_rig(redis_url) as running:
        yield running
