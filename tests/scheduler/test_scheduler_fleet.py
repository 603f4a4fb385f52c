"""Sixty-four timed workers in one process serve a pool: all are found, used, and gone at the end."""

from collections import Counter
from pathlib import Path

import pytest
from redis.asyncio import Redis
from rig import Rig, eventually
from rig_gateway import POOL

from contracts.catalog import Catalog
from contracts.environment import SettingsError
from contracts.keys import pool_workers, worker_lease
from contracts.lifecycle import FinishReason, Role
from contracts.wire import unpack_ids
from workers.engines.timed_text import expected_ids
from workers.fleet import running_fleet
from workers.settings import Settings

ROLES = {Role.PREFILL: 20, Role.DECODE: 32, Role.UNIFIED: 12}
REQUESTS = 160
MAX_TOKENS = 8


def settings_of(redis_url: str, catalog_file: Path, **changes) -> Settings:
    known = {"id": "fleet", "pool": POOL, "role": Role.UNIFIED, "engine": "timed", "catalog": str(catalog_file)}
    return Settings(**{**known, "redis_url": redis_url, "prefill_ms": 1.0, "prefill_ms_per_token": 0.01, **changes})


@pytest.mark.timeout(120)
async def test_a_fleet_of_64_workers_serves_a_pool(
    rig: Rig, redis_url: str, redis: Redis, catalog: Catalog, catalog_file: Path
):
    async with running_fleet(settings_of(redis_url, catalog_file), catalog, ROLES) as fleet:
        assert len({worker.address for worker in fleet}) == 64
        gateway = await rig.gateway()
        for worker in fleet:
            gateway.attach(worker.address)
        pool = rig.scheduler()
        await eventually(lambda: pool.term is not None and pool.term.attempts.caught_up, "leading")
        await eventually(lambda: sum(w.ready for w in pool.registry.workers()) == 64, "64 workers ready")
        assert Counter(w.role for w in pool.registry.workers()) == ROLES
        requests = [await gateway.submit(200, max_tokens=MAX_TOKENS) for _ in range(REQUESTS)]
        await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in requests), "all answered")
        for request in requests:
            assert request.tokens[1, 0] == expected_ids(unpack_ids(request.submit.prompt), MAX_TOKENS)
        used = {ref.worker_id for r in requests for ref in (r.placed[0].prefill, r.placed[0].decode) if ref is not None}
        # How many depends on how fast short requests end: on a busy machine the few best serve them all in turn.
    assert len(used) > 8, "the load is not spread"
    assert await redis.zcard(pool_workers(POOL)) == 0
    assert not [w for w in fleet if await redis.exists(worker_lease(POOL, w.worker_id))]


async def test_a_fleet_is_for_the_timed_engine_and_for_free_ports(redis_url: str, catalog: Catalog, catalog_file: Path):
    for changes in ({"engine": "sglang"}, {"listen": "127.0.0.1:50051"}, {"bootstrap_port": 9000}):
        with pytest.raises(SettingsError):
            async with running_fleet(settings_of(redis_url, catalog_file, **changes), catalog, {Role.UNIFIED: 2}):
                pass
