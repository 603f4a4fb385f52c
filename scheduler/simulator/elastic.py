"""Workers that come and go in a simulation: the autoscaler of production, or another scaler, over a Simulation.

`ElasticPilot` is given to the simulation in place of the pilot that moves roles, which it asks in turn.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from contracts.lifecycle import WorkerState
from scheduler.policy.blame import Stage
from scheduler.policy.demand import DemandSample, DemandWindow, Forecast
from scheduler.policy.foresight import Outcomes
from scheduler.policy.handover import Handover, Past
from scheduler.policy.headcount import Bounds, Ground, Member, ScaleLimits, ScalePlan, ScaleSight, ScaleState, Start
from scheduler.policy.queueing import Corrections, Fleet
from scheduler.policy.ratio import Move
from scheduler.policy.scaling import scale
from scheduler.simulator.pilot import AutoPilot, FleetSight
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.worker import SimWorker

_GOING = frozenset({WorkerState.UNHEALTHY, WorkerState.STOPPED})


class Scaler(Protocol):
    """Decides how many workers there are."""

    period_s: float

    def arrived(self, now_s: float, sample: DemandSample) -> None:
        """Hear of an interactive request."""

    def ended(self, stage: Stage | None) -> None:
        """Hear of the end of one; None = refused."""

    def tick(self, now_s: float, seen: "Seen") -> ScalePlan:
        """Return whom to start and stop."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a scaler sees."""

    members: Sequence[Member]
    sight: FleetSight
    num_running: int
    forecast: Forecast
    pressure: Corrections
    """The ratio controller's feedback."""


class AutoScaler:
    """The policy of production."""

    def __init__(
        self, fleet: Fleet, bounds: Bounds, *, boot_s: float, ground: Ground, limits: ScaleLimits | None = None
    ) -> None:
        self.limits = limits or ScaleLimits()
        self.period_s = self.limits.period_s
        self.state = ScaleState(last_up_s=0.0)
        self._fleet = fleet
        self._bounds = bounds
        self._boot_s = boot_s
        self._ground = ground
        self._demand = DemandWindow()
        self._past = Past()
        self._busy_s = 0.0
        self._outcomes = Outcomes()

    def arrived(self, now_s: float, sample: DemandSample) -> None:
        """Count its work."""
        self._demand.observe(now_s, sample)
        self._past.trend.observe(now_s)
        self._busy_s = now_s

    def ended(self, stage: Stage | None) -> None:
        """Count it."""
        self._outcomes = self._outcomes.and_one(stage)

    def handover(self, now_s: float, forecast: Forecast) -> Handover:
        """Return what the next leader's should know."""
        return self._past.handover(self.state, self._demand.demand(now_s, forecast), now_s)

    def restore(self, handover: Handover, now_s: float, *, ago_s: float) -> None:
        """Begin a term with what the one before knew."""
        self.state = self._past.restore(handover, ScaleState(last_up_s=now_s), now_s, ago_s=ago_s)
        self._busy_s = now_s

    def tick(self, now_s: float, seen: Seen) -> ScalePlan:
        """Ask the policy."""
        if seen.num_running or seen.sight.num_waiting:
            self._busy_s = now_s
        limits = self.limits
        sight = ScaleSight(
            members=seen.members,
            ground=self._ground,
            demand=self._past.demand(self._demand.demand(now_s, seen.forecast), now_s),
            rate=self._past.trend.forecast(now_s, ahead_s=self._boot_s + limits.fresh_s),
            corrections=msgspec.structs.replace(seen.pressure, backlog_rps=seen.sight.waiting_in_time / limits.clear_s),
            num_waiting=seen.sight.num_waiting,
            num_running=seen.num_running,
            quiet_s=now_s - self._busy_s,
            boot_s=self._boot_s,
            flipping=seen.sight.moving,
            outcomes=self._outcomes,
        )
        self._outcomes = Outcomes()
        self.state, plan = scale(self.state, sight, self._bounds, self._fleet, limits, now_s)
        return plan


class ElasticPilot:
    """Moves roles by another pilot, and workers in and out by a scaler."""

    def __init__(self, inner: AutoPilot, scaler: Scaler, *, boot_s: float) -> None:
        self.period_s = inner.period_s
        self.log: list[tuple[float, ScalePlan]] = []
        """Ticks that changed something."""
        self._inner = inner
        self._scaler = scaler
        self._boot_s = boot_s
        self._simulation: Simulation | None = None
        self._forecast: Forecast | None = None
        self._sight: FleetSight | None = None

    def begin(self, simulation: Simulation) -> None:
        """Take the simulation that this is the pilot of; before it runs."""
        self._simulation = simulation
        simulation.clock.after(self._scaler.period_s * 1000, self._scale)

    def arrived(self, now_s: float, request: int, sample: DemandSample) -> None:
        """Tell both."""
        self._inner.arrived(now_s, request, sample)
        self._scaler.arrived(now_s, sample)

    def ended(self, now_s: float, request: int, stage: Stage | None, output_tokens: int | None) -> None:
        """Tell those who learn from it."""
        self._inner.ended(now_s, request, stage, output_tokens)
        self._scaler.ended(stage)

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:
        """Ask who moves roles."""
        self._forecast = forecast
        return self._inner.tick(now_s, sight, forecast) if sight.split.total else None

    # -- scaling -----------------------------------------------------------------------------------

    def _scale(self) -> None:
        simulation = self._simulation
        assert simulation is not None
        simulation.clock.after(self._scaler.period_s * 1000, self._scale)
        if self._forecast is None:
            return
        now_s = simulation.clock.now_ms / 1000
        there = [w for w in simulation.workers.values() if not w.leaving and w.state not in _GOING]
        state = self._inner.state
        seen = Seen(
            members=[_member(simulation, worker) for worker in there],
            sight=simulation.sight(),
            num_running=sum(len(worker.jobs) for worker in simulation.workers.values()),
            forecast=self._forecast,
            pressure=Corrections(prefill=state.prefill_gain, decode=state.decode_gain),
        )
        plan = self._scaler.tick(now_s, seen)
        if plan.steps:
            self.log.append((now_s, plan))
        for step in plan.steps:
            if isinstance(step, Start):
                simulation.add_worker(step.role, boot_s=self._boot_s)
            else:
                simulation.take_away(simulation.workers[step.worker_id])


def _member(simulation: Simulation, worker: SimWorker) -> Member:
    return Member(
        worker_id=worker.worker_id,
        role=worker.draining_to or worker.role,
        ready=worker.ready,
        drain_s=simulation.workforce.drain_s(worker) if worker.ready else 0.0,
    )
