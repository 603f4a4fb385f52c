"""Who moves workers between roles in a simulation: nobody or the ratio controller (rivals: `rivals.py`)."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from scheduler.policy.blame import BlameWindow, Stage
from scheduler.policy.cluster import WorkerView
from scheduler.policy.demand import Demand, DemandSample, DemandWindow, Forecast
from scheduler.policy.queueing import Fleet, Split
from scheduler.policy.ratio import Decision, Mode, Move, decide, is_early
from scheduler.policy.sight import Donor, RatioLimits, RatioState, Sight

_LOOK_S = 1.0


class FleetSight(msgspec.Struct, frozen=True, kw_only=True):
    """What a pilot sees of the fleet at a tick."""

    split: Split
    moving: bool
    donors: Sequence[Donor]
    waiting_in_time: int
    """Requests in the scheduler that can still meet their targets."""
    num_waiting: int
    """All requests in the scheduler, plus those queued on prefill workers."""
    waiting_work_ms: float
    """Computing time of the prompts that wait in the scheduler."""
    ready: Sequence[WorkerView]
    """Ready workers."""


class Pilot(Protocol):
    """Decides about roles. Called by the simulation, and told what happens."""

    period_s: float

    def arrived(self, now_s: float, request: int, sample: DemandSample) -> None:
        """Hear of an interactive request."""

    def ended(self, now_s: float, request: int, stage: Stage | None, output_tokens: int | None) -> None:
        """Hear of the end of one: who is to blame (None = refused), and how long its answer was (None = not whole)."""

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:
        """Return the move to make, if any."""


class StaticPilot:
    """Leaves the split as it is."""

    period_s = 5.0

    def arrived(self, now_s: float, request: int, sample: DemandSample) -> None:
        """Ignore it."""

    def ended(self, now_s: float, request: int, stage: Stage | None, output_tokens: int | None) -> None:
        """Ignore it."""

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:  # noqa: ARG002
        """Return nothing."""
        return None


class AutoPilot:
    """The ratio controller."""

    def __init__(self, fleet: Fleet, limits: RatioLimits, *, mode: Mode = Mode.AUTO) -> None:
        self.period_s = min(_LOOK_S, limits.period_s)
        self.log: list[tuple[float, Decision]] = []
        self.state = RatioState()
        self._fleet = fleet
        self._limits = limits
        self._mode = mode
        self._demand = DemandWindow()
        self._blamed = BlameWindow()
        self._next_tick_s = limits.period_s

    def demand(self, now_s: float, forecast: Forecast) -> Demand | None:
        """Return what the requests seen ask for."""
        return self._demand.demand(now_s, forecast)

    def arrived(self, now_s: float, request: int, sample: DemandSample) -> None:
        """Count its work."""
        self._demand.observe(now_s, sample, request)

    def ended(self, now_s: float, request: int, stage: Stage | None, output_tokens: int | None) -> None:
        """Count who is to blame, and the answer for the demand that the request was a part of."""
        self._demand.ended(request, output_tokens)
        if stage is None:
            self._blamed.refuse(now_s)
        else:
            self._blamed.add(now_s, stage)

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:
        """Ask the controller, once a period and when something has happened."""
        demand = self._demand.demand(now_s, forecast)
        early = is_early(self.state, moving=sight.moving, alarms_s=self._demand.alarms_s)
        if now_s < self._next_tick_s - 1e-6 and not early:
            return None
        self._next_tick_s = now_s + self._limits.period_s
        seen = Sight(
            split=sight.split,
            moving=sight.moving,
            donors=sight.donors,
            demand=demand,
            past=self._demand.segments,
            alarms_s=tuple(self._demand.alarms_s),
            blamed=self._blamed.blamed(now_s),
            waiting_in_time=sight.waiting_in_time,
        )
        self.state, decision = decide(self.state, seen, self._fleet, self._limits, mode=self._mode, now_s=now_s)
        self.log.append((now_s, decision))
        return decision.move if self._mode is not Mode.SHADOW else None
