"""How many workers prefill, decode and do both: at most one moves at a time. Pure.

Each tick: feedback first (gains on the predicted loads, driven by blamed misses), then every legal move is
valued by the predicted goodput of the splits it leads to, then the best one is weighed against its price.
`decide` answers with the next state and a decision that always has a reason.
"""

import enum
import math
from collections.abc import Sequence

import msgspec

from contracts.lifecycle import Role
from scheduler.policy.demand import Demand
from scheduler.policy.offers import cheapest_donor, floors, offers
from scheduler.policy.queueing import Fleet, Prediction, Split
from scheduler.policy.sight import RatioLimits, RatioState, Sight
from scheduler.policy.ways import Way


class Mode(enum.StrEnum):
    """Who decides."""

    AUTO = "auto"
    SHADOW = "shadow"  # decide and tell, move nothing
    MANUAL = "manual"  # keep the pinned split


class Why(enum.StrEnum):
    """The reason of a tick's decision. A metric label and a log field."""

    GAIN = "gain"
    RESERVE = "reserve"  # nothing gains, and there would be the most room for more load
    POOL_EMPTY = "pool_empty"
    PINNED = "pinned"
    NO_DATA = "no_data"  # nothing measured, or too few arrivals to tell
    IDLE = "idle"
    MOVING = "moving"
    COOLING_DOWN = "cooling_down"
    BALANCED = "balanced"
    GAIN_TOO_SMALL = "gain_too_small"
    UNCONFIRMED = "unconfirmed"
    PRICE_TOO_HIGH = "price_too_high"
    AT_FLOOR = "at_floor"


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One worker changes its role."""

    worker_id: str
    from_role: Role
    to_role: Role


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A tick's answer."""

    move: Move | None
    why: Why
    split: Split
    target: Split
    """Where the best direction leads, several moves ahead."""
    gain: float
    """Relative gain in goodput at the target; of a move for room, under the load that it is for."""
    now: Prediction | None = None


def decide(
    state: RatioState, sight: Sight, fleet: Fleet, limits: RatioLimits, *, mode: Mode, now_s: float
) -> tuple[RatioState, Decision]:
    """Choose the next move, or say why there is none.

    Under `shadow` the answer is the same; the caller does not act on it, and must not report it as done.
    """
    state = _with_feedback(state, sight, limits, now_s)
    state = msgspec.structs.replace(state, saw_move=sight.moving, last_alarm_s=next(reversed(sight.alarms_s), None))
    if sight.moving:
        verdict = _Verdict(Why.MOVING)
    elif mode is Mode.MANUAL:
        verdict = _towards_pin(sight, limits)
    else:
        verdict = _half_a_pair(state, sight) or _best(state, sight, fleet, limits, now_s)
    if verdict.now is not None:
        state = msgspec.structs.replace(
            state, prefill_foreseen=verdict.now.prefill_missed, decode_foreseen=verdict.now.decode_missed
        )
    state = _with_favour(state, verdict)
    ticks = _ticks_needed(state, verdict, sight, limits, now_s)
    if verdict.why in (Why.GAIN, Why.RESERVE) and state.favoured_ticks < ticks:
        verdict = msgspec.structs.replace(verdict, why=Why.UNCONFIRMED)
    way, now = verdict.way, verdict.now
    move = _move(way, sight) if way is not None and verdict.why in _MOVING_WHYS else None
    if move is not None and limits.drains and mode is not Mode.MANUAL and _stops_serving(sight.split, move.from_role):
        verdict, move = msgspec.structs.replace(verdict, why=Why.AT_FLOOR), None
    if move is not None:
        dissolving = way.dissolves if way is not None and verdict.why is Why.GAIN else state.dissolving
        state = _moved(state, move, now_s, dissolving=dissolving)
    return state, Decision(
        move=move,
        why=verdict.why,
        split=sight.split,
        target=way.target if way is not None else sight.split,
        gain=verdict.gain,
        now=now,
    )


def _stops_serving(split: Split, from_role: Role) -> bool:
    """Whether nobody could serve while a worker of a role drains and switches, although somebody does now."""
    left = {role: getattr(split, role) - (role is from_role) for role in Role}
    serves = bool(split.unified or (split.prefill and split.decode))
    return serves and not (left[Role.UNIFIED] or (left[Role.PREFILL] and left[Role.DECODE]))


