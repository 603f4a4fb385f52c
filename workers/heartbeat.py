"""The worker's registration: a lease in Redis, renewed each second, gone three seconds after the worker."""

import asyncio
import time
from collections.abc import Callable

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts.keys import pool_workers, worker_lease
from contracts.wire import Registration, encode

log = structlog.get_logger()

LEASE_MS = 3_000
FORGET_MS = 24 * 3_600_000  # names of workers that died without taking theirs out
PERIOD_S = 1.0


class Heartbeat:
    """Keeps one registration alive. While Redis is away the worker runs on and this keeps trying."""

    def __init__(self, redis: Redis, registration: Callable[[], Registration]) -> None:
        self._redis = redis
        self._registration = registration
        self._renew = asyncio.Event()
        self._away = False

    def renew_soon(self) -> None:
        """Write the lease now instead of at the next beat: the state has changed."""
        self._renew.set()

    async def run(self) -> None:
        """Write the lease every second until cancelled."""
        while True:
            await self._write()
            self._renew.clear()
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._renew.wait()
            except TimeoutError:
                continue

    async def remove(self) -> None:
        """Take the registration out: the worker stops cleanly."""
        registration = self._registration()
        try:
            async with asyncio.timeout(PERIOD_S), self._redis.pipeline(transaction=False) as pipe:
                pipe.delete(worker_lease(registration.pool, registration.worker_id))
                pipe.zrem(pool_workers(registration.pool), registration.worker_id)
                await pipe.execute()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("registration_not_removed", error=str(error))

    async def _write(self) -> None:
        registration = self._registration()
        pool = registration.pool
        try:
            async with asyncio.timeout(PERIOD_S), self._redis.pipeline(transaction=False) as pipe:
                pipe.set(worker_lease(pool, registration.worker_id), encode(registration), px=LEASE_MS)
                now_ms = int(time.time() * 1000)
                pipe.zadd(pool_workers(pool), {registration.worker_id: now_ms + LEASE_MS})
                pipe.zremrangebyscore(pool_workers(pool), "-inf", now_ms - FORGET_MS)
                await pipe.execute()
        except (RedisError, OSError, TimeoutError) as error:
            if not self._away:
                log.warning("redis_is_away", error=str(error))
            self._away = True
        else:
            if self._away:
                log.info("redis_is_back")
            self._away = False
