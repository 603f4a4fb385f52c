"""How many workers prefill, decode and do both: at most one moves at a time. Pure.

Each tick: feedback first (gains on the predicted loads, driven by blamed misses), then every legal move is
valued by the predicted goodput of the splits it leads to, then the best one is weighed against its price.
`decide` answers with the next state and a decision that always has a reason.
"""

import enum
import itertools
import math
from collections.abc import Sequence

import msgspec

from contracts.lifecycle import HandOff, Role
from scheduler.policy.blame import Blamed
from scheduler.policy.demand import Demand
from scheduler.policy.queueing import Corrections, Fleet, Prediction, Split
from scheduler.policy.ways import Way, best_way, ways


class Mode(enum.StrEnum):
    """Who decides."""

    AUTO = "auto"
    SHADOW = "shadow"  # decide and tell, move nothing
    MANUAL = "manual"  # keep the pinned split


class Why(enum.StrEnum):
    """The reason of a tick's decision. A metric label and a log field."""

    GAIN = "gain"
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


class Donor(msgspec.Struct, frozen=True, kw_only=True):
    """A ready worker and what taking it away would cost."""

    worker_id: str
    role: Role
    drain_s: float
    """Until its running work is done."""
    cached_tokens: int = 0
    """Prefix cache that it would lose."""


class RatioLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the controller. `patient` suits the direct hand-off, `agile` the store."""

    period_s: float = 5.0
    switch_s: float = 5.0
    """A change between prefill and decode, without the drain: graph capture under the direct hand-off."""
    restart_s: float = 60.0
    """A change to or from unified: an engine restart under the direct hand-off."""
    drains: bool = True
    """Whether a worker must be empty to change."""
    cooldown_s: float = 30.0
    cooldown_from_decode_s: float = 60.0
    min_gain: float = 0.015
    """Relative gain in goodput below which nothing moves."""
    clear_gain: float = 0.05
    """Relative gain that needs only `confirm_ticks`; a smaller one needs `patient_ticks`."""
    last_unified_gain: float = 0.08
    """Relative gain for which the last unified worker may go: the pairs back each other up, if less simply."""
    sure_gain: float = 0.15
    """Relative gain from which a move in the same direction as the last need not wait."""
    price_margin: float = 0.3
    confirm_ticks: int = 2
    patient_ticks: int = 12
    """Ticks in a row that must favour a move, by how clear its gain is."""
    hold_s: float = 180.0
    """How long a demand is expected to last before any change was seen."""
    hold_bounds_s: tuple[float, float] = (15.0, 600.0)
    clear_s: float = 20.0
    """Time in which a backlog should be gone."""
    target_miss: float = 0.025
    """Blamed misses per side that are accepted: half of what a 95 % aim leaves."""
    gain_time_s: float = 60.0
    gain_bounds: tuple[float, float] = (0.7, 1.6)
    gain_half_life_s: float = 300.0
    min_samples: int = 30
    """Arrivals of the current demand before a move, and outcomes before a gain is turned."""
    max_refused_share: float = 0.01
    pinned: Split | None = None
    """The split of mode `manual`."""

    @classmethod
    def of(cls, hand_off: HandOff) -> "RatioLimits":
        """Return the limits that suit a hand-off: patient under `direct`, agile under `store`."""
        if hand_off is HandOff.DIRECT:
            return cls()
        return cls(
            period_s=1.0,
            switch_s=0.001,
            restart_s=0.001,
            drains=False,
            cooldown_s=3.0,
            cooldown_from_decode_s=3.0,
        )


class RatioState(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller remembers."""

    prefill_gain: float = 1.0
    decode_gain: float = 1.0
    last_tick_s: float | None = None
    last_move_s: float | None = None
    last_from: Role | None = None
    last_to: Role | None = None
    reversals: int = 0
    """Moves in a row that undid the one before; each doubles the cooldown."""
    favoured: tuple[Role, Role] | None = None
    favoured_ticks: int = 0


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller sees at a tick."""

    split: Split
    """Ready workers. A worker that drains or switches is in no role."""
    moving: bool
    """A drain or switch is under way."""
    donors: Sequence[Donor]
    demand: Demand | None
    """None = nothing measured, which is not the same as no traffic."""
    past: Sequence[Demand] = ()
    """Demands of earlier segments, the latest last."""
    alarms_s: Sequence[float] = ()
    """When the demand changed, on the tick's clock."""
    blamed: Blamed | None = None
    waiting_in_time: int = 0
    """Requests that wait in the scheduler and can still meet their targets."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A tick's answer."""

    move: Move | None
    why: Why
    split: Split
    target: Split
    """Where the best direction leads, several moves ahead."""
    gain: float
    """Relative gain in goodput at the target."""
    now: Prediction | None = None


