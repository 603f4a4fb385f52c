"""The oracle of benches.autoscale: the cheapest schedule that a search finds with the future known.

It is no lower bound by proof. It is the best of what was tried, and what was tried is this:

1. For each kind of traffic and each number of workers, mixes of roles are simulated at steady load: the dozen that the
   closed forms think best, then all that differ from the best so far in one worker's role, until none is better.
   That is the table of what 1, 2, ... workers can do at most.
2. A day is cut into slots of five minutes. In each, the oracle has as many workers as it likes, in their best mix,
   from its first second: nothing starts, drains or changes its role, and no reserve is kept.
3. It owes 95 % over the whole day and chooses where to miss: the numbers of workers are those with the fewest
   worker-hours in all (by a multiplier on misses), rather than 95 % in each slot.

`play_schedule` plays such a schedule against a day's real arrivals, to see that it does what its table says.
"""

import functools
import itertools
from collections.abc import Sequence

import msgspec

from benches.autoscale_days import Kind, Model, day
from contracts.lifecycle import Role
from scheduler.policy.blame import Stage
from scheduler.policy.demand import Demand, DemandSample, Forecast
from scheduler.policy.mixes import Mixes
from scheduler.policy.queueing import Corrections, Split
from scheduler.policy.ratio import Move
from scheduler.policy.sight import RatioLimits
from scheduler.simulator.arrivals import poisson
from scheduler.simulator.pilot import AutoPilot, FleetSight, StaticPilot
from scheduler.simulator.play import result_of
from scheduler.simulator.simulation import Simulation

GOAL = 0.95
MOST = 24
SLOT_S = 300.0
TRIAL_REQUESTS = 1200
"""Of each steady trial; the best mix is measured with twice as many."""
LIKELY = 12
FEWEST = 2
"""No model's lowest rate is served by fewer."""
BETTER = 1.02
"""What a mix must serve beyond the best so far to be looked at further."""
_CURVE = (0.6, 0.85, 0.95, 1.0, 1.05, 1.12, 1.25, 1.5)
"""Rates, over the one that is served to GOAL, at which the best mix is measured."""


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """What some number of workers can do at most."""

    split: Split
    capacity_rps: float
    """Served to GOAL."""
    curve: tuple[tuple[float, float], ...]
    """Rate, and the share in time (0 to 1), by rising rate."""

    def in_time(self, rate_rps: float) -> float:
        """Return the share in time at a rate, by interpolation; beyond the curve it falls like 1 / rate."""
        previous = (0.0, 1.0)
        for rate, share in self.curve:
            if rate_rps <= rate:
                part = (rate_rps - previous[0]) / (rate - previous[0])
                return previous[1] + part * (share - previous[1])
            previous = rate, share
        return previous[1] * previous[0] / rate_rps


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """An oracle's day."""

    workers: tuple[int, ...]
    """In each slot."""
    in_time: float
    """Share (0 to 1) of the day's requests, by the tables."""
    hours: float


# -- what so many workers can do -------------------------------------------------------------------------------


def one_more(kind: Kind, found: Sequence[Best]) -> Best:
    """Return the best of one worker more than those whose bests are found."""
    if len(found) + 1 < FEWEST:
        return Best(split=Split(unified=len(found) + 1), capacity_rps=0.0, curve=((1e-3, 0.0),))
    return _best_of(kind, demand_of(kind), len(found) + 1, found[-1] if found else None)


def is_whole(found: Sequence[Best], top_rps: float) -> bool:
    """Whether a table goes up to where the highest rate is served well enough: a day's misses may be there."""
    return bool(found) and (found[-1].in_time(top_rps) >= GOAL - 0.02 or len(found) >= MOST)


@functools.cache
def all_splits(workers: int) -> Sequence[Split]:
    """Return every mix of so many workers that can serve."""
    mixes = [
        Split(prefill=prefill, decode=workers - unified - prefill, unified=unified)
        for unified in range(workers + 1)
        for prefill in range(workers - unified + 1)
    ]
    return [m for m in mixes if bool(m.prefill) == bool(m.decode)]


