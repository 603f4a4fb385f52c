"""Signs of life of this gateway: while its lease stands, schedulers leave its requests to it."""

import asyncio
import time
from typing import Final

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys

log = structlog.get_logger()

LEASE_MS: Final = 3000
PERIOD_S: Final = 1.0
_TIMEOUT_S: Final = 1.0
_RELEASE_TIMEOUT_S: Final = 0.3  # at shutdown; the lease ends by itself
_NOTICES_KEPT_MS: Final = 3_600_000
_FORGET_GATEWAY_MS: Final = 24 * 3_600_000


class Lease:
    """Renews the lease. `run` until cancelled, then `release`."""

    def __init__(self, redis: Redis, *, gateway_id: str, address: str) -> None:
        self._redis = redis
        self._gateway_id = gateway_id
        self._address = address

    async def renew(self) -> None:
        """Renew once. Raises RedisError."""
        now_ms = int(time.time() * 1000)
        # One tag per pipeline, as everywhere; the set of gateways has none.
        own = self._redis.pipeline(transaction=False)
        own.set(keys.gateway_lease(self._gateway_id), self._address, px=LEASE_MS)
        own.pexpire(keys.notices(self._gateway_id), _NOTICES_KEPT_MS)
        await own.execute()
        shared = self._redis.pipeline(transaction=False)
        shared.zadd(keys.GATEWAYS, {self._gateway_id: now_ms + LEASE_MS})
        shared.zremrangebyscore(keys.GATEWAYS, "-inf", now_ms - _FORGET_GATEWAY_MS)
        await shared.execute()

    async def run(self) -> None:
        """Renew again and again."""
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self.renew()
            except (RedisError, OSError) as error:
                log.warning("lease_not_renewed", error=str(error))
            await asyncio.sleep(PERIOD_S)

    async def release(self) -> None:
        """Give the lease up: everything of this gateway is settled."""
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await self._redis.delete(keys.gateway_lease(self._gateway_id), keys.notices(self._gateway_id))
                await self._redis.zrem(keys.GATEWAYS, self._gateway_id)
        except (RedisError, OSError) as error:
            log.warning("lease_not_released", error=str(error))