def decide(
    state: RatioState, sight: Sight, fleet: Fleet, limits: RatioLimits, *, mode: Mode, now_s: float
) -> tuple[RatioState, Decision]:
    """Choose the next move, or say why there is none.

    Under `shadow` the answer is the same; the caller does not act on it, and must not report it as done.
    """
    state = _with_feedback(state, sight, limits, now_s)
    if sight.moving:
        verdict = _Verdict(Why.MOVING)
    elif mode is Mode.MANUAL:
        verdict = _towards_pin(sight, limits)
    else:
        verdict = _empty_pool(sight) or _best(state, sight, fleet, limits, now_s)
    state = _with_favour(state, verdict)
    ticks = limits.confirm_ticks if verdict.gain >= limits.clear_gain else limits.patient_ticks
    if verdict.why is Why.GAIN and state.favoured_ticks < ticks:
        verdict = msgspec.structs.replace(verdict, why=Why.UNCONFIRMED)
    way, now = verdict.way, verdict.now
    move = _move(way, sight) if way is not None and verdict.why in _MOVING_WHYS else None
    if move is not None:
        state = _moved(state, move, now_s)
    return state, Decision(
        move=move,
        why=verdict.why,
        split=sight.split,
        target=way.target if way is not None else sight.split,
        gain=verdict.gain,
        now=now,
    )


_MOVING_WHYS = frozenset({Why.GAIN, Why.POOL_EMPTY, Why.PINNED})


class _Verdict(msgspec.Struct, frozen=True):
    why: Why
    way: Way | None = None
    now: Prediction | None = None
    gain: float = 0.0


def _best(state: RatioState, sight: Sight, fleet: Fleet, limits: RatioLimits, now_s: float) -> _Verdict:
    """Weigh the best direction against staying."""
    if sight.demand is None:
        return _Verdict(Why.NO_DATA)
    if sight.demand.rate_rps <= 0:
        return _Verdict(Why.IDLE)
    if sight.demand.rate_rps * sight.demand.span_s < limits.min_samples:
        return _Verdict(Why.NO_DATA)
    hold_s = expected_hold_s(sight.alarms_s, limits, now_s)
    corrections = Corrections(
        prefill=state.prefill_gain,
        decode=state.decode_gain,
        backlog_rps=sight.waiting_in_time / limits.clear_s,
    )
    # Demands that come and go faster than a worker can follow are met by the split that is best for all of them.
    patient = hold_s < 3 * _slowest_s(sight, limits)
    demands = (*sight.past, sight.demand) if patient else (sight.demand,)
    least = floors(sight.split.total)
    now, found = ways(sight.split, demands, fleet, corrections, least)
    way = best_way(
        way for way in found if way.legal and (not way.last_unified or _gain(way, now) > limits.last_unified_gain)
    )
    gain = _gain(way, now)
    if way is None or gain <= 0:
        at_floor = any(_gain(other, now) > limits.min_gain for other in found if not other.legal)
        return _Verdict(Why.AT_FLOOR if at_floor else Why.BALANCED, now=now)
    return _Verdict(_weighed(way, now, gain, state, sight, fleet, limits, hold_s, now_s), way, now, gain)


def _gain(way: Way | None, now: Prediction) -> float:
    """Return the relative gain in goodput; 1.0 when there is none now."""
    if way is None:
        return 0.0
    if now.goodput_rps <= 0:
        return 1.0 if way.goodput_rps > 0 else 0.0
    return way.goodput_rps / now.goodput_rps - 1


def _weighed(
    way: Way,
    now: Prediction,
    gain: float,
    state: RatioState,
    sight: Sight,
    fleet: Fleet,
    limits: RatioLimits,
    hold_s: float,
    now_s: float,
) -> Why:
    """Weigh a direction against its price, and against what was done before."""
    if gain <= limits.min_gain:
        return Why.GAIN_TOO_SMALL
    donor = _donor(way, sight)
    if donor is None:
        return Why.AT_FLOOR
    flip_s = _flip_s(donor, way, limits)
    lost = now.goodput_rps / sight.split.total * (flip_s + _warm_s(donor, fleet)) * (1 + limits.price_margin)
    won = (way.goodput_rps - now.goodput_rps) / way.steps * max(0.0, hold_s - flip_s)
    if won <= lost:
        return Why.PRICE_TOO_HIGH
    return Why.COOLING_DOWN if _cooldown_left_s(state, limits, way, gain, now_s) > 0 else Why.GAIN


def _empty_pool(sight: Sight) -> _Verdict | None:
    """Return the move that gives a pair back to a pool that lost one side, whatever the cooldown."""
    split = sight.split
    if bool(split.prefill) == bool(split.decode):
        return None
    empty, other = (Role.PREFILL, Role.DECODE) if split.prefill == 0 else (Role.DECODE, Role.PREFILL)
    from_role = other if getattr(split, other) >= 2 else Role.UNIFIED
    if getattr(split, from_role) < (2 if from_role is other else 1):
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


# -- bounds and prices ---------------------------------------------------------------------------------------