@functools.cache
def demand_of(kind: Kind) -> Demand:
    """Return what this kind of requests asks for, as measured in a simulated half hour."""
    pilot = AutoPilot(kind.fleet, RatioLimits())
    simulation = Simulation(kind.setup(Split(prefill=4, decode=4)), pilot)
    simulation.run(poisson(kind.workload(kind.steady_rps / 2), duration_s=1800, seed=1))
    sample = pilot.demand(1800.0, simulation.router.moments)
    assert sample is not None
    return msgspec.structs.replace(sample, course=())


def _best_of(kind: Kind, demand: Demand, workers: int, fewer: Best | None) -> Best:
    """Try every mix; those first that the closed forms think best, since they spare the others their trials."""
    capacity = fewer.capacity_rps if fewer is not None else 0.0
    guess_rps = max(0.05, capacity * (workers + 0.5) / max(1, workers - 1))
    mixes = Mixes(msgspec.structs.replace(demand, rate_rps=guess_rps), kind.fleet, Corrections(), Split())
    best: Split | None = None
    waiting = sorted(all_splits(workers), key=mixes.in_time)[-LIKELY:]
    tried = set[Split]()
    while waiting:
        split = waiting.pop()
        if split in tried:
            continue
        tried.add(split)
        more = capacity * BETTER if capacity > 0 else 0.1
        if steady(kind, split, more) >= GOAL:
            best, capacity = split, _capacity(kind, split, more)
            waiting = [s for s in all_splits(workers) if _differ_by_one(s, split)] + waiting
    if best is None:  # one more worker than before helps in no mix: it idles
        assert fewer is not None
        return fewer
    rates = [capacity * factor for factor in _CURVE]
    shares = [steady(kind, best, rate, requests=2 * TRIAL_REQUESTS, whole=True) for rate in rates]
    return Best(split=best, capacity_rps=capacity, curve=tuple(zip(rates, _falling(shares), strict=True)))


def _differ_by_one(one: Split, other: Split) -> bool:
    """Whether one worker has another role."""
    return sum(abs(getattr(one, role) - getattr(other, role)) for role in Role) == 2


def _falling(shares: Sequence[float]) -> list[float]:
    """Return shares that never rise with the rate, in the oracle's favour: as high as any after them."""
    return list(itertools.accumulate(reversed(shares), max))[::-1]


def _capacity(kind: Kind, split: Split, good_rps: float) -> float:
    low, high = good_rps, max(0.2, good_rps * 1.3)
    while steady(kind, split, high) >= GOAL:
        low, high = high, high * 1.3
    while high > low * 1.03:
        middle = (low + high) / 2
        low, high = (middle, high) if steady(kind, split, middle) >= GOAL else (low, middle)
    return low


class _Hopeless(Exception):
    """A trial whose end is known before it has come."""


def steady(kind: Kind, split: Split, rate_rps: float, *, requests: int = TRIAL_REQUESTS, whole: bool = False) -> float:
    """Return the share in time at a steady rate; 0 as soon as GOAL is out of reach, unless `whole`."""
    length_s = requests / rate_rps
    simulation = Simulation(kind.setup(split), StaticPilot())
    looked = missed = 0

    def look(now_s: float, number: int) -> None:  # noqa: ARG001
        nonlocal looked, missed
        for sample in simulation.samples[looked:]:
            missed += sample.ended - sample.met
        looked = len(simulation.samples)
        waiting = simulation.samples[-1].num_waiting if simulation.samples else 0
        if not whole and (missed > (1 - GOAL) * requests * 1.1 or waiting > 0.08 * requests):
            raise _Hopeless

    try:
        simulation.run(poisson(kind.workload(rate_rps), duration_s=length_s, seed=5), progress=look)
    except _Hopeless:
        return 0.0
    return result_of(simulation).attainment_total


