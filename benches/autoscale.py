"""Workers by demand over a simulated day: `python -m benches.autoscale`.

Five models of three kinds of traffic, each with its peak at another hour; arrivals swing tenfold between the quietest
and the busiest moment. `--day-hours 6` (the default) plays the day four times as fast, which is harder than a real one:
load doubles four times as fast while workers take as long to start. Every request is simulated; the policy is the one
that production runs (scheduler.policy.scaling, with the ratio controller beside it).

The oracle knows the true rate of every moment, needs no time to start a worker and keeps no reserve: at each moment it
has the smallest number of workers that, in a steady simulation of that very rate, serves 95 % in time in the best of
the mixes tried: the two that the closed forms think best. Where both are poor the oracle is, too, and can be beaten;
then its figure says nothing, and only the attainment counts.
Steady load: the same kinds at one rate; the first half hour, in which the pool finds its size, does not count.

Printed, and written to `benches/results/autoscale.json`.
"""

import argparse
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.slo import SloTarget
from scheduler.policy.demand import Demand
from scheduler.policy.headcount import Bounds, Ground, ScaleLimits
from scheduler.policy.mixes import Mixes, splits
from scheduler.policy.queueing import Corrections, Fleet, Split
from scheduler.policy.sight import RatioLimits
from scheduler.simulator.arrivals import Arrival, Lengths, Workload, poisson
from scheduler.simulator.elastic import AutoScaler, ElasticPilot
from scheduler.simulator.pilot import AutoPilot
from scheduler.simulator.play import Policy, play, result_of
from scheduler.simulator.report import Result
from scheduler.simulator.setup import Setup
from scheduler.simulator.simulation import Simulation

RESULTS = Path(__file__).parent / "results" / "autoscale.json"
BOOT_S = 60.0
GOAL = 0.95
MOST = 40
STEADY_S = 2 * 3600.0
SETTLING_S = 1800.0
ORACLE_S = 3600.0
"""Simulated time of each trial of the oracle's tables."""

LATENCY = LatencyModel(
    prefill=PrefillCost(fixed_ms=20, per_token_ms=0.25, per_token_pair_ms=2e-6),
    decode=DecodeCost(fixed_ms=20, per_request_ms=0.2, per_kv_token_ms=2e-4),
    transfer=TransferCost(fixed_ms=2, bytes_per_ms=2e7, kv_bytes_per_token=327_680),
    kv_capacity_tokens=200_000,
)
"""About a 70B model on a worker of four GPUs."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of traffic and its targets."""

    prompt: Lengths
    output: Lengths
    target: SloTarget
    steady_rps: float

    def workload(self, rate_rps: float = 1.0) -> Workload:
        return Workload(prompt=self.prompt, output=self.output, rate_rps=rate_rps)

    @property
    def fleet(self) -> Fleet:
        return Fleet(latency=LATENCY, target=self.target)

    def setup(self, split: Split) -> Setup:
        return Setup(split=split, target=self.target, latency=LATENCY)


KINDS = {
    "documents": Kind(
        prompt=Lengths(median=3000, p90_over_median=2.5, highest=16_000),
        output=Lengths(median=250, p90_over_median=2.5, highest=2000),
        target=SloTarget(ttft_ms=4000, tpot_ms=60),
        steady_rps=2.0,
    ),
    "chat": Kind(
        prompt=Lengths(median=800, p90_over_median=3.0, highest=16_000),
        output=Lengths(median=350, p90_over_median=2.5, highest=2000),
        target=SloTarget(ttft_ms=2000, tpot_ms=50),
        steady_rps=4.0,
    ),
    "code": Kind(
        prompt=Lengths(median=2000, p90_over_median=2.0, highest=16_000),
        output=Lengths(median=700, p90_over_median=2.0, highest=3000),
        target=SloTarget(ttft_ms=3000, tpot_ms=60),
        steady_rps=2.5,
    ),
}


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model's day."""

    name: str
    kind: str
    low_rps: float
    peak_hour: float
    """Of the 24."""
    swing: float = 10.0

    def rate_rps(self, share: float) -> float:
        """Return the rate at a share (0 to 1) of the day: one high and one low, with a shoulder before the high."""
        turn = 2 * math.pi * (share - self.peak_hour / 24)
        wave = 0.5 + 0.5 * math.cos(turn) + 0.12 * math.sin(2 * turn)
        low, high = -0.0067, 1.0068  # of the wave
        return self.low_rps * self.swing ** ((wave - low) / (high - low))


