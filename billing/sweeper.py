"""Gives back what nobody settled: reservations open long past their deadline are settled as lost, at cost 0.

Gateway and scheduler settle what they served and what the other left behind. What is still open at
deadline + 120 s was left by both. The settle script decides races: the request is settled once, by whoever came first.
"""

import time
from asyncio import sleep, timeout
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from contracts import keys
from contracts.identity import NUM_SHARDS
from contracts.settlement import SettlementScripts, actual_usage, decode_owner, decode_reservation, usage_event_of
from contracts.usage import Outcome

log: Final = structlog.get_logger()

GRACE_MS: Final = 120_000
_BATCH: Final = 200
_SWEEP_S: Final = 60.0


class Sweeper:
    """Settles abandoned reservations of all shards. Several may run."""

    def __init__(
        self,
        redis: Redis,
        scripts: SettlementScripts,
        *,
        period_s: float = 10.0,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._redis = redis
        self._scripts = scripts
        self._period_s = period_s
        self._now_ms = now_ms

    async def run(self) -> None:
        """Sweep every period until cancelled."""
        while True:
            try:
                async with timeout(_SWEEP_S):
                    await self.sweep()
            except (RedisError, OSError) as error:
                log.warning("sweep_failed", error=f"{type(error).__name__}: {error}")
            await sleep(self._period_s)

    async def sweep(self) -> int:
        """Settle what is overdue; return how many requests that were."""
        before_ms = self._now_ms() - GRACE_MS
        pipe = self._redis.pipeline(transaction=False)
        for shard in range(NUM_SHARDS):
            pipe.zrangebyscore(keys.open_reservations_of_shard(shard), "-inf", before_ms, start=0, num=_BATCH)
        settled = 0
        for shard, members in enumerate(await pipe.execute()):
            for member in members:
                settled += await self._settle(shard, member.decode() if isinstance(member, bytes) else member)
        return settled

    async def _settle(self, shard: int, member: str) -> bool:
        org, _, rid = member.rpartition("/")
        raw: Any = await self._redis.get(keys.reservation(org, rid))
        if raw is None:  # its key was lost with Redis data: nothing is reserved any more
            await self._redis.zrem(keys.open_reservations_of_shard(shard), member)
            return False
        try:
            reservation = decode_reservation(raw)
            owner = decode_owner(reservation.owner)
        except msgspec.DecodeError:  # stays open and is said every period: it holds a tenant's limits
            log.exception("reservation_unreadable", org=org, rid=rid)
            return False
        event = usage_event_of(
            owner,
            rid=rid,
            pool=reservation.pool,
            outcome=Outcome.LOST,
            cause="nobody_settled",
            attempts=0,
            estimated=True,
            settled_by="billing",
        )
        try:
            settled = await self._scripts.settle(event, actual_usage(event))
        except ResponseError:  # stays open and is said every period; the others must not wait for it
            log.exception("reservation_not_settled", org=org, rid=rid)
            return False
        if settled:
            log.warning("request_lost", org=org, rid=rid, pool=reservation.pool, deadline_ms=reservation.deadline_ms)
        return settled
