"""What an autoscaler tells the next leader's, so that a change of leaders is no change of load. Pure.

A new term has counted nothing. The first seconds' arrivals are a bad guess of the rate, those that waited for the new
leader come all at once, and a few requests are a bad guess of what all ask for: by them a pool under steady load seems
to need another worker. So what was counted goes on, and what requests asked for before holds until the new term has
seen as many.

What was learned of foreseen misses holds for a day (policy.foresight); the rest as long as load may still be the same.
"""

import msgspec

from scheduler.policy.arrivals import ArrivalTrend, Counted
from scheduler.policy.demand import Demand
from scheduler.policy.foresight import Foresight
from scheduler.policy.headcount import ScaleState
from scheduler.policy.plateau import Plateau

HOLDS_S = 600.0


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """What one term knew at one time, without its clock."""

    foresight: Foresight
    arrivals: Counted
    demand: Demand | None
    """What requests asked for; None = not known."""
    plateau: Plateau | None
    """Since so many seconds before."""


class Past:
    """What a term knows of the one before it, and what it counts itself."""

    def __init__(self) -> None:
        self.trend = ArrivalTrend()
        self._demand: Demand | None = None
        self._until_s = 0.0

    def handover(self, state: ScaleState, seen: Demand | None, now_s: float) -> Handover:
        """Return what the next leader should know. `seen`: as for `demand`."""
        demand, plateau = self.demand(seen, now_s) or self._demand, state.plateau
        return Handover(
            foresight=msgspec.structs.replace(state.foresight, at_s=None, last=None),
            arrivals=self.trend.counted(now_s),
            demand=msgspec.structs.replace(demand, course=()) if demand is not None else None,
            plateau=msgspec.structs.replace(plateau, since_s=-plateau.age_s(now_s)) if plateau is not None else None,
        )

    def restore(self, handover: Handover, state: ScaleState, now_s: float, *, ago_s: float) -> ScaleState:
        """Go on with what another term knew so many seconds ago; return the state with it. Before anything else."""
        state = msgspec.structs.replace(state, foresight=handover.foresight)
        if ago_s > HOLDS_S:
            return state
        self.trend.restore(handover.arrivals, now_s, ago_s=ago_s)
        self._demand, plateau = handover.demand, handover.plateau
        self._until_s = now_s + (self._demand.span_s if self._demand is not None else 0.0)
        if plateau is not None:
            plateau = msgspec.structs.replace(plateau, since_s=now_s - ago_s + plateau.since_s)
        return msgspec.structs.replace(state, plateau=plateau)

    def demand(self, seen: Demand | None, now_s: float) -> Demand | None:
        """Return what requests ask for: as seen, once it was seen for as long or of as many as before."""
        before = self._demand
        if seen is None or before is None:
            return seen
        if now_s < self._until_s and _number(seen) < _number(before):
            return before
        self._demand = None
        return seen


def _number(demand: Demand) -> float:
    return demand.rate_rps * demand.span_s
