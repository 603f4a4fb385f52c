"""A rig on the real services, with the prices of the test catalogue."""

import pytest
from billing_rig import Rig

from billing.database import create_engine
from billing.prices import sync_catalog
from contracts.resp import redis_client


@pytest.fixture
async def engine(database_url):
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def rig(redis_url, engine, catalog):
    redis = redis_client(redis_url)
    async with engine.begin() as conn:
        await sync_catalog(conn, catalog)
    yield Rig(redis, engine)
    await redis.aclose()
