"""`python -m billing`: usage and attempts from Redis to Postgres, the jobs of money, and the Admin service."""

import asyncio
import gc
import os
import signal
import time
import uuid
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import structlog
import uvloop
from redis.asyncio import Redis
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.admin import Admin, admin_server
from billing.attempts import AttemptSink, attempt_streams
from billing.budgets import Budgets
from billing.collection import Collector
from billing.consumer import UsageSink, usage_streams
from billing.database import create_engine
from billing.delivery import Backoff, Delivery
from billing.jobs import DAYS_AHEAD, Job, Jobs, keep
from billing.partitions import Partitions
from billing.prices import sync_catalog
from billing.retold import Retold
from billing.settings import Settings
from billing.spans import TracedUsageSink
from billing.streams import GroupReader
from billing.sweeper import Sweeper
from billing.webhooks import Webhooks
from contracts import keys
from contracts.additions import read_added
from contracts.catalog import Catalog, CatalogError, read_catalog
from contracts.credentials import certificates_of
from contracts.environment import SettingsError, from_env, metrics_address
from contracts.resp import redis_client
from contracts.settlement import SettlementScripts
from observability.loop_lag import watch_loop_lag
from observability.metrics import Instruments
from observability.telemetry import Telemetry, configure_logging
from observability.tracing import Tracer

log: Final = structlog.get_logger()

_METERS: Final = 3
_NICENESS: Final = 5
"""Nobody waits for a batch, and where others share its cores the slowest requests were those that met one."""

_RESTART_S: Final = 1.0
_LOOK_S: Final = 5.0
_RESTORE_S: Final = 600.0


class Stopped(Exception):
    """Ends the process's task group after a signal."""


async def serve(settings: Settings, catalog: Catalog, instruments: Instruments, tracer: Tracer) -> None:
    """Run every loop until SIGTERM or SIGINT."""
    engine = create_engine(settings.database_url, pool_size=settings.consumers + 8)
    redis = redis_client(settings.redis_url, max_connections=settings.consumers * 2 + 8)
    name = f"billing-{uuid.uuid4()}"
    partitions = Partitions(engine, days_ahead=DAYS_AHEAD)

    def reader(streams: dict[str, str], consumer: str) -> GroupReader:
        return GroupReader(redis, group=keys.CONSUMER_GROUP_BILLING, consumer=consumer, streams=streams)

    def count_usage(number: int, result: str) -> None:
        instruments.usage_rows.add(_METERS * number, {"result": result})

    def count_attempts(number: int, result: str) -> None:
        instruments.attempt_rows.add(number, {"result": result})

    budgets = Budgets(engine, redis)
    collector = _collector(engine, settings)
    admin = Admin(engine, budgets, currency=catalog.currency, collector=collector)
    try:
        await _sync_prices(engine, catalog)
        async with _admin(admin, settings) as address, httpx.AsyncClient() as client, TaskGroup() as tasks:
            jobs = Jobs(
                engine,
                redis,
                reader(usage_streams(), name),
                budgets=budgets,
                webhooks=Webhooks(engine, client, now_ms=lambda: int(time.time() * 1000)),
                keep_days=settings.keep_days,
                collector=collector,
                address=address,
            )
            instruments.observe("pdgate_usage_stream_lag", lambda: [(jobs.waiting, {})])
            instruments.observe("pdgate_usage_dead_letters", lambda: [(jobs.dead, {})])
            instruments.observe("pdgate_ledger_drift_ratio", lambda: [(jobs.drift_ratio, {})])
            instruments.observe("pdgate_redis_file_failing", lambda: [(int(jobs.file.failing), {})])
            for job in jobs.all:
                tasks.create_task(keep(job))
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
                tasks.create_task(keep(Job("usage", _RESTART_S, usage.run)))
            finals = reader(attempt_streams(catalog.pools), name)
            tasks.create_task(keep(Job("models", _LOOK_S, partial(_follow_added, redis, finals), longest_s=_LOOK_S)))
            attempts = Delivery(
                "attempts",
                finals,
                AttemptSink(engine, partitions),
                count_attempts,
                batch_size=settings.batch_size,
                claim_idle_ms=settings.claim_idle_ms,
                linger_s=settings.linger_s,
            )
            tasks.create_task(keep(Job("attempts", _RESTART_S, attempts.run)))
            instruments.usage_restored.add(0, {"source": "journals"})  # so that its first increase is one
            retold = Retold(
                engine,
                redis,
                AttemptSink(engine, partitions),
                pools=partial(_all_pools, redis, catalog),
                restored=lambda number: instruments.usage_restored.add(number, {"source": "journals"}),
            )
            tasks.create_task(keep(Job("retold", _LOOK_S, retold.look, longest_s=_RESTORE_S)))
            sweeper = Sweeper(redis, SettlementScripts(redis), period_s=settings.sweep_period_s)
            tasks.create_task(keep(Job("sweeper", _RESTART_S, sweeper.run)))
            tasks.create_task(watch_loop_lag(instruments))
            tasks.create_task(_until_signalled())
            log.info("billing_started", consumer=name, consumers=settings.consumers, pools=catalog.pools)
    except* Stopped:
        log.info("billing_stopped")
    finally:
        await redis.aclose()
        await engine.dispose()


async def _follow_added(redis: Redis, finals: GroupReader) -> None:
    """Read what workers of models count that were added beside the catalogue's file."""
    await finals.follow(attempt_streams([one.pool for one in await read_added(redis) or ()]))


async def _all_pools(redis: Redis, catalog: Catalog) -> Sequence[str]:
    """Return the catalogue's pools and those of models that were added beside its file."""
    return sorted({*catalog.pools, *(one.pool for one in await read_added(redis) or ())})


@asynccontextmanager
async def _admin(admin: Admin, settings: Settings) -> AsyncIterator[str]:
    """Serve the Admin service, if there is a token for it; gives its address or ''."""
    if not settings.admin_token:
        yield ""
        return
    certificates = certificates_of(
        "BILLING_", ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key, name=""
    )
    async with admin_server(
        admin, listen=settings.admin_listen, token=settings.admin_token, certificates=certificates
    ) as address:
        yield address


def _collector(engine: AsyncEngine, settings: Settings) -> Collector | None:
    """Return who asks the payment provider; None = invoices are paid by hand. Raises SettingsError."""
    if not settings.stripe_api_key:
        return None
    if not settings.stripe_webhook_secrets:
        raise SettingsError("BILLING_STRIPE_WEBHOOK_SECRETS: must be set with BILLING_STRIPE_API_KEY")
    try:
        from billing.stripe_payments import Stripe, stripe_client  # noqa: PLC0415 - not in the base installation
    except ImportError as error:
        raise SettingsError(f"BILLING_STRIPE_API_KEY: {error}: install requirements/service.txt") from None
    client = stripe_client(settings.stripe_api_key, api_base=settings.stripe_api_base)
    provider = Stripe(client, webhook_secrets=settings.stripe_webhook_secrets)
    return Collector(engine, provider, now_ms=lambda: int(time.time() * 1000))


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
    os.nice(_NICENESS)
    # Batches are thousands of small objects without cycles: by default the collector takes half of decoding's time.
    gc.set_threshold(50_000, 20, 50)
    telemetry = Telemetry()
    tracer = Tracer("billing", str(os.getpid()), endpoint=settings.otlp_endpoint)
    with telemetry.serve(host, port):
        uvloop.run(serve(settings, catalog, telemetry.instruments, tracer))
    tracer.close()


if __name__ == "__main__":
    main()
