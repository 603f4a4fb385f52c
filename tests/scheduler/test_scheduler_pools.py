"""A scheduler process takes up the pools of models that are added, and leaves those of models that are removed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis
from rig import TIMING, eventually

from contracts import keys
from contracts.additions import AddedModel, encode_added, live
from contracts.catalog import Catalog, Model
from contracts.resp import redis_client
from observability.metrics import Instruments
from observability.tracing import Tracer
from scheduler.pool import PoolScheduler
from scheduler.pools import Pools
from scheduler.profile import PoolProfile
from scheduler.settings import Settings


@asynccontextmanager
async def following(redis_url: str, catalog: Catalog, *only: str) -> AsyncIterator[Pools]:
    """Run the pools of one process, over a client as the process has it: others may swallow its cancellation."""
    grown, models = live(catalog)
    redis = redis_client(redis_url)
    settings = Settings(redis_url=redis_url, catalog=Path(), id="s-0", dead_after_s=3.0)

    def make(pool: str) -> PoolScheduler:
        return PoolScheduler(
            redis,
            pool,
            settings=settings,
            instruments=Instruments(),
            tracer=Tracer("scheduler", "test"),
            profile=PoolProfile.of(grown, pool),
            timing=TIMING,
        )

    pools = Pools(redis, grown, models, only=only, make=make, look_s=0.02)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(pools.run())
            try:
                yield pools
            finally:
                running.cancel()
    finally:
        await redis.aclose()


def added(name: str, catalog: Catalog) -> AddedModel:
    return AddedModel(
        name=name,
        model=Model(tokenizer="tiny", context_tokens=1024, price=catalog.models["tiny"].price),
        folder="/models/x",
    )


def names(pools: Pools) -> list[str]:
    return [pool.pool for pool in pools]


async def test_an_added_models_pool_is_led_and_a_removed_ones_lease_is_given_up(
    redis: Redis, redis_url: str, catalog: Catalog
) -> None:
    async with following(redis_url, catalog) as pools:
        await eventually(lambda: names(pools) == ["tiny"], "the file's pool")
        await redis.set(keys.ADDED_MODELS, encode_added([added("new", catalog)]))
        await eventually(lambda: names(pools) == ["tiny", "new"], "the added pool")
        await eventually(lambda: all(pool.lease.held for pool in pools), "leases")
        tiny, new = pools
        await redis.set(keys.ADDED_MODELS, encode_added([]))
        await eventually(lambda: names(pools) == ["tiny"], "the file's pool alone")
        await eventually(lambda: not new.lease.held, "the lease")
        assert list(pools) == [tiny]  # the same one, which served on
        assert tiny.lease.held


async def test_a_redis_that_lost_its_data_removes_nobody(redis: Redis, redis_url: str, catalog: Catalog) -> None:
    await redis.set(keys.ADDED_MODELS, encode_added([added("new", catalog)]))
    async with following(redis_url, catalog) as pools:
        await eventually(lambda: names(pools) == ["tiny", "new"], "the added pool")
        await redis.delete(keys.ADDED_MODELS)
        await redis.set("another", "key")
        looked = pools.looks
        await eventually(lambda: pools.looks > looked + 1, "another look")
        assert names(pools) == ["tiny", "new"]


async def test_a_process_with_pools_of_its_own_takes_up_no_other(
    redis: Redis, redis_url: str, catalog: Catalog
) -> None:
    await redis.set(keys.ADDED_MODELS, encode_added([added("new", catalog), added("other", catalog)]))
    async with following(redis_url, catalog, "new") as pools:
        await eventually(lambda: names(pools) == ["new"], "the one pool")
        looked = pools.looks
        await eventually(lambda: pools.looks > looked + 1, "another look")
        assert names(pools) == ["new"]
