"""A rig on the real services, with the prices of the test catalogue."""

import pytest
import stripe
from billing_rig import Rig
from stripe_server import running_stripe
from stripe_shop import Shop

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


@pytest.fixture
def quick(monkeypatch):
    """The library's own pauses between tries, a hundredth of them."""
    monkeypatch.setattr(stripe.HTTPClient, "INITIAL_DELAY", 0.005)
    monkeypatch.setattr(stripe.HTTPClient, "MAX_DELAY", 0.02)


@pytest.fixture
async def server(quick):
    async with running_stripe() as running:
        yield running


@pytest.fixture
async def shop(rig, server):
    return Shop(rig, server)
