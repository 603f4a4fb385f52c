"""A pool per test, on the event loop of the real process."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop
from rig import Rig, running_rig


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def rig(redis_url: str) -> AsyncIterator[Rig]:
    async with running_rig(redis_url) as running:
        yield running