MODELS = (
    Model(name="documents-a", kind="documents", low_rps=0.6, peak_hour=14),
    Model(name="documents-b", kind="documents", low_rps=0.4, peak_hour=2),
    Model(name="chat-a", kind="chat", low_rps=1.2, peak_hour=19),
    Model(name="chat-b", kind="chat", low_rps=0.8, peak_hour=9),
    Model(name="code", kind="code", low_rps=0.6, peak_hour=11),
)


def day(model: Model, day_s: float, seed: int) -> Iterator[Arrival]:
    """Yield the requests of a day: Poisson at a rate that changes, by thinning."""
    rng = random.Random(seed)
    workload = KINDS[model.kind].workload()
    top = max(model.rate_rps(i / 1000) for i in range(1000))
    at_s, serial = 0.0, 0
    while (at_s := at_s + rng.expovariate(top)) < day_s:
        if rng.random() < model.rate_rps(at_s / day_s) / top:
            serial += 1
            yield workload.one(at_s, rng, serial)


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What the autoscaler did with some arrivals."""

    result: Result
    hours: float
    events: list[tuple[float, str, str, str]]
    """When, s; why; from which mix, to which steps."""


def autoscaled(kind: Kind, arrivals: Iterator[Arrival], first: Split, limits: ScaleLimits) -> Course:
    """Play arrivals with the autoscaler and the ratio controller."""
    scaler = AutoScaler(
        kind.fleet,
        Bounds(max_workers=MOST, to_zero=False),
        boot_s=BOOT_S,
        ground=Ground(free={"": MOST}),
        limits=limits,
    )
    pilot = ElasticPilot(AutoPilot(kind.fleet, RatioLimits()), scaler, boot_s=BOOT_S)
    simulation = Simulation(kind.setup(first), pilot)
    pilot.begin(simulation)
    simulation.run(arrivals)
    events = [
        (at_s, plan.why.value, str(plan.split), f"{type(plan.steps[0]).__name__.lower()} {len(plan.steps)}")
        for at_s, plan in pilot.log
    ]
    return Course(result=result_of(simulation), hours=simulation.workforce.hours, events=events)


# -- the oracle ------------------------------------------------------------------------------------------------


def demand_of(kind: Kind) -> Demand:
    """Return what this kind of requests asks for, as measured in a simulated half hour."""
    pilot = AutoPilot(kind.fleet, RatioLimits())
    simulation = Simulation(kind.setup(Split(prefill=4, decode=4)), pilot)
    simulation.run(poisson(kind.workload(kind.steady_rps / 2), duration_s=1800, seed=1))
    sample = pilot.demand(1800.0, simulation.router.moments)
    assert sample is not None
    return msgspec.structs.replace(sample, course=())


def capacities(kind: Kind, top_rps: float) -> list[float]:
    """Return the highest rate that 1, 2, ... workers serve to 95 %, up to the rate that is asked for."""
    demand, found = demand_of(kind), [0.0]
    while found[-1] < top_rps and len(found) <= MOST:
        workers = len(found)
        best = max(_capacity(kind, split, found[-1]) for split in _promising(kind, demand, workers, found[-1]))
        found.append(max(best, found[-1]))
    return found[1:]


def without_steps(table: list[float]) -> list[float]:
    """Return a table in which numbers of workers that seemed to do no more than one fewer do what lies between.

    Only the most promising mixes are tried, so the best of some number may have been missed: in the oracle's favour.
    """
    rates = list(table)
    for n in range(1, len(rates) - 1):
        if rates[n] <= rates[n - 1]:
            further = next((m for m in range(n + 1, len(rates)) if rates[m] > rates[n]), None)
            if further is not None:
                rates[n] = rates[n - 1] + (rates[further] - rates[n - 1]) / (further - n + 1)
    return rates


def _promising(kind: Kind, demand: Demand, workers: int, above_rps: float) -> list[Split]:
    """Return the mixes of so many workers that the closed forms think best, at a rate somewhat above what fewer can."""
    rate = max(0.05, above_rps * (workers + 0.5) / max(1, workers - 1))
    mixes = Mixes(msgspec.structs.replace(demand, rate_rps=rate), kind.fleet, Corrections(), Split())
    return sorted(splits(workers, Split()), key=mixes.in_time, reverse=True)[:2]


def _capacity(kind: Kind, split: Split, above_rps: float) -> float:
    low, high = above_rps, max(0.2, above_rps * 2 + 0.3)
    if _steady(kind, split, low) < GOAL:
        return 0.0
    for _ in range(5):
        middle = (low + high) / 2
        low, high = (middle, high) if _steady(kind, split, middle) >= GOAL else (low, middle)
    return low


def _steady(kind: Kind, split: Split, rate_rps: float) -> float:
    if rate_rps <= 0:
        return 1.0
    length_s = min(ORACLE_S, 2000 / rate_rps)
    arrivals = poisson(kind.workload(rate_rps), duration_s=length_s, seed=5)
    return play(arrivals, kind.setup(split), Policy.STATIC)[0].attainment_total


def oracle_hours(model: Model, table: list[float], day_s: float) -> float:
    """Return the worker-hours of an oracle's day."""
    steps = 5000
    table = without_steps(table)
    needs = [_needed(table, model.rate_rps((i + 0.5) / steps)) for i in range(steps)]
    return sum(needs) / steps * day_s / 3600


