"""Workers that are not needed where they are, moved to where they would be missed first if more came. Pure.

While both sides have room every split is as good as another, and the closed forms say nothing about which to prefer.
Then load beyond what has been seen yet decides: bursts come sooner than a worker does.
"""

from collections.abc import Sequence

import msgspec

from contracts.lifecycle import Role
from scheduler.policy.demand import Demand
from scheduler.policy.queueing import Corrections, Fleet, Prediction, Split, predict
from scheduler.policy.sight import RatioLimits
from scheduler.policy.ways import Way, Weighted, ways

_AS_GOOD = 0.999  # of the goodput that there is


def reserve(
    split: Split,
    demand: Demand,
    fleet: Fleet,
    corrections: Corrections,
    found: Sequence[Way],
    now: Prediction,
    limits: RatioLimits,
) -> tuple[Way | None, float]:
    """Return the way to the split that does best under `reserve_load` times the load, and its relative gain then.

    None where that gain is below `reserve_gain`, where the target is worse than the split under the load as it is,
    where an engine would have to restart, and where the worker would be missed on its way.

    Args:
        split: ready workers.
        demand: what arrives.
        fleet: costs and the target.
        corrections: what feedback says.
        found: the ways from the split.
        now: what it does under the load as it is.
        limits: constants.
    """
    enough_rps = _AS_GOOD * now.goodput_rps
    safe = {
        way.target
        for way in found
        if way.legal and not way.restarts and not way.last_unified and way.goodput_rps >= enough_rps
    }
    if not safe:
        return None, 0.0
    load = limits.reserve_load
    more = msgspec.structs.replace(corrections, prefill=corrections.prefill * load, decode=corrections.decode * load)
    then, pressed = ways(split, [Weighted(demand, 1.0)], fleet, more, Split())
    best = max((way for way in pressed if way.target in safe), key=lambda way: way.goodput_rps)
    gain = best.gain_over(then)
    if gain <= limits.reserve_gain:
        return None, 0.0
    meanwhile = predict(_without(split, best.from_role), demand, fleet, corrections)
    return (best, gain) if meanwhile.goodput_rps >= enough_rps else (None, 0.0)


def _without(split: Split, role: Role) -> Split:
    return msgspec.structs.replace(split, **{role.value: getattr(split, role) - 1})
