"""`python -m billing`: usage and attempts from Redis to Postgres, and the sweep of abandoned reservations."""

import asyncio
import os
import signal
import uuid
from asyncio import TaskGroup
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import structlog
import uvloop
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.attempts import AttemptSink, attempt_streams
from billing.consumer import UsageSink, usage_streams
from billing.database import create_engine
from billing.delivery import Backoff, Delivery
from billing.partitions import Partitions, ensure_partitions
from billing.prices import sync_catalog
from billing.settings import Settings
from billing.spans import TracedUsageSink
from billing.streams import GroupReader
from billing.sweeper import Sweeper
from contracts import keys
from contracts.catalog import Catalog, CatalogError, read_catalog
from contracts.environment import SettingsError, from_env, metrics_address
from contracts.resp import redis_client
from contracts.settlement import SettlementScripts
from observability.loop_lag import watch_loop_lag
from observability.metrics import Instruments
from observability.telemetry import Telemetry, configure_logging
from observability.tracing import Tracer

log: Final = structlog.get_logger()

_METERS: Final = 3
_UPKEEP_S: Final = 5.0
_DAYS_AHEAD: Final = 7


class Stopped(Exception):
    """Ends the process's task group after a signal."""


class Upkeep:
    """Slow chores: partitions ahead, names of dead consumers, and the figures of the lag gauges."""

    def __init__(self, engine: AsyncEngine, usage: GroupReader) -> None:
        self._engine = engine
        self._usage = usage
        self.waiting = 0
        self.dead = 0

    async def run(self) -> None:
        """Do the chores until cancelled; what fails is tried again in the next round."""
        next_hourly = datetime.now(UTC)
        while True:
            try:
                self.waiting, self.dead = await self._usage.backlog()
                if datetime.now(UTC) >= next_hourly:
                    async with self._engine.begin() as conn:
                        yesterday = datetime.now(UTC).date() - timedelta(days=1)
                        await ensure_partitions(conn, yesterday, _DAYS_AHEAD + 2)
                    await self._usage.forget_gone_consumers()
                    next_hourly = datetime.now(UTC) + timedelta(hours=1)
            except (RedisError, SQLAlchemyError, OSError) as error:
                log.warning("upkeep_failed", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(_UPKEEP_S)


async def serve(settings: Settings, catalog: Catalog, instruments: Instruments, tracer: Tracer) -> None:
    """Run every loop until SIGTERM or SIGINT."""
    engine = create_engine(settings.database_url, pool_size=settings.consumers + 3)
    redis = redis_client(settings.redis_url, max_connections=settings.consumers * 2 + 8)
    name = f"billing-{uuid.uuid4()}"
    partitions = Partitions(engine, days_ahead=_DAYS_AHEAD)

    def reader(streams: dict[str, str], consumer: str) -> GroupReader:
        return GroupReader(redis, group=keys.CONSUMER_GROUP_BILLING, consumer=consumer, streams=streams)

    def count_usage(number: int, result: str) -> None:
        instruments.usage_rows.add(_METERS * number, {"result": result})

    def count_attempts(number: int, result: str) -> None:
        instruments.attempt_rows.add(number, {"result": result})

    upkeep = Upkeep(engine, reader(usage_streams(), name))
    instruments.observe("pdgate_usage_stream_lag", lambda: [(upkeep.waiting, {})])
    instruments.observe("pdgate_usage_dead_letters", lambda: [(upkeep.dead, {})])
    try:
        await _sync_prices(engine, catalog)
        async with TaskGroup() as tasks:
            for number in range(settings.consumers):
                usage = Delivery(
                    "usage",
                    reader(usage_streams(), f"{name}-{number}"),
                    TracedUsageSink(UsageSink(engine, partitions), tracer),
                    count_usage,
                    batch_size=settings.batch_size,
                    claim_idle_ms=settings.claim_idle_ms,
                    linger_s=settings.linger_s,
                )
                tasks.create_task(usage.run())
            attempts = Delivery(
                "attempts",
                reader(attempt_streams(catalog.pools), name),
                AttemptSink(engine, partitions),
                count_attempts,
                batch_size=settings.batch_size,
                claim_idle_ms=settings.claim_idle_ms,
                linger_s=settings.linger_s,
            )
            tasks.create_task(attempts.run())
            tasks.create_task(Sweeper(redis, SettlementScripts(redis), period_s=settings.sweep_period_s).run())
            tasks.create_task(upkeep.run())
            tasks.create_task(watch_loop_lag(instruments))
            tasks.create_task(_until_signalled())
            log.info("billing_started", consumer=name, consumers=settings.consumers, pools=catalog.pools)
    except* Stopped:
        log.info("billing_stopped")
    finally:
        await redis.aclose()
        await engine.dispose()


async def _sync_prices(engine: AsyncEngine, catalog: Catalog) -> None:
    """Bring the catalogue's prices into the book, however long the database takes to come."""
    backoff = Backoff()
    while True:
        try:
            async with engine.begin() as conn:
                added = await sync_catalog(conn, catalog)
        except (SQLAlchemyError, OSError) as error:
            log.warning("prices_wait", error=f"{type(error).__name__}: {error}")
            await backoff.wait()
        else:
            for version in added:
                log.info("price_added", model=version.price.model, version=version.price.version)
            return


async def _until_signalled() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    raise Stopped


def main() -> None:
    """Read settings and catalogue, then serve."""
    settings = from_env(Settings, "BILLING_", os.environ)
    host, port = metrics_address("BILLING_METRICS_LISTEN", settings.metrics_listen)
    try:
        catalog = read_catalog(Path(settings.catalog))
    except CatalogError as error:
        raise SettingsError(f"BILLING_CATALOG: {error}") from None
    configure_logging("billing", level=settings.log_level, json=settings.log_json)
    telemetry = Telemetry()
    tracer = Tracer("billing", str(os.getpid()), endpoint=settings.otlp_endpoint)
    with telemetry.serve(host, port):
        uvloop.run(serve(settings, catalog, telemetry.instruments, tracer))
    tracer.close()


if __name__ == "__main__":
    main()
