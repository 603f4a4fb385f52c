"""One call from arrivals and a policy's name to figures."""

import enum
from collections.abc import Callable, Iterable

from contracts.lifecycle import HandOff
from scheduler.policy.queueing import Fleet, Split
from scheduler.policy.sight import RatioLimits
from scheduler.simulator.arrivals import Arrival
from scheduler.simulator.pilot import AutoPilot, Pilot, StaticPilot
from scheduler.simulator.report import Result, summarise
from scheduler.simulator.rivals import PlannerPilot, ThresholdPilot
from scheduler.simulator.setup import Setup
from scheduler.simulator.simulation import Simulation


class Policy(enum.StrEnum):
    """Who decides about roles."""

    AUTO = "auto"
    STATIC = "static"
    UNIFIED = "unified"
    THRESHOLD = "threshold"
    PLANNER = "planner"


def first_split(policy: Policy, workers: int, hand_off: HandOff) -> Split:
    """Return where a policy begins when nothing is known of the traffic.

    The controller begins with one unified worker only where it can become something else at once (`store`). Under
    `direct` that is a restart of the engine, in the very minute in which the first split is put right.
    """
    if policy is Policy.UNIFIED:
        return Split(unified=workers)
    unified = 1 if policy is Policy.AUTO and hand_off is HandOff.STORE and workers >= 8 else 0
    prefill = (workers - unified + 1) // 2
    return Split(prefill=prefill, decode=workers - unified - prefill, unified=unified)


def pilot_of(policy: Policy, setup: Setup, limits: RatioLimits | None = None) -> Pilot:
    """Return a policy's pilot."""
    match policy:
        case Policy.AUTO:
            fleet = Fleet(latency=setup.policy_latency, target=setup.target)
            return AutoPilot(fleet, limits or RatioLimits.of(setup.hand_off))
        case Policy.THRESHOLD:
            return ThresholdPilot()
        case Policy.PLANNER:
            return PlannerPilot(setup.policy_latency, setup.target)
        case Policy.STATIC | Policy.UNIFIED:
            return StaticPilot()


def play(
    arrivals: Iterable[Arrival],
    setup: Setup,
    policy: Policy,
    *,
    limits: RatioLimits | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> tuple[Result, Simulation]:
    """Run a policy over arrivals; return the figures and the run itself."""
    pilot = pilot_of(policy, setup, limits)
    simulation = Simulation(setup, pilot)
    simulation.run(arrivals, progress=progress)
    return result_of(simulation), simulation


def result_of(simulation: Simulation) -> Result:
    """Return the figures of a run that is over."""
    return summarise(
        list(simulation.jobs.values()),
        simulation.setup.target,
        duration_s=simulation.last_arrival_ms / 1000,
        flips=len(simulation.moves),
        cancelled_flips=simulation.cancelled_moves,
        retracted=simulation.workforce.num_retracted
        + sum(worker.engine.num_retracted for worker in simulation.workers.values()),
    )
