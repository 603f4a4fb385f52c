"""Many models on few machines: which pool gives a worker's room to which other one. Pure.

Each pool says what its workers are worth to it, in requests per second and worker; every pool reads what all say and
comes to the same answer, so nobody has to decide for the others.

1. A pool that wants a worker, and finds no room because others take it, is a taker. The one that gains most comes
   first; until it has its worker no other pool takes room.
2. The giver is the pool whose least worker is worth least. It must be worth clearly less than what the taker gains
   (`margin`), and its workers must have served for a while (`residence_s`): a load that is not used is worse than a
   wait.

So over any time each machine is loaded at most once per residence, whatever arrives.
"""

from collections.abc import Sequence

import msgspec

from scheduler.policy.headcount import Bounds, Member, serves, split_of


class Stake(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool says of its hold on the room that pools share."""

    pool: str
    keeps_rps: float = 0.0
    """Requests per second that one of its workers stands for."""
    gains_rps: float = 0.0
    """Requests per second, those that wait among them, that one more would stand for."""
    wants: int = 0
    """Workers that it would start if others left room."""
    spare: int = 0
    """Workers that it could give up: its own, ready, above the operator's floors."""
    giving: int = 0
    """Workers that it is giving up for others, until the room has found its taker."""
    resident_s: float = 0.0
    """For how long the youngest of its workers has served."""


class PackingLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of it."""

    residence_s: float = 120.0
    """Least time that a worker serves before another pool may have its room."""
    margin: float = 2.0
    """How much more the taker must gain than the giver loses."""
    boots: float = 3.0
    """A worker also stays for so many times what its start took."""
    handover_s: float = 15.0
    """For how long room that came free is thought to be on its way to its taker."""


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Who gives one worker's room to whom."""

    giver: str
    taker: str


def handover(stakes: Sequence[Stake], limits: PackingLimits) -> Handover | None:
    """Return the next one; None = everybody keeps what they have."""
    taker = first_taker(stakes)
    if taker is None or sum(stake.giving for stake in stakes) >= taker.wants:
        return None
    givers = [
        stake
        for stake in stakes
        if stake.spare > 0
        and stake.pool != taker.pool
        and stake.resident_s >= limits.residence_s
        and taker.gains_rps >= limits.margin * stake.keeps_rps
        and taker.gains_rps > 0
    ]
    if not givers:
        return None
    giver = min(givers, key=lambda stake: (stake.keeps_rps, -stake.resident_s, stake.pool))
    return Handover(giver=giver.pool, taker=taker.pool)


def first_taker(stakes: Sequence[Stake]) -> Stake | None:
    """Return who has the first claim on room that comes free; None = nobody lacks any."""
    takers = [stake for stake in stakes if stake.wants > 0]
    return max(takers, key=lambda stake: (stake.gains_rps, stake.pool), default=None)


def worth(rate_rps: float, num_waiting: int, workers: int, *, clear_s: float) -> tuple[float, float]:
    """Return what a pool's least worker stands for, and what one more would, requests per second."""
    load = rate_rps + num_waiting / clear_s
    return (load / workers if workers else 0.0), load / (workers + 1)


def who_gives(members: Sequence[Member], bounds: Bounds) -> tuple[Member, ...]:
    """Return who would go: one that can be spared, or all of a pool that may go to zero; nobody at the floors."""
    ours = sorted(
        (m for m in members if m.ours and m.ready and not m.reclaimed), key=lambda m: (round(m.drain_s), m.worker_id)
    )
    for member in ours:
        left, floor = split_of([m for m in members if m is not member]), bounds.floor
        kept = left.prefill >= floor.prefill and left.decode >= floor.decode and left.unified >= floor.unified
        if kept and serves(left) and bool(left.prefill) == bool(left.decode):
            return (member,)
    return tuple(ours) if bounds.to_zero and len(ours) == len(members) else ()
