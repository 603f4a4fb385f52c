"""Signs of life of this gateway: while its lease stands, schedulers leave its requests to it."""

import asyncio
import time
from typing import Final

import structlog
from redis.exceptions import RedisError

from contracts import keys
from contracts.beat import beat
from contracts.resp import RespConnection

log = structlog.get_logger()

LEASE_MS: Final = 3000
PERIOD_S: Final = 1.0
_TIMEOUT_S: Final = 1.0
_RELEASE_TIMEOUT_S: Final = 0.3  # at shutdown; the lease ends by itself
_NOTICES_KEPT_MS: Final = 3_600_000
_FORGET_GATEWAY_MS: Final = 24 * 3_600_000


class Lease:
    """Renews the lease. `run` until cancelled, then `release`."""

    def __init__(self, connection: RespConnection, *, gateway_id: str, address: str) -> None:
        self._connection = connection
        self._gateway_id = gateway_id
        self._address = address

    async def renew(self) -> None:
        """Renew once. Raises RedisError."""
        now_ms = int(time.time() * 1000)
        replies = await self._connection.call_all(
            (
                ("SET", keys.gateway_lease(self._gateway_id), self._address, "PX", LEASE_MS),
                ("PEXPIRE", keys.notices(self._gateway_id), _NOTICES_KEPT_MS),
                ("ZADD", keys.GATEWAYS, now_ms + LEASE_MS, self._gateway_id),
                ("ZREMRANGEBYSCORE", keys.GATEWAYS, "-inf", now_ms - _FORGET_GATEWAY_MS),
            )
        )
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply

    async def run(self) -> None:
        """Renew again and again."""
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self.renew()
            except (RedisError, OSError) as error:
                log.warning("lease_not_renewed", error=str(error))
            await beat(PERIOD_S)

    async def release(self) -> None:
        """Give the lease up: everything of this gateway is settled."""
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await self._connection.call_all(
                    (
                        ("DEL", keys.gateway_lease(self._gateway_id)),
                        ("DEL", keys.notices(self._gateway_id)),
                        ("ZREM", keys.GATEWAYS, self._gateway_id),
                    )
                )
        except (RedisError, OSError) as error:
            log.warning("lease_not_released", error=str(error))