# -- a day -----------------------------------------------------------------------------------------------------


def schedule_of(model: Model, table: Sequence[Best], day_s: float, goal: float = GOAL) -> Schedule:
    """Return the day with the fewest worker-hours that serves `goal` of its requests in time."""
    slots = round(day_s / SLOT_S)
    rates = tuple(model.rate_rps((slot + 0.5) / slots) for slot in range(slots))
    low, high = 0.0, 1.0  # workers that a slot may cost per missed request
    while _planned(rates, table, high).in_time < goal and high < 1e6:
        high *= 4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _planned(rates, table, middle).in_time >= goal else (middle, high)
    return _planned(rates, table, high)


def hours_with_every_slot_served(model: Model, table: Sequence[Best], day_s: float) -> float:
    """Return the worker-hours of a laxer oracle, which owes GOAL in each slot and so cannot choose where to miss."""
    slots = round(day_s / SLOT_S)
    hours = 0.0
    for slot in range(slots):
        rate = model.rate_rps((slot + 0.5) / slots)
        enough = (workers for workers, best in enumerate(table, start=1) if best.capacity_rps >= rate)
        hours += next(enough, len(table) + 1) * SLOT_S / 3600
    return hours


def _planned(rates: Sequence[float], table: Sequence[Best], per_miss: float) -> Schedule:
    workers, missed = [], 0.0
    for rate in rates:
        misses = _misses(tuple(table), rate)
        chosen = min(range(len(table)), key=lambda n: (n + 1 + per_miss * misses[n], n))
        workers.append(chosen + 1)
        missed += misses[chosen]
    arrivals = sum(rate * SLOT_S for rate in rates)
    return Schedule(workers=tuple(workers), in_time=1 - missed / arrivals, hours=sum(workers) * SLOT_S / 3600)


@functools.lru_cache(maxsize=100_000)
def _misses(table: tuple[Best, ...], rate_rps: float) -> tuple[float, ...]:
    """Return the requests of a slot that 1, 2, ... workers miss."""
    return tuple(rate_rps * SLOT_S * (1 - best.in_time(rate_rps)) for best in table)


class _SchedulePilot:
    """Puts the workers of each slot there at once, whatever a start takes."""

    period_s = StaticPilot.period_s

    def __init__(self, splits: Sequence[Split]) -> None:
        self._splits = splits
        self._slot = 0
        self._simulation: Simulation | None = None

    def begin(self, simulation: Simulation) -> None:
        """Take the simulation that this is the pilot of."""
        self._simulation = simulation

    def arrived(self, now_s: float, request: int, sample: DemandSample) -> None:
        """Ignore it."""

    def ended(self, now_s: float, request: int, stage: Stage | None, output_tokens: int | None) -> None:
        """Ignore it."""

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:  # noqa: ARG002
        """Bring workers and take them away; those who go finish what they run."""
        simulation = self._simulation
        assert simulation is not None
        slot = min(int(now_s / SLOT_S + 0.001), len(self._splits) - 1)
        if slot == self._slot:
            return None
        self._slot, wanted = slot, self._splits[slot]
        for role in Role:
            there = [w for w in simulation.workers.values() if w.role is role and w.ready]
            for _ in range(getattr(wanted, role) - len(there)):
                simulation.add_worker(role)
            for worker in sorted(there, key=lambda w: len(w.jobs))[: max(0, len(there) - getattr(wanted, role))]:
                simulation.take_away(worker)
        return None


def play_schedule(
    model: Model, kind: Kind, table: Sequence[Best], schedule: Schedule, *, day_s: float, seed: int
) -> float:
    """Return the share in time (0 to 1) of a schedule over a day's arrivals."""
    splits = [table[workers - 1].split for workers in schedule.workers]
    pilot = _SchedulePilot(splits)
    simulation = Simulation(kind.setup(splits[0]), pilot)
    pilot.begin(simulation)
    simulation.run(day(model, day_s, seed))
    return result_of(simulation).attainment_total
