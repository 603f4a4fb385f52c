"""Gives back what nobody settled, at cost 0.

Gateway and scheduler settle what they served and what the other left behind. Two kinds are left:

1. Reservations of a gateway that died between its reservation and its entry in the inbox, which no scheduler knows of.
   Once a gateway's lease has been away for `GONE_S`, all that it had reserved and that is not in flight is settled as
   interrupted.
2. What is still open at deadline + 120 s was left by both, and is settled as lost.

The settle script decides races: the request is settled once, by whoever came first.
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
from contracts.settlement import (
    Reservation,
    SettlementScripts,
    actual_usage,
    decode_owner,
    decode_reservation,
    usage_event_of,
)
from contracts.usage import Outcome
from contracts.wire import Owner

log: Final = structlog.get_logger()

GRACE_MS: Final = 120_000
GONE_S: Final = 45.0
"""Schedulers settle what they know of a dead gateway within seconds; what Redis lost is restored by then."""
_BATCH: Final = 200
_SWEEP_S: Final = 60.0


class _Left(msgspec.Struct, frozen=True):
    """An open reservation."""

    org: str
    rid: str
    reservation: Reservation
    owner: Owner


class Sweeper:
    """Settles abandoned reservations of all shards. Several may run."""

    def __init__(
        self,
        redis: Redis,
        scripts: SettlementScripts,
        *,
        period_s: float = 10.0,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._clock_s = clock_s
        self._absent_s: dict[str, float] = {}  # since when a gateway's lease is away
        self._buried: set[str] = set()  # gateways whose reservations were gone through
        self._scripts = scripts
        self._period_s = period_s
        self._now_ms = now_ms

    async def run(self) -> None:
        """Sweep every period until cancelled."""
        while True:
            try:
                async with timeout(_SWEEP_S):
                    await self.sweep()
                    await self.bury()
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
                left = await self._read(shard, member)
                if left is not None:
                    settled += await self._settle(left, Outcome.LOST, "nobody_settled")
        return settled

    async def bury(self) -> int:
        """Settle what gateways that are gone had reserved and never handed over; return how many requests that were."""
        gone = await self._gone()
        if not gone:
            return 0
        settled = 0
        for shard in range(NUM_SHARDS):
            async for member, _ in self._redis.zscan_iter(keys.open_reservations_of_shard(shard), count=_BATCH):
                left = await self._read(shard, member)
                if left is not None and left.reservation.gateway_id in gone and not await self._in_flight(left):
                    settled += await self._settle(left, Outcome.INTERRUPTED, "gateway_dead")
        self._buried |= gone
        return settled

    async def _gone(self) -> set[str]:
        """Return the gateways whose lease is away for long enough, and that were not buried yet."""
        known: Any = await self._redis.zrange(keys.GATEWAYS, 0, -1)
        names = [name.decode() for name in known]
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.exists(keys.gateway_lease(name))
        there: list[Any] = await pipe.execute() if names else []
        now_s = self._clock_s()
        absent = {name for name, lives in zip(names, there, strict=True) if not lives}
        self._absent_s = {name: self._absent_s.get(name, now_s) for name in absent}
        self._buried &= absent
        return {name for name, since_s in self._absent_s.items() if now_s - since_s >= GONE_S} - self._buried

    async def _read(self, shard: int, member: bytes) -> _Left | None:
        """Return an open reservation; None when it is lost, or cannot be read."""
        org, _, rid = member.decode().rpartition("/")
        raw: Any = await self._redis.get(keys.reservation(org, rid))
        if raw is None:  # its key was lost with Redis data: nothing is reserved any more
            await self._redis.zrem(keys.open_reservations_of_shard(shard), member)
            return None
        try:
            reservation = decode_reservation(raw)
            return _Left(org, rid, reservation, decode_owner(reservation.owner))
        except msgspec.DecodeError:  # stays open and is said every period: it holds a tenant's limits
            log.exception("reservation_unreadable", org=org, rid=rid)
            return None

    async def _in_flight(self, left: _Left) -> bool:
        return bool(await self._redis.exists(keys.inflight(left.reservation.pool, left.rid)))

    async def _settle(self, left: _Left, outcome: Outcome, cause: str) -> bool:
        """Settle a reservation at no cost; return whether nobody had."""
        event = usage_event_of(
            left.owner,
            rid=left.rid,
            pool=left.reservation.pool,
            outcome=outcome,
            cause=cause,
            attempts=0,
            estimated=True,
            settled_by="billing",
        )
        try:
            settled = await self._scripts.settle(event, actual_usage(event))
        except ResponseError:  # stays open and is said every period; the others must not wait for it
            log.exception("reservation_not_settled", org=left.org, rid=left.rid)
            return False
        if settled:
            log.warning(
                "request_lost",
                org=left.org,
                rid=left.rid,
                pool=event.pool,
                deadline_ms=left.reservation.deadline_ms,
                cause=cause,
            )
        return bool(settled)
