"""Workers that are not needed where they are, moved to where they would be missed first if more came. Pure.

While both sides have room every split is as good as another, and the closed forms say nothing about which to prefer.
Then load beyond what has been seen yet decides: bursts come sooner than a worker does.
"""

from collections.abc import Sequence

import msgspec

from contracts.lifecycle import Role
from scheduler.policy.demand import Demand
from scheduler.policy.queueing import Corrections, Fleet, Prediction, Predictor, Split, predict
from scheduler.policy.sight import RatioLimits, Sight
from scheduler.policy.ways import Way, Weighted, ways

_AS_GOOD = 0.999  # of the goodput that there is


def reserve(
    sight: Sight,
    demand: Demand,
    fleet: Fleet,
    corrections: Corrections,
    found: Sequence[Way],
    now: Prediction,
    limits: RatioLimits,
) -> tuple[Way | None, float]:
    """Return the way to the split that does best under `reserve_load` times the load, and its relative gain then.

    None where that gain is below `reserve_gain`, where the target is worse than the split under the load as it is or
    under one that was seen lately, where an engine would have to restart, and where the worker would be missed on its
    way.

    Args:
        sight: the split, and what was seen.
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
    split, load = sight.split, limits.reserve_load
    more = msgspec.structs.replace(corrections, prefill=corrections.prefill * load, decode=corrections.decode * load)
    then, pressed = ways(split, [Weighted(demand, 1.0)], fleet, more, Split())
    before = [Predictor(past, fleet, Corrections()) for past in sight.past]
    for way in sorted(pressed, key=lambda way: -way.goodput_rps):
        gain = way.gain_over(then)
        if gain <= limits.reserve_gain:
            break
        if way.target in safe and all(_is_as_good(way.target, split, predictor) for predictor in before):
            meanwhile = predict(_without(split, way.from_role), demand, fleet, corrections)
            return (way, gain) if meanwhile.goodput_rps >= enough_rps else (None, 0.0)
    return None, 0.0


def _is_as_good(target: Split, split: Split, predictor: Predictor) -> bool:
    return predictor.predict(target).goodput_rps >= _AS_GOOD * predictor.predict(split).goodput_rps


def _without(split: Split, role: Role) -> Split:
    return msgspec.structs.replace(split, **{role.value: getattr(split, role) - 1})