def is_early(state: RatioState, *, moving: bool, alarms_s: Sequence[float]) -> bool:
    """Whether to decide before the period is over: a move has ended, or the demand has changed, since the last tick."""
    changed = bool(alarms_s) and alarms_s[-1] != state.last_alarm_s
    return changed or (state.saw_move and not moving)


def _ticks_needed(state: RatioState, verdict: "_Verdict", sight: Sight, limits: RatioLimits, now_s: float) -> int:
    """Return how many ticks in a row must favour a move.

    A change of demand just seen is confirmation enough. So is a clear measurement before the first move of all, if it
    is one to prefill: nobody has chosen the split knowing the traffic, and the work of prompts is known as they
    arrive; how long answers get is not. A move for room has time, but for the first one of that kind.
    The way to all-unified is confirmed by its first move: few pairs beside unified workers are worth less than none.
    """
    if state.dissolving and verdict.way is not None and verdict.way.dissolves:
        return 1
    to_prefill = verdict.way is not None and verdict.way.to_role is Role.PREFILL
    first = to_prefill and state.last_move_s is None and _error(sight.demand) <= limits.sure_error
    if verdict.for_reserve:
        return limits.confirm_ticks if first else limits.patient_ticks
    if verdict.gain < limits.clear_gain:
        return limits.patient_ticks
    changed = bool(sight.alarms_s) and now_s - sight.alarms_s[-1] <= 2 * limits.detect_s
    return 1 if changed or first else limits.confirm_ticks


def _error(demand: Demand | None) -> float:
    """Return the relative standard error of the work that was measured; infinite without any."""
    if demand is None or demand.rate_rps <= 0:
        return math.inf
    return math.sqrt(demand.dispersion / (demand.rate_rps * demand.span_s))


_PAIR = 2
_MOVING_WHYS = frozenset({Why.GAIN, Why.RESERVE, Why.POOL_EMPTY, Why.PINNED})


class _Verdict(msgspec.Struct, frozen=True):
    why: Why
    way: Way | None = None
    now: Prediction | None = None
    gain: float = 0.0
    for_reserve: bool = False


def _best(state: RatioState, sight: Sight, fleet: Fleet, limits: RatioLimits, now_s: float) -> _Verdict:
    """Weigh the best direction against staying, against its price, and against what was done before."""
    demand = sight.demand
    if demand is None:
        return _Verdict(Why.NO_DATA)
    if demand.rate_rps <= 0:
        return _Verdict(Why.IDLE)
    if demand.rate_rps * demand.span_s < limits.min_samples:
        return _Verdict(Why.NO_DATA)
    table = offers(state, sight, demand, fleet, limits, now_s)
    offer = table.best
    if table.reserve is not None:
        cooling = _cooldown_left_s(state, sight, limits, table.reserve, 0.0, now_s) > 0
        why = Why.COOLING_DOWN if cooling else Why.RESERVE
        return _Verdict(why, table.reserve, table.now, table.reserve_gain, for_reserve=True)
    if offer is None:
        return _Verdict(Why.AT_FLOOR if table.floored else Why.BALANCED, now=table.now)
    if offer.gain <= limits.min_gain:
        why = Why.GAIN_TOO_SMALL
    elif not offer.pays:
        why = Why.PRICE_TOO_HIGH
    elif _cooldown_left_s(state, sight, limits, offer.way, offer.gain, now_s) > 0:
        why = Why.COOLING_DOWN
    else:
        why = Why.GAIN
    return _Verdict(why, offer.way, table.now, offer.gain)


def _half_a_pair(state: RatioState, sight: Sight) -> _Verdict | None:
    """Return the move that ends half a pair, whatever the cooldown: gives it its other half, or dissolves it."""
    split = sight.split
    if bool(split.prefill) == bool(split.decode):
        return None
    empty, other = (Role.PREFILL, Role.DECODE) if split.prefill == 0 else (Role.DECODE, Role.PREFILL)
    if state.dissolving and split.unified:
        return _Verdict(Why.POOL_EMPTY, Way.step(split, other, Role.UNIFIED))
    from_role = other if getattr(split, other) >= _PAIR else Role.UNIFIED
    if getattr(split, from_role) < (_PAIR if from_role is other else 1):
        return None
    return _Verdict(Why.POOL_EMPTY, Way.step(split, from_role, empty))


