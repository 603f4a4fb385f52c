"""Which scheduler should lead a pool: pools part themselves among the processes that are there.

1. Each process tells of itself in one sorted set per pool (a lease of three seconds).
2. Rendezvous hashing over those names ranks the processes for each pool; each leads about its share of the pools.
3. A free lease is taken by the first in rank at once, by the others only if it stays free (leader.LeaderLease). Who
   held it last does not count: its process has just died, or gave it up.
4. A leader that has not been the first for a while gives the lease up between two changes of roles. The one that takes
   over has held streams to all workers all the while; running streams are not touched.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys
from contracts.beat import beat

log = structlog.get_logger()


class Shares:
    """The processes that serve one pool, as one of them sees it."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        scheduler_id: str,
        *,
        beat_s: float = 1.0,
        ttl_s: float = 3.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._pool = pool
        self._scheduler_id = scheduler_id
        self._beat_s = beat_s
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._others: frozenset[str] = frozenset()
        self._first = scheduler_id
        self._first_since_s = now_s()

    async def run(self) -> None:
        """Tell of this process and look for others, until cancelled; then be gone at once."""
        key = keys.schedulers(self._pool)
        try:
            while True:
                try:
                    async with asyncio.timeout(self._ttl_s):
                        await self._beat(key)
                except (RedisError, TimeoutError) as error:
                    log.warning("shares_not_read", pool=self._pool, error=str(error))
                await beat(self._beat_s)
        finally:
            await self._leave(key)

    async def _beat(self, key: str) -> None:
        now_ms = await self._redis_ms()
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.zadd(key, {self._scheduler_id: now_ms + int(self._ttl_s * 1000)})
            pipeline.zremrangebyscore(key, "-inf", now_ms)
            pipeline.zrange(key, 0, -1)
            answers: Any = await pipeline.execute()
        self.seen({name.decode() for name in answers[2]})

    async def _redis_ms(self) -> int:
        """Return the Unix time by the one clock that all processes share: their own may differ, and jump."""
        seconds, micros = await self._redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def _leave(self, key: str) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self._redis.zrem(key, self._scheduler_id)
        except (RedisError, TimeoutError):
            pass  # it expires

    def seen(self, names: set[str]) -> None:
        """Take which processes are there."""
        self._others = frozenset(names - {self._scheduler_id})
        first = max((*self._others, self._scheduler_id), key=self._weight)
        if first != self._first:
            self._first, self._first_since_s = first, self._now_s()

    def rank(self, *, without: str = "") -> int:
        """Return how many of the other processes go before this one, but for one that does not count."""
        own = self._weight(self._scheduler_id)
        return sum(1 for other in self._others if other != without and self._weight(other) > own)

    @property
    def out_of_turn_s(self) -> float:
        """For how long another process has been the first for the pool; 0 when this one is."""
        return 0.0 if self._first == self._scheduler_id else self._now_s() - self._first_since_s

    def _weight(self, name: str) -> bytes:
        return hashlib.blake2b(f"{self._pool}\0{name}".encode(), digest_size=8).digest()