def _needed(table: list[float], rate_rps: float) -> int:
    return next((n for n, most_rps in enumerate(table, start=1) if most_rps >= rate_rps), len(table))


# -- running ---------------------------------------------------------------------------------------------------


T = TypeVar("T")


def _kept(file: Path, kind: type[T], make: Callable[[], T]) -> T:
    """Return what a part's file holds, or make it and keep it there."""
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=kind)
    made = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(made))
    return made


def run_kind(name: str, parts: Path) -> tuple[str, list[float], dict[str, Any]]:
    """Return a kind's table for the oracle and what happens under steady load."""
    return _kept(parts / f"kind-{name}.json", tuple[str, list[float], dict[str, Any]], lambda: _of_kind(name))


def _of_kind(name: str) -> tuple[str, list[float], dict[str, Any]]:
    kind = KINDS[name]
    top = max(m.rate_rps(i / 1000) for m in MODELS if m.kind == name for i in range(1000))
    table = capacities(kind, top)
    arrivals = poisson(kind.workload(kind.steady_rps), duration_s=STEADY_S, seed=11)
    course = autoscaled(kind, arrivals, Split(prefill=2, decode=2), ScaleLimits())
    late = [event for event in course.events if event[0] > SETTLING_S]
    steady = {
        "rate_rps": kind.steady_rps,
        "attainment": round(course.result.attainment_total, 4),
        "events_while_settling": len(course.events) - len(late),
        "events": len(late),
        "hours": STEADY_S / 3600,
    }
    return name, [round(rate, 3) for rate in table], steady


def run_day(name: str, day_s: float, seed: int, parts: Path) -> tuple[str, Course]:
    """Play one model's day."""
    model = next(m for m in MODELS if m.name == name)
    file = parts / f"day-{name}-{day_s:.0f}-{seed}.json"
    first = Split(prefill=2, decode=2)
    return name, _kept(
        file, Course, lambda: autoscaled(KINDS[model.kind], day(model, day_s, seed), first, ScaleLimits())
    )