def _towards_pin(sight: Sight, limits: RatioLimits) -> _Verdict:
    pin, split = limits.pinned, sight.split
    if pin is not None:
        for to_role in Role:
            for from_role in Role:
                if getattr(split, to_role) < getattr(pin, to_role) and getattr(split, from_role) > getattr(
                    pin, from_role
                ):
                    return _Verdict(Why.PINNED, Way.step(split, from_role, to_role))
    return _Verdict(Why.PINNED)


def _cooldown_left_s(
    state: RatioState, sight: Sight, limits: RatioLimits, way: Way | None, gain: float, now_s: float
) -> float:
    if state.last_move_s is None:
        return 0.0
    changed = bool(sight.alarms_s) and sight.alarms_s[-1] >= state.last_move_s  # then a reversal is no wavering
    wait_s = limits.cooldown_from_decode_s if state.last_from is Role.DECODE else limits.cooldown_s
    if way is not None and (way.from_role, way.to_role) == (state.last_from, state.last_to):
        if gain > limits.sure_gain:
            return 0.0
    elif way is not None and (way.from_role, way.to_role) == (state.last_to, state.last_from) and not changed:
        wait_s *= 2.0 ** min(state.reversals + 1, 4)
    return state.last_move_s + wait_s - now_s


# -- state -------------------------------------------------------------------------------------------------


def _with_feedback(state: RatioState, sight: Sight, limits: RatioLimits, now_s: float) -> RatioState:
    """Turn the gains by what was blamed beyond what was foreseen; without new evidence they leak back to 1.

    A gain stands still while what it asks for cannot happen or has not had time to work: during a move, in
    cooldown, while requests are refused, with too few samples, and upwards when nobody is left to give a worker.
    """
    dt_s = now_s - state.last_tick_s if state.last_tick_s is not None else 0.0
    split, least, blamed = sight.split, floors(sight.split.total), sight.blamed
    frozen = (
        sight.moving
        or blamed is None
        or blamed.feasible < limits.min_samples
        or blamed.refused_share > limits.max_refused_share
        or _cooldown_left_s(state, sight, limits, None, 0.0, now_s) > 0
    )
    leak = 0.5 ** (dt_s / limits.gain_half_life_s)
    gains = []
    for role, other, gain, foreseen in (
        (Role.PREFILL, Role.DECODE, state.prefill_gain, state.prefill_foreseen),
        (Role.DECODE, Role.PREFILL, state.decode_gain, state.decode_foreseen),
    ):
        push = 0.0
        if blamed is not None and not frozen:
            # What the model expects anyway is in the prediction already.
            push = (blamed.share(role) - max(limits.target_miss, foreseen)) * dt_s / limits.gain_time_s
            stuck = getattr(split, other) <= getattr(least, other) and split.unified <= least.unified
            push = min(push, 0.0) if stuck else push
        low, high = limits.gain_bounds
        gains.append(min(max(gain**leak * math.exp(push), low), high))
    return msgspec.structs.replace(state, prefill_gain=gains[0], decode_gain=gains[1], last_tick_s=now_s)


def _with_favour(state: RatioState, verdict: _Verdict) -> RatioState:
    """Count the ticks in a row that favour one direction enough to move; a move under way does not break the row."""
    if verdict.why is Why.MOVING:
        return state
    way = verdict.way if verdict.why in (Why.GAIN, Why.RESERVE, Why.COOLING_DOWN) else None
    favoured = (way.from_role, way.to_role) if way is not None else None
    same = favoured == state.favoured and verdict.for_reserve == state.favoured_for_reserve
    ticks = state.favoured_ticks + 1 if favoured is not None and same else int(way is not None)
    return msgspec.structs.replace(
        state, favoured=favoured, favoured_ticks=ticks, favoured_for_reserve=verdict.for_reserve
    )


def _move(way: Way, sight: Sight) -> Move | None:
    donor = cheapest_donor(way.from_role, sight.donors)
    if donor is None:
        return None
    return Move(worker_id=donor.worker_id, from_role=way.from_role, to_role=way.to_role)


def _moved(state: RatioState, move: Move, now_s: float, *, dissolving: bool) -> RatioState:
    undone = (move.from_role, move.to_role) == (state.last_to, state.last_from)
    return msgspec.structs.replace(
        state,
        last_move_s=now_s,
        last_from=move.from_role,
        last_to=move.to_role,
        saw_move=True,
        reversals=state.reversals + 1 if undone else 0,
        dissolving=dissolving,
    )
