"""The scheduler process: one PoolScheduler per pool."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

import structlog
import uvloop
from redis.exceptions import RedisError

from contracts.additions import live, read_added
from contracts.catalog import Catalog, CatalogError, read_catalog
from contracts.environment import from_env, metrics_address
from contracts.resp import redis_client
from observability import heap
from observability.loop_lag import watch_loop_lag
from observability.telemetry import Telemetry, configure_logging
from observability.tracing import Tracer
from scheduler.fleet.choice import FleetSettingsError, fleet_of
from scheduler.gauges import Gauges
from scheduler.pool import PoolScheduler
from scheduler.pools import Pools
from scheduler.profile import PoolProfile
from scheduler.settings import Settings

log = structlog.get_logger()


def _served(settings: Settings, catalog: Catalog) -> Sequence[str]:
    """Return the pools that this process serves. Raises CatalogError for one that the catalogue does not have."""
    unknown = sorted(set(settings.pools) - set(catalog.pools))
    if unknown:
        raise CatalogError(f"SCHEDULER_POOLS: no pool {', '.join(unknown)}; there are {', '.join(catalog.pools)}")
    return settings.pools or catalog.pools


async def serve(settings: Settings) -> None:
    """Schedule every pool until SIGTERM or SIGINT."""
    host, port = metrics_address("SCHEDULER_METRICS_LISTEN", settings.metrics_listen)
    catalog, models = live(read_catalog(settings.catalog))
    redis = redis_client(settings.redis_url)
    try:
        models.take(await read_added(redis) or ())
    except (RedisError, OSError, TimeoutError) as error:
        log.warning("models_not_read", error=str(error))
    served = _served(settings, catalog)
    telemetry = Telemetry()
    tracer = Tracer("scheduler", settings.id, endpoint=settings.otlp_endpoint)
    fleet = fleet_of(settings.fleet, settings.fleet_address)

    def make(pool: str) -> PoolScheduler:
        return PoolScheduler(
            redis,
            pool,
            settings=settings,
            instruments=telemetry.instruments,
            tracer=tracer,
            profile=PoolProfile.of(catalog, pool),
            fleet=fleet,
        )

    pools = Pools(redis, catalog, models, only=settings.pools, make=make)
    Gauges(pools).register(telemetry.instruments)
    heap.settle()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with telemetry.serve(host, port):
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(pools.run()), tasks.create_task(watch_loop_lag(telemetry.instruments))]
                log.info("scheduler_started", scheduler_id=settings.id, pools=served)
                await stop.wait()
                for task in running:
                    task.cancel()
        finally:
            await redis.aclose()
            await asyncio.to_thread(tracer.close)
    log.info("scheduler_stopped", scheduler_id=settings.id)


def main() -> None:
    """Run the process; a bad setting or catalogue ends it with one line."""
    settings = from_env(Settings, "SCHEDULER_", os.environ)
    configure_logging("scheduler", level=settings.log_level, json=settings.log_json)
    heap.begin()
    try:
        uvloop.run(serve(settings))
    except CatalogError as error:
        sys.exit(f"SCHEDULER_CATALOG: {error}")
    except FleetSettingsError as error:
        sys.exit(str(error))