def floors(total: int) -> Split:
    """Return the fewest workers per role that a split of so many may have."""
    pair = 2 if total >= 6 else 1
    return Split(prefill=pair, decode=pair, unified=1 if total >= 8 else 0)


def expected_hold_s(alarms_s: Sequence[float], limits: RatioLimits, now_s: float) -> float:
    """Return how long the demand is expected to stay as it is: the mean of the last intervals between changes."""
    low, high = limits.hold_bounds_s
    if not alarms_s:
        return min(max(limits.hold_s, now_s), high)
    recent = list(alarms_s)[-4:]
    intervals = [later - earlier for earlier, later in itertools.pairwise(recent)]
    since = now_s - recent[-1]
    if not intervals:
        return min(max(limits.hold_s, since), high)
    return min(max(sum(intervals) / len(intervals), since, low), high)


def _donor(way: Way, sight: Sight) -> Donor | None:
    """Return the worker that is cheapest to take away."""
    candidates = [donor for donor in sight.donors if donor.role is way.from_role]
    return min(candidates, key=lambda d: (d.drain_s, d.cached_tokens, d.worker_id), default=None)


def _flip_s(donor: Donor, way: Way, limits: RatioLimits) -> float:
    switch_s = limits.restart_s if Role.UNIFIED in (way.from_role, way.to_role) else limits.switch_s
    return switch_s + (donor.drain_s if limits.drains else 0.0)


def _slowest_s(sight: Sight, limits: RatioLimits) -> float:
    """Return how long a change between prefill and decode takes, by the slower of the two donors."""
    if not limits.drains:
        return limits.switch_s
    least = [
        min((d.drain_s for d in sight.donors if d.role is role), default=0.0) for role in (Role.PREFILL, Role.DECODE)
    ]
    return limits.switch_s + max(least)


def _warm_s(donor: Donor, fleet: Fleet) -> float:
    """Return the compute time of the prefixes that a worker forgets with its role."""
    return donor.cached_tokens * fleet.latency.prefill.per_token_ms / 1000


def _cooldown_left_s(state: RatioState, limits: RatioLimits, way: Way | None, gain: float, now_s: float) -> float:
    if state.last_move_s is None:
        return 0.0
    wait_s = limits.cooldown_from_decode_s if state.last_from is Role.DECODE else limits.cooldown_s
    if way is not None and (way.from_role, way.to_role) == (state.last_from, state.last_to):
        if gain > limits.sure_gain:
            return 0.0
    elif way is not None and (way.from_role, way.to_role) == (state.last_to, state.last_from):
        wait_s *= 2.0 ** min(state.reversals + 1, 4)
    return state.last_move_s + wait_s - now_s


# -- state -------------------------------------------------------------------------------------------------


def _with_feedback(state: RatioState, sight: Sight, limits: RatioLimits, now_s: float) -> RatioState:
    """Turn the gains by what was blamed; without new evidence they leak back to 1.

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
        or _cooldown_left_s(state, limits, None, 0.0, now_s) > 0
    )
    leak = 0.5 ** (dt_s / limits.gain_half_life_s)
    gains = []
    for role, other, gain in (
        (Role.PREFILL, Role.DECODE, state.prefill_gain),
        (Role.DECODE, Role.PREFILL, state.decode_gain),
    ):
        push = 0.0
        if blamed is not None and not frozen:
            push = (blamed.share(role) - limits.target_miss) * dt_s / limits.gain_time_s
            stuck = getattr(split, other) <= getattr(least, other) and split.unified <= least.unified
            push = min(push, 0.0) if stuck else push
        low, high = limits.gain_bounds
        gains.append(min(max(gain**leak * math.exp(push), low), high))
    return msgspec.structs.replace(state, prefill_gain=gains[0], decode_gain=gains[1], last_tick_s=now_s)


def _with_favour(state: RatioState, verdict: _Verdict) -> RatioState:
    """Count the ticks in a row that favour one direction enough to move; a move under way does not break the row."""
    if verdict.why is Why.MOVING:
        return state
    way = verdict.way if verdict.why in (Why.GAIN, Why.COOLING_DOWN) else None
    favoured = (way.from_role, way.to_role) if way is not None else None
    ticks = state.favoured_ticks + 1 if favoured is not None and favoured == state.favoured else int(way is not None)
    return msgspec.structs.replace(state, favoured=favoured, favoured_ticks=ticks)


def _move(way: Way, sight: Sight) -> Move | None:
    donor = _donor(way, sight)
    if donor is None:
        return None
    return Move(worker_id=donor.worker_id, from_role=way.from_role, to_role=way.to_role)


def _moved(state: RatioState, move: Move, now_s: float) -> RatioState:
    undone = (move.from_role, move.to_role) == (state.last_to, state.last_from)
    return msgspec.structs.replace(
        state,
        last_move_s=now_s,
        last_from=move.from_role,
        last_to=move.to_role,
        reversals=state.reversals + 1 if undone else 0,
    )
