"""What each direction of moving workers would win and cost. Pure."""

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from contracts.lifecycle import Role
from scheduler.policy.demand import Demand
from scheduler.policy.queueing import Corrections, Fleet, Prediction, Split
from scheduler.policy.reserve import reserve
from scheduler.policy.sight import Donor, RatioLimits, RatioState, Sight
from scheduler.policy.ways import Way, Weighted, ways


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A direction, its donor, and its balance over the time that the demand is expected to last."""

    way: Way
    donor: Donor
    gain: float
    """Relative gain in goodput at the target."""
    won: float
    """Requests in time that the whole way adds until the demand changes."""
    lost: float
    """Requests that its moves cost: a worker's goodput while it drains, switches and warms up."""

    @property
    def pays(self) -> bool:
        """Whether what is won exceeds what it costs."""
        return self.won > self.lost


class Offers(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the table at a tick."""

    now: Prediction
    best: Offer | None
    """With the highest balance; None when no move gains anything."""
    floored: bool
    """A move that a floor forbids would gain."""
    reserve: Way | None = None
    """Where no move gains enough: the one that makes room for more load than there is."""
    reserve_gain: float = 0.0
    """Its relative gain in goodput under that load."""


def offers(state: RatioState, sight: Sight, demand: Demand, fleet: Fleet, limits: RatioLimits, now_s: float) -> Offers:
    """Value every direction, and name the best."""
    hold_s = expected_hold_s(sight.alarms_s, limits, now_s)
    behind = _is_behind(sight, demand, fleet, hold_s, limits)
    corrections = Corrections(
        prefill=state.prefill_gain,
        decode=state.decode_gain,
        backlog_rps=sight.waiting_in_time / limits.clear_s,
    )
    demands = _weighted(sight, demand, behind=behind)
    # A split that suits all demands seen lately stays right when they change.
    lasts_s = limits.mix_s if behind else hold_s
    now, found = ways(sight.split, demands, fleet, corrections, floors(sight.split.total))
    made = list(_made(found, now, sight, fleet, limits, lasts_s))
    best = max(made, key=lambda offer: (offer.won - offer.lost, offer.gain), default=None)
    room, room_gain = None, 0.0
    if not behind and (best is None or best.gain <= limits.min_gain):
        room, room_gain = reserve(sight, demand, fleet, corrections, found, now, limits)
    return Offers(
        now=now,
        best=best,
        reserve=room,
        reserve_gain=room_gain,
        floored=any(way.gain_over(now) > limits.min_gain for way in found if not way.legal),
    )


def _made(
    found: Sequence[Way], now: Prediction, sight: Sight, fleet: Fleet, limits: RatioLimits, hold_s: float
) -> Iterator[Offer]:
    for way in found:
        gain = way.gain_over(now)
        donor = cheapest_donor(way.from_role, sight.donors)
        if not way.legal or gain <= 0 or donor is None or (way.last_unified and gain <= limits.last_unified_gain):
            continue
        flip_s = _flip_s(donor, way, limits)
        per_worker_rps = now.goodput_rps / sight.split.total
        # What is won comes step by step: half of it, on average, while the workers still move.
        useful_s = max(0.0, hold_s - flip_s * (way.steps + 1) / 2)
        yield Offer(
            way=way,
            donor=donor,
            gain=gain,
            won=(way.goodput_rps - now.goodput_rps) * useful_s,
            lost=per_worker_rps * (flip_s + _warm_s(donor, fleet)) * (1 + limits.price_margin) * way.steps,
        )


def cheapest_donor(role: Role, donors: Sequence[Donor]) -> Donor | None:
    """Return the worker of a role that is cheapest to take away."""
    candidates = [donor for donor in donors if donor.role is role]
    return min(candidates, key=lambda d: (d.drain_s, d.cached_tokens, d.worker_id), default=None)


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


def _is_behind(sight: Sight, demand: Demand, fleet: Fleet, hold_s: float, limits: RatioLimits) -> bool:
    """Return whether workers that follow the demand are behind it for more than half of the time.

    When the demand changes, workers need a while to come after it: up to half of them move, one after the other. A
    demand that changes faster is not followed at all: half a way towards each pays for both and suits neither.
    """
    if not sight.past:
        return False
    moves = min(limits.moves_to_follow, sight.split.total / 2)
    follow_s = limits.detect_s + moves * _move_s((*sight.past, demand), fleet, limits)
    return 2 * follow_s > hold_s


def _weighted(sight: Sight, demand: Demand, *, behind: bool) -> Sequence[Weighted]:
    """Return the demands to serve: the present one, or all that were seen lately if workers are always behind.

    Then the split that suits all the demands is the best one.
    """
    if not behind:
        return [Weighted(demand, 1.0)]
    seen = (*sight.past, demand)
    spans_s = sum(one.span_s for one in seen)
    return [Weighted(one, one.span_s / spans_s) for one in seen]


def _flip_s(donor: Donor, way: Way, limits: RatioLimits) -> float:
    """Return the mean time of the way's moves: the first donor's drain stands for all."""
    switch_s = (way.restarts * limits.restart_s + (way.steps - way.restarts) * limits.switch_s) / way.steps
    return switch_s + (donor.drain_s if limits.drains else 0.0)


def _move_s(demands: Sequence[Demand], fleet: Fleet, limits: RatioLimits) -> float:
    """Return how long a change between prefill and decode takes: the switch, and half of a usual answer.

    Of all demands seen lately, since an answer that began under one ends under the next. Where a worker need not be
    empty to change, what still runs on it slows down what it is to do for as long.
    """
    span_s = sum(demand.span_s for demand in demands)
    answer_s = sum(d.span_s * d.output_tokens for d in demands) / max(span_s, 1e-9) * fleet.planned_step_ms / 1000
    return limits.switch_s + answer_s / 2


def _warm_s(donor: Donor, fleet: Fleet) -> float:
    """Return the compute time of the prefixes that a worker forgets with its role."""
    return donor.cached_tokens * fleet.latency.prefill.per_token_ms / 1000
