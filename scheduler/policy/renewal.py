"""Replacing workers of an old launch, one after the other, while the pool serves. Pure.

KV caches of old and new workers do not fit (other weights, other settings), so a pair is either old or new:

1. The first new ones are those that can serve by themselves: a unified worker, or one of each side.
2. An old worker goes once its place is taken, and only if the old ones that remain can still serve, or none remains:
   one side without the other would idle.
3. So there is one worker more than before at a time, and with pairs up to two: who was replaced has left before the
   next one is started. Where there is no room for that, an old one may go first, if the rest still serves within the
   floors; otherwise nothing happens, and the reason says so.

A new worker that does not stay up stops it: the old ones stay.
"""

import msgspec

from contracts.lifecycle import Role
from scheduler.policy.headcount import Member, ScaleSight, WhyScale, serves, split_of
from scheduler.policy.queueing import Split

_SIDES = (Role.PREFILL, Role.DECODE)
_ROLES = (Role.UNIFIED, *_SIDES)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What comes next."""

    why: WhyScale
    renewing: Split
    """See ScaleState."""
    leaves: tuple[Member, ...] = ()
    """Old ones whose place is taken."""
    starts: tuple[Role, ...] = ()
    """New ones that are needed together."""
    instead: tuple[Member, ...] = ()
    """Old ones that may go first where there is no room for the new ones."""


def renew(sight: ScaleSight, renewing: Split | None, floor: Split) -> Turn | None:
    """Return the next turn of a renewal; None = no worker is old."""
    there = [m for m in sight.members if m.ours and not m.reclaimed]
    old, new = [m for m in there if m.old], [m for m in there if not m.old]
    if not old:
        return None
    wanted = renewing if renewing is not None else split_of(there)
    if any(not m.ready for m in new) or sight.flipping or sight.num_leaving:
        return Turn(why=WhyScale.RENEWING, renewing=wanted)
    if sight.failing:
        return Turn(why=WhyScale.RENEWAL_HELD, renewing=wanted)
    standing = [m for m in sight.members if not m.ours]  # workers started by hand serve with the old ones
    leaves = _replaced(old, split_of(new), standing, wanted)
    if leaves:
        return Turn(why=WhyScale.RENEW, renewing=wanted, leaves=tuple(leaves))
    starts = _next(split_of(new), wanted)
    return Turn(
        why=WhyScale.RENEW,
        renewing=wanted,
        starts=starts,
        instead=_first_to_go(old, new, standing, wanted, starts, floor),
    )


def _replaced(old: list[Member], new: Split, standing: list[Member], wanted: Split) -> list[Member]:
    """Return the old workers whose place is taken and whom nobody needs."""
    leaves: list[Member] = []
    for role in _ROLES:
        of_role = _by_cost([m for m in old if m.role is role])
        leaves += of_role[: max(0, _of(new, role) + len(of_role) - _of(wanted, role))]
    while leaves and not _may_remain(remains := [m for m in old if m not in leaves], new, standing):
        lacking = next((r for r in _SIDES if not _of(split_of([*remains, *standing]), r)), None)
        kept = next((m for m in reversed(leaves) if lacking is None or m.role is lacking), leaves[-1])
        leaves.remove(kept)
    return leaves


def _may_remain(remains: list[Member], new: Split, standing: list[Member]) -> bool:
    """Whether these old ones are of use without the others, and the pool serves."""
    if not remains:
        return serves(new) or serves(split_of(standing))
    left = split_of([*remains, *standing])
    return bool(left.prefill) == bool(left.decode) and (serves(new) or serves(left))


def _next(new: Split, wanted: Split) -> tuple[Role, ...]:
    """Return whom to start: what can serve by itself, then one at a time."""
    lacking = {role: _of(wanted, role) - _of(new, role) for role in _ROLES}
    if not serves(new):
        if lacking[Role.UNIFIED] > 0:
            return (Role.UNIFIED,)
        return tuple(role for role in _SIDES if lacking[role] > 0)
    most = max(_ROLES, key=lambda role: lacking[role])
    return (most,) if lacking[most] > 0 else ()


def _first_to_go(
    old: list[Member],
    new: list[Member],
    standing: list[Member],
    wanted: Split,
    starts: tuple[Role, ...],
    floor: Split,
) -> tuple[Member, ...]:
    """Return old ones that can be spared until their successors serve. While one is missing already, nobody."""
    if len(old) + len(new) < wanted.total:
        return ()
    for roles in (starts, _SIDES):
        first = [next(iter(_by_cost([m for m in old if m.role is role])), None) for role in roles]
        spared = [m for m in first if m is not None]
        remains = [m for m in old if m not in spared]
        left = split_of([*remains, *new, *standing])
        short = left.prefill < floor.prefill or left.decode < floor.decode or left.unified < floor.unified
        if len(spared) == len(roles) and not short and _may_remain(remains, split_of(new), standing):
            return tuple(spared)
    return ()


def _by_cost(members: list[Member]) -> list[Member]:
    """Return them, those first that do not serve, then those that are empty soonest."""
    return sorted(members, key=lambda m: (m.ready, round(m.drain_s), m.worker_id))


def _of(split: Split, role: Role) -> int:
    found: int = getattr(split, role.value)
    return found
