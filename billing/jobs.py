"""What billing does by the clock, beside consuming: budgets, credits, alerts, webhooks, partitions, drift.

Every job may run in several processes at once: each works from what is stored, under locks of the database.
A job that fails is said and tried again in its next round; none ends the process.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts import raise_alerts
from billing.budgets import Budgets, Held, held_budgets
from billing.collection import Collector
from billing.credits import tenants_with_credit_across_tenants, use_credits
from billing.partitions import drop_partitions, ensure_partitions
from billing.reconcile import drift_ratio
from billing.redis_file import AppendOnlyFile
from billing.streams import GroupReader
from billing.webhooks import Webhooks
from contracts import keys
from contracts.beat import beat

log: Final = structlog.get_logger()

DAYS_AHEAD: Final = 7
_LONGEST_S: Final = 600.0
_HELD_FOR_S: Final = 5.0


class Job(msgspec.Struct, frozen=True):
    """Something to do every so many seconds."""

    name: str
    period_s: float
    run: Callable[[], Awaitable[None]]
    longest_s: float | None = None  # None: it is a loop of its own


async def keep(job: Job) -> None:
    """Do a job again and again until cancelled, whatever it raises."""
    while True:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(job.longest_s):
                await job.run()
        except Exception as error:  # the others must go on, and the next round may work
            log.warning("job_failed", job=job.name, error=f"{type(error).__name__}: {error}", exc_info=True)
        if time.monotonic() - started_s < job.period_s:
            await beat(job.period_s)


class Jobs:
    """The jobs and what their gauges say."""

    def __init__(
        self,
        engine: AsyncEngine,
        redis: Redis,
        usage: GroupReader,
        *,
        budgets: Budgets,
        webhooks: Webhooks,
        collector: Collector | None = None,
        keep_days: int | None,
        address: str,
    ) -> None:
        """`keep_days`: how long metering rows stay (None = for ever); `address`: of the Admin service, '' = none."""
        self._engine = engine
        self._redis = redis
        self._usage = usage
        self._budgets = budgets
        self._webhooks = webhooks
        self._collector = collector
        self._keep_days = keep_days
        self._address = address
        self.file = AppendOnlyFile(redis)
        self._held: Sequence[Held] = ()  # budgets that Redis must have
        self._held_read_s = float("-inf")
        self.waiting = 0
        self.dead = 0
        self.drift_ratio = 0.0

    @property
    def all(self) -> Sequence[Job]:
        """Return every job with its rhythm."""
        return (
            Job("backlog", 5.0, self._backlog, _LONGEST_S),
            Job("budgets_open", 1.0, self._open_budgets, _LONGEST_S),
            Job("budgets", 30.0, self._sync_budgets, _LONGEST_S),
            Job("alerts", 10.0, self._alerts, _LONGEST_S),
            Job("webhooks", 5.0, self._send, _LONGEST_S),
            Job("credits", 60.0, self._credits, _LONGEST_S),
            Job("partitions", 3600.0, self._partitions, _LONGEST_S),
            Job("drift", 600.0, self._drift, _LONGEST_S),
            Job("redis_file", 1.0, self.file.look, 10.0),
            Job("collections", 60.0, self._collections, _LONGEST_S),
        )

    async def _backlog(self) -> None:
        self.waiting, self.dead = await self._usage.backlog()
        if self._address:
            await self._redis.set(keys.BILLING_ADMIN, self._address, ex=30)

    async def _open_budgets(self) -> None:
        """Rebuild at once what Redis lost: until then requests with a budget are refused.

        Which there should be is read from time to time; who sets one writes it to Redis himself.
        """
        if time.monotonic() - self._held_read_s >= _HELD_FOR_S:
            await self._read_held()
        if not await self._lost_budgets():
            return
        await self._read_held()  # perhaps they were taken away
        for tenant in sorted(await self._lost_budgets()):
            log.warning("budgets_rebuilt", organisation=tenant)
            await self._budgets.sync(now=datetime.now(UTC), tenant=tenant)

    async def _read_held(self) -> None:
        async with self._engine.begin() as conn:
            self._held = [one for one in await held_budgets(conn, now=datetime.now(UTC)) if one.limit is not None]
        self._held_read_s = time.monotonic()

    async def _lost_budgets(self) -> set[str]:
        """Return the organisations one of whose budgets is not in Redis."""
        if not self._held:
            return set()
        pipe = self._redis.pipeline(transaction=False)
        for one in self._held:
            pipe.hexists(one.key, "limit")
        there: list[Any] = await pipe.execute()
        return {one.organisation for one, known in zip(self._held, there, strict=True) if not known}

    async def _sync_budgets(self) -> None:
        await self._budgets.sync(now=datetime.now(UTC))

    async def _alerts(self) -> None:
        async with self._engine.begin() as conn:
            for alert in await raise_alerts(conn, now=datetime.now(UTC)):
                log.info(
                    "budget_threshold", organisation=alert.organisation, scope=alert.scope, percent=alert.threshold
                )

    async def _send(self) -> None:
        await self._webhooks.send_due()

    async def _credits(self) -> None:
        async with self._engine.begin() as conn:
            tenants = await tenants_with_credit_across_tenants(conn)
        for tenant in tenants:
            async with self._engine.begin() as conn:
                await use_credits(conn, tenant, now=datetime.now(UTC))

    async def _partitions(self) -> None:
        today = datetime.now(UTC).date()
        async with self._engine.begin() as conn:
            await ensure_partitions(conn, today - timedelta(days=1), DAYS_AHEAD + 2)
        if self._keep_days is not None:
            async with self._engine.begin() as conn:
                for name in await drop_partitions(conn, today - timedelta(days=self._keep_days)):
                    log.info("partition_dropped", partition=name)
        await self._usage.forget_gone_consumers()

    async def _collections(self) -> None:
        if self._collector is not None:
            await self._collector.settle_due()

    async def _drift(self) -> None:
        now = datetime.now(UTC)
        async with self._engine.connect() as conn:
            await conn.execution_options(isolation_level="REPEATABLE READ")
            days = (now.date() - timedelta(days=1), now.date())
            ratios = [await drift_ratio(conn, day, now_ms=int(now.timestamp() * 1000)) for day in days]
        self.drift_ratio = max(ratios)
