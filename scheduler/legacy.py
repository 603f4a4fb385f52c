"""What a leader hands to the next one, so that a fail-over forgets nothing that took minutes to learn.

1. With each point of the series the leader writes its legacy to one key of the pool (`contracts.keys.learned`).
2. A new term reads it before it serves: the controller's gains and its last move (the cooldown goes on), how the demand
   changed, lengths of answers, the fit of the costs, the rung of the ladder; of a pool that is scaled how many foreseen
   misses happen, the arrivals of the last half hour and what they asked for (policy.handover).
3. Prefixes need none: workers tell a new leader their whole tables.

A legacy that cannot be read, or is of another version, is left alone: everything in it is learned again.
"""

import asyncio
import time

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys
from contracts.resp import Argument
from scheduler.autoscaler import Autoscaler
from scheduler.controller import Decided, RatioController
from scheduler.degrade import Ladder
from scheduler.memory import PoolMemory
from scheduler.policy.fit import FitState
from scheduler.policy.handover import Handover
from scheduler.policy.ladder import Rung
from scheduler.policy.lengths import Level

log = structlog.get_logger()

VERSION = 1
_KEPT_S = 86_400
_MOST_LEVELS = 256
_DECIDED_HOLDS_S = 600.0
_TIMEOUT_S = 0.5


class Legacy(msgspec.Struct, frozen=True, kw_only=True):
    """What one leader knew at one time."""

    v: int = VERSION
    at_unix_ms: int
    decided: Decided
    lengths: list[Level]
    costs: FitState
    rung: int
    scaling: Handover | None = None
    """None = of a leader that scaled nobody."""


decode = msgspec.msgpack.Decoder(Legacy).decode


def save_command(
    pool: str, memory: PoolMemory, controller: RatioController, ladder: Ladder, autoscaler: Autoscaler | None = None
) -> tuple[Argument, ...]:
    """Return the Redis command that keeps a leader's legacy for a day."""
    legacy = Legacy(
        at_unix_ms=int(time.time() * 1000),
        decided=controller.decided(),
        lengths=memory.router.lengths.levels(_MOST_LEVELS),
        costs=memory.costs.state,
        rung=ladder.legacy,
        scaling=autoscaler.handover() if autoscaler is not None else None,
    )
    return ("SET", keys.learned(pool), msgspec.msgpack.encode(legacy), "EX", _KEPT_S)


async def take_over(
    redis: Redis,
    pool: str,
    memory: PoolMemory,
    controller: RatioController,
    ladder: Ladder,
    autoscaler: Autoscaler | None = None,
) -> bool:
    """Take over the former leader's legacy; return whether there was one."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            raw = await redis.get(keys.learned(pool))
        if not raw:
            return False
        legacy = decode(raw if isinstance(raw, bytes) else raw.encode())
    except (RedisError, TimeoutError, msgspec.MsgspecError) as error:
        log.warning("legacy_not_read", pool=pool, error=str(error))
        return False
    if legacy.v != VERSION:
        return False
    memory.router.lengths.restore(legacy.lengths)
    memory.costs.restore(legacy.costs)
    ago_s = max(0.0, time.time() - legacy.at_unix_ms / 1000)
    if autoscaler is not None and legacy.scaling is not None:
        autoscaler.restore(legacy.scaling, ago_s=ago_s)
    if ago_s <= _DECIDED_HOLDS_S:
        controller.restore(legacy.decided, ago_s=ago_s)
        if legacy.rung in {rung.value for rung in Rung}:
            ladder.restore(Rung(legacy.rung))
    log.info("legacy_taken", pool=pool, ago_s=round(ago_s, 1), lengths=len(legacy.lengths))
    return True
