"""Machines that several pools share: who gives a worker's room to whom, pool by pool (policy.packing).

Each leader tells in its note what its workers are worth and whether it lacks room, reads what the others tell, and
gives way when the common answer names its pool. Room that came free is its taker's: nobody else starts workers until
then.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys
from contracts.scaling import ScaleNote, decode_note
from scheduler.crew import Crew
from scheduler.policy.headcount import Bounds, Member, ScalePlan, ScaleSight, WhyScale
from scheduler.policy.packing import Handover, PackingLimits, Stake, first_taker, handover, who_gives, worth

_REDIS_TIMEOUT_S: Final = 2.0


class SharedRoom:
    """One pool's side of it, during one term."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        *,
        neighbours: Sequence[str],
        crew: Crew,
        bounds: Bounds,
        limits: PackingLimits,
        clear_s: float,
    ) -> None:
        """`neighbours`: pools that may share machines with this one. `clear_s`: in which a backlog should be gone."""
        self._redis = redis
        self._pool = pool
        self._neighbours = neighbours
        self._crew = crew
        self._bounds = bounds
        self._limits = limits
        self._clear_s = clear_s
        self._others: Sequence[Stake] = ()
        self._gave_s: float | None = None
        self.crowded = False
        """Whether the fleet has no room because of other pools."""
        self.stake = Stake(pool=pool)
        """What the pool says of itself."""

    async def read(self) -> None:
        """Read what the others say; while Redis is away nobody says anything."""
        found = []
        try:
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                for pool in self._neighbours:  # one by one: each pool's keys are in a slot of their own
                    raw: Any = await self._redis.get(keys.scaling(pool))
                    if raw:
                        found.append(_stake(pool, raw))
        except (RedisError, TimeoutError):
            found = []
        self._others = [stake for stake in found if stake is not None]

    @property
    def is_anothers(self) -> bool:
        """Whether room that is free, or comes free, is another pool's."""
        first = first_taker(self._stakes)
        return first is not None and first.pool != self._pool

    @property
    def comes(self) -> bool:
        """Whether another pool gives its room to this one, or is about to."""
        first, moved = first_taker(self._stakes), handover(self._stakes, self._limits)
        giving = any(stake.giving for stake in self._others)
        return first is not None and first.pool == self._pool and (giving or moved is not None)

    def look(self, plan: ScalePlan, sight: ScaleSight, *, boot_s: float | None, now_s: float) -> None:
        """Work out what the pool says from now on. `boot_s`: what a start takes, as measured."""
        serving = sum(m.ready for m in sight.members)
        rate_rps = sight.rate.now_rps if sight.rate is not None else 0.0
        keeps, gains = worth(rate_rps, sight.num_waiting, serving, clear_s=self._clear_s)
        if self._crew.giving:
            self._gave_s = now_s
        given = self._gave_s is not None and now_s - self._gave_s < self._limits.handover_s
        resident_s = self._crew.resident_s
        stays = resident_s < max(self._limits.residence_s, self._limits.boots * (boot_s or 0.0))
        self.stake = Stake(
            pool=self._pool,
            keeps_rps=keeps,
            gains_rps=gains,
            wants=int(plan.why is WhyScale.NO_ROOM and (self.crowded or self.is_anothers)),
            spare=0 if stays else len(who_gives(sight.members, self._bounds)),
            giving=int(given),
            resident_s=resident_s,
        )

    def to_give(self, sight: ScaleSight, now_s: float) -> tuple[Handover, tuple[Member, ...]] | None:
        """Return whom to let go now, and for whom."""
        moved = handover(self._stakes, self._limits)
        if moved is None or moved.giver != self._pool:
            return None
        self._gave_s = now_s
        return moved, who_gives(sight.members, self._bounds)

    def told(self, note: ScaleNote) -> ScaleNote:
        """Return a note with what the pool says of itself."""
        own = self.stake
        return msgspec.structs.replace(
            note,
            keeps_rps=own.keeps_rps,
            gains_rps=own.gains_rps,
            wants=own.wants,
            spare=own.spare,
            giving=own.giving,
            resident_s=own.resident_s,
        )

    @property
    def _stakes(self) -> Sequence[Stake]:
        return [*self._others, self.stake]


def _stake(pool: str, raw: bytes) -> Stake | None:
    try:
        note = decode_note(raw)
    except msgspec.MsgspecError:  # of another version
        return None
    if note.mode != "auto":
        return None
    return Stake(
        pool=pool,
        keeps_rps=note.keeps_rps,
        gains_rps=note.gains_rps,
        wants=note.wants,
        spare=note.spare,
        giving=note.giving,
        resident_s=note.resident_s,
    )