def main() -> None:
    """Run everything, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--day-hours", type=float, default=6.0, help="simulated length of the day")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--events", action="store_true", help="print every event")
    parser.add_argument("--no-oracle", nargs="*", default=[], help="kinds whose oracle is left out (it takes longest)")
    parser.add_argument("--parts", type=Path, help="folder of parts that are done: what is there is not run again")
    asked = parser.parse_args()
    began_s, day_s = time.monotonic(), asked.day_hours * 3600
    with tempfile.TemporaryDirectory() as own, ProcessPoolExecutor(asked.jobs) as pool:
        parts = asked.parts or Path(own)
        days = [pool.submit(run_day, model.name, day_s, asked.seed, parts) for model in MODELS]
        kinds = [pool.submit(run_kind, name, parts) for name in KINDS if name not in asked.no_oracle]
        courses = dict(future.result() for future in days)
        tables = {name: (table, steady) for name, table, steady in (future.result() for future in kinds)}
    rows = {}
    for model in MODELS:
        course = courses[model.name]
        oracle = oracle_hours(model, tables[model.kind][0], day_s) if model.kind in tables else None
        rows[model.name] = {
            "requests": course.result.requests,
            "attainment": round(course.result.attainment_total, 4),
            "worker_hours": round(course.hours, 2),
            "oracle_hours": round(oracle, 2) if oracle is not None else None,
            "over_oracle": round(course.hours / oracle, 3) if oracle is not None else None,
            "events": len(course.events),
            "events_per_5min": round(len(course.events) * 300 / day_s, 3),
            "flips": course.result.flips,
            "why": dict(Counter(event[1] for event in course.events)),
        }
        if asked.events:
            for event in course.events:
                print(model.name, round(event[0] / 60), *event[1:])
    figures = _total(rows, asked.day_hours, tables)
    _print(rows, figures)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{time.monotonic() - began_s:.0f} s; written to {RESULTS.name}")


def _total(rows: dict[str, Any], day_hours: float, tables: dict[str, Any]) -> dict[str, Any]:
    requests = sum(row["requests"] for row in rows.values())
    compared = [row for row in rows.values() if row["oracle_hours"] is not None]
    hours, oracle = (sum(row[key] for row in compared) for key in ("worker_hours", "oracle_hours"))
    return {
        "day_hours": day_hours,
        "boot_s": BOOT_S,
        "attainment": round(sum(row["attainment"] * row["requests"] for row in rows.values()) / requests, 4),
        "lowest_attainment": min(row["attainment"] for row in rows.values()),
        "worker_hours": round(hours, 2),
        "oracle_hours": round(oracle, 2),
        "over_oracle": round(hours / oracle, 3),
        "most_events_per_5min": max(row["events_per_5min"] for row in rows.values()),
        "models": rows,
        "steady": {name: steady for name, (_, steady) in tables.items()},
        "oracle_rps_by_workers": {name: table for name, (table, _) in tables.items()},
    }


def _print(rows: dict[str, Any], figures: dict[str, Any]) -> None:
    columns: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("requests", str),
        ("attainment", "{:.4f}".format),
        ("worker_hours", "{:.2f}".format),
        ("oracle_hours", str),
        ("over_oracle", str),
        ("events_per_5min", "{:.3f}".format),
        ("flips", str),
    )
    print(f"{'model':<14}" + "".join(f"{name:>17}" for name, _ in columns))
    for name, row in rows.items():
        print(f"{name:<14}" + "".join(f"{show(row[key]):>17}" for key, show in columns), row["why"])
    print({key: value for key, value in figures.items() if not isinstance(value, dict)})
    print("steady:", figures["steady"])


if __name__ == "__main__":
    main()
