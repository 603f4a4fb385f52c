"""Which mix of roles serves a demand with the fewest workers. Pure.

Workers of a pool cost the same whatever their role, so the cheapest mix is the smallest one that meets the targets;
among mixes of one size the one that meets them best.
"""

import functools
from collections.abc import Callable, Sequence

import msgspec

from scheduler.policy.demand import Demand
from scheduler.policy.foresight import Belief
from scheduler.policy.offers import floors
from scheduler.policy.queueing import Corrections, Fleet, Predictor, Split


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """A mix and what it would do."""

    split: Split
    in_time: float
    """Share (0 to 1) of the requests that can be in time and would be."""


class Mixes:
    """Values mixes under one demand."""

    def __init__(
        self, demand: Demand, fleet: Fleet, corrections: Corrections, floor: Split, belief: Belief | None = None
    ) -> None:
        """`belief`: what is made of foreseen misses; None = they will happen."""
        self._belief = belief or Belief()
        self._predictor = Predictor(demand, fleet, corrections)
        self._all_rps = demand.rate_rps * demand.feasible_share
        self._floor = floor
        self._best: dict[int, Mix] = {}

    def in_time(self, split: Split) -> float:
        """Return the share of requests that a mix serves in time; 1.0 where there are none."""
        if self._all_rps <= 0:
            return 1.0
        return self._belief.in_time(1 - self._predictor.predict(split).goodput_rps / self._all_rps)

    def best(self, total: int) -> Mix:
        """Return the best mix of so many workers, within the floors."""
        found = self._best.get(total)
        if found is None:
            candidates = [Mix(split=split, in_time=self.in_time(split)) for split in splits(total, self._floor)]
            # Equal ones: with pairs rather than without, and of those the even ones.
            found = self._best[total] = max(
                candidates,
                key=lambda m: (round(m.in_time, 4), min(m.split.prefill, m.split.decode), m.split.unified),
            )
        return found

    def cheapest(self, goal: float, *, at_most: int, at_least: int = 1) -> Mix:
        """Return the smallest mix that reaches the goal, or the largest one allowed."""
        for total in range(at_least, at_most):
            if self.best(total).in_time >= goal:
                return self.best(total)
        return self.best(max(at_least, at_most))

    def fewest(self, goal: float, *, of: int, at_least: int = 1) -> Mix:
        """Return the smallest mix that reaches the goal of those whose larger ones do, from so many workers down.

        The same as `cheapest`, found from the other end: most pools need about as many workers as they have.
        """
        most = max(of, at_least)
        best = self.best(most)
        for total in range(most - 1, at_least - 1, -1):
            smaller = self.best(total)
            if smaller.in_time < goal:
                break
            best = smaller
        return best


Valued = Callable[[Demand, Fleet, Corrections, Split, Belief | None], Mixes]


@functools.cache
def splits(total: int, floor: Split) -> Sequence[Split]:
    """Return the mixes of a size that are worth a look: whole pairs or none, few or only unified workers."""
    least = floors(total)
    found = []
    for unified in range(total + 1):
        if unified not in (0, 1, 2, 3, total - 2, total):
            continue
        for prefill in range(total - unified + 1):
            decode = total - unified - prefill
            if bool(prefill) != bool(decode):
                continue
            if prefill and (prefill < least.prefill or decode < least.decode):
                continue
            if prefill < floor.prefill or decode < floor.decode or unified < floor.unified:
                continue
            found.append(Split(prefill=prefill, decode=decode, unified=unified))
    return found or [floor]
