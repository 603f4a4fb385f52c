"""A pool per test."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from rig import Rig, running_rig


@pytest.fixture
async def rig(redis: Redis, redis_url: str) -> AsyncIterator[Rig]:
    async with running_rig(redis, redis_url) as running:
        yield running
