"""How many of the misses that the closed forms foresee do happen, and how many targets were met lately. Pure.

`policy.queueing` is careful: requests are reordered, given up and placed better than its formulas know, and what
arrives is not as bad as its tails. How careful depends on the traffic, the mix and the engine, so it is learned here,
pool by pool, from misses that were blamed on too few workers:

    missed = floor + factor * foreseen

the line through the ticks of the last hours, each request counting once, the past fading. The floor is what is missed
even where nothing is foreseen; without it a quiet night would say that everything is worse than foreseen. Until there
is something to see, a belief in the closed forms holds, which some hundred requests outweigh.
"""

import msgspec

from scheduler.policy.blame import SIDE, Stage

_FLOOR = 0.003
_FLOOR_WEIGHT = 2000.0
_FACTOR_WEIGHT = 400 * 0.05**2
"""The belief, in requests: that many at the floor; that many of which a twentieth was foreseen, and missed."""
_ATTAINED = 0.96
_ATTAINED_WEIGHT = 400.0


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests that ended since the last tick, refused ones included."""

    ended: int = 0
    missed: int = 0
    """Those that missed a target, whatever the reason."""
    short: int = 0
    """Those of them that missed it for lack of workers: refused, or blamed on one of the roles."""
    structural: int = 0
    """Those of them that an idle machine would have missed, too."""

    def and_one(self, stage: Stage | None) -> "Outcomes":
        """Return them with one more, by the stage that it is blamed on; None = refused."""
        return Outcomes(
            ended=self.ended + 1,
            missed=self.missed + (stage is not Stage.NONE),
            short=self.short + (stage is None or stage in SIDE),
            structural=self.structural + (stage is Stage.STRUCTURAL),
        )


class ForesightLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of what is learned."""

    half_life_s: float = 3600.0
    floor_bounds: tuple[float, float] = (0.0, 0.02)
    factor_bounds: tuple[float, float] = (0.4, 1.5)


class Belief(msgspec.Struct, frozen=True, kw_only=True):
    """What is made of foreseen misses."""

    floor: float = 0.0
    factor: float = 1.0

    def in_time(self, foreseen: float) -> float:
        """Return the share (0 to 1) of requests in time where a share of misses is foreseen."""
        return min(1.0, max(0.0, 1 - self.floor - self.factor * foreseen))


class Foresight(msgspec.Struct, frozen=True, kw_only=True):
    """What has been seen: sums over requests, the past fading, of what was foreseen for each and whether it missed."""

    ended: float = 0.0
    """Without structural misses, as everything here."""
    missed: float = 0.0
    possible: float = 0.0
    """Those of the ended for which something was foreseen: the sums below are over these."""
    short: float = 0.0
    foreseen: float = 0.0
    square: float = 0.0
    """Of what was foreseen."""
    product: float = 0.0
    """Of what was foreseen and missed."""
    last: float | None = None
    """Share (0 to 1) of misses that was foreseen at the last tick; None = not known."""
    at_s: float | None = None
    """Of the last tick."""

    def after(self, outcomes: Outcomes, now_s: float, limits: ForesightLimits) -> "Foresight":
        """Return it with the outcomes of the time since the last tick. Silence is no reason to forget."""
        if outcomes.ended == 0 or self.at_s is None:
            return msgspec.structs.replace(self, at_s=now_s)
        left = 0.5 ** (max(0.0, now_s - self.at_s) / limits.half_life_s)
        possible = outcomes.ended - outcomes.structural if self.last is not None else 0
        short = outcomes.short if self.last is not None else 0
        last = self.last or 0.0
        return Foresight(
            ended=left * self.ended + outcomes.ended - outcomes.structural,
            missed=left * self.missed + outcomes.missed - outcomes.structural,
            possible=left * self.possible + possible,
            short=left * self.short + short,
            foreseen=left * self.foreseen + last * possible,
            square=left * self.square + last**2 * possible,
            product=left * self.product + last * short,
            last=self.last,
            at_s=now_s,
        )

    def belief(self, limits: ForesightLimits) -> Belief:
        """Return the line through what was seen, the belief of the beginning counting as so many more requests."""
        count, square = self.possible + _FLOOR_WEIGHT, self.square + _FACTOR_WEIGHT
        short, product = self.short + _FLOOR_WEIGHT * _FLOOR, self.product + _FACTOR_WEIGHT
        floor = (short * square - product * self.foreseen) / (count * square - self.foreseen**2)
        floor = min(max(floor, limits.floor_bounds[0]), limits.floor_bounds[1])
        factor = (product - floor * self.foreseen) / square
        low, high = limits.factor_bounds
        return Belief(floor=floor, factor=min(max(factor, low), high))

    @property
    def attained(self) -> float:
        """Share (0 to 1) of the requests of lately that met their targets; structural misses are left out."""
        return 1 - (self.missed + _ATTAINED_WEIGHT * (1 - _ATTAINED)) / (self.ended + _ATTAINED_WEIGHT)
