"""Workers by demand over simulated days: `python -m benches.autoscale`.

`--day-hours 6` (the default) plays a day (benches.autoscale_days) four times as fast, which is harder than a real one:
load changes four times as fast while workers take as long to start. Every request is simulated; the policy is the one
that production runs (scheduler.policy.scaling, with the ratio controller beside it). Seeds below 100 were looked at
while the policy was made; those from 100 on were not.

Worker-hours are held against a schedule made with the future known (benches.autoscale_oracle).
Steady load: the same kinds at one rate; the first half hour, in which the pool finds its size, does not count.
`--steady` plays nothing else, and puts it in the place of what the results have of it.

It takes long: `--parts FOLDER` keeps what is done, and what is there is not run again; `--minutes` begins nothing new
after so long. Once all parts are there the results are printed, and written to `benches/results/autoscale.json`.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benches.autoscale_days import KINDS, MODELS, Kind, Model, day
from benches.autoscale_oracle import Best, hours_with_every_slot_served, is_whole, one_more, play_schedule, schedule_of
from benches.autoscale_report import RESULTS, figures_of, read, table_of_days, table_of_steady_load
from benches.autoscale_surplus import REASONS, Slot, Watched, rounded, surplus_of, table_of_hours, table_of_surplus
from scheduler.policy.headcount import Bounds, Ground, ScaleLimits
from scheduler.policy.queueing import Split
from scheduler.policy.sight import RatioLimits
from scheduler.simulator.arrivals import Arrival, poisson
from scheduler.simulator.elastic import AutoScaler, ElasticPilot
from scheduler.simulator.pilot import AutoPilot
from scheduler.simulator.play import result_of
from scheduler.simulator.report import Result
from scheduler.simulator.simulation import Simulation

BOOT_S = 60.0
MOST = 40
SEEDS = (101, 7, 102)
STEADY_S = 4 * 3600.0
STEADY_RUNS = [(kind, seed) for seed in (11, 12, 101) for kind in KINDS]
SETTLING_S = 1800.0
FIRST = Split(prefill=2, decode=2)
"""What a day begins with."""


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What the autoscaler did with some arrivals."""

    result: Result
    hours: float
    events: list[tuple[float, str, str, str]]
    """When, s; why; from which mix, to which steps."""
    slots: list[Slot] = []
    """What the autoscaler thought, five minutes by five minutes."""


def autoscaled(kind: Kind, arrivals: Iterator[Arrival], first: Split, limits: ScaleLimits) -> Course:
    """Play arrivals with the autoscaler and the ratio controller."""
    scaler = Watched(
        AutoScaler(
            kind.fleet,
            Bounds(max_workers=MOST, to_zero=False),
            boot_s=BOOT_S,
            ground=Ground(free={"": MOST}),
            limits=limits,
        )
    )
    pilot = ElasticPilot(AutoPilot(kind.fleet, RatioLimits()), scaler, boot_s=BOOT_S)
    simulation = Simulation(kind.setup(first), pilot)
    pilot.begin(simulation)
    simulation.run(arrivals)
    events = [
        (at_s, plan.why.value, str(plan.split), f"{type(plan.steps[0]).__name__.lower()} {len(plan.steps)}")
        for at_s, plan in pilot.log
    ]
    hours = simulation.workforce.hours
    return Course(result=result_of(simulation), hours=hours, events=events, slots=scaler.slots())


# -- parts -----------------------------------------------------------------------------------------------------


def oracle_table(name: str, folder: Path, until_s: float) -> list[Best] | None:
    """Return what 1, 2, ... workers can do at most for a kind of traffic; None when time is up before."""
    top_rps = max(m.rate_rps(i / 1000) for m in MODELS if m.kind == name for i in range(1000))
    found: list[Best] = []
    while not is_whole(found, top_rps):
        file = folder / f"oracle-{name}-{len(found) + 1}.json"
        if not file.exists():
            if time.monotonic() > until_s:
                return None
            best = one_more(KINDS[name], found)
            file.write_bytes(msgspec.json.encode(best))
            print(f"  oracle, {name}: {len(found) + 1} workers: {best.split} {best.capacity_rps:.2f}/s", flush=True)
        found.append(msgspec.json.decode(file.read_bytes(), type=Best))
    return found


def steady_load(name: str, seed: int) -> Course:
    """Play one rate."""
    kind = KINDS[name]
    return autoscaled(
        kind, poisson(kind.workload(kind.steady_rps), duration_s=STEADY_S, seed=seed), FIRST, ScaleLimits()
    )


def steady_row(name: str, courses: Sequence[Course]) -> dict[str, Any]:
    """Return what happened under one rate, all seeds together."""
    events = [event for course in courses for event in course.events if event[0] <= STEADY_S]
    late = [event for event in events if event[0] > SETTLING_S]
    return {
        "rate_rps": KINDS[name].steady_rps,
        "attainment": round(sum(course.result.attainment_total for course in courses) / len(courses), 4),
        "runs": len(courses),
        "events_while_settling": len(events) - len(late),
        "events": len(late),
        "hours": STEADY_S / 3600,
        "worker_hours": round(sum(course.hours for course in courses), 2),
    }


def one_day(model: Model, day_s: float, seed: int) -> Course:
    """Play one model's day."""
    return autoscaled(KINDS[model.kind], day(model, day_s, seed), FIRST, ScaleLimits())


def played(model: Model, table: Sequence[Best], day_s: float, seed: int) -> float:
    """Return the share in time of the oracle's schedule over a day's arrivals."""
    return play_schedule(model, KINDS[model.kind], table, schedule_of(model, table, day_s), day_s=day_s, seed=seed)


T = TypeVar("T")


class Parts:
    """Results of parts in a folder: each is made once, in a process of its own, until time is up."""

    def __init__(self, folder: Path, pool: ProcessPoolExecutor, until_s: float) -> None:
        self._folder = folder
        self._pool = pool
        self._until_s = until_s
        self._made: dict[str, Future[Any]] = {}

    def ask(self, name: str, make: Callable[..., Any], *args: Any) -> None:
        """Have a part made unless it is there."""
        if not self._file(name).exists():
            self._made[name] = self._pool.submit(_made, self._until_s, self._file(name), make, args)

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return a part, once it has been made; None when time was up before its turn."""
        if name in self._made:
            self._made.pop(name).result()
        file = self._file(name)
        return msgspec.json.decode(file.read_bytes(), type=kind) if file.exists() else None

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _made(until_s: float, file: Path, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if time.monotonic() < until_s:  # of the machine: the same in every process
        began_s = time.monotonic()
        made = make(*args)
        if made is not None:
            file.write_bytes(msgspec.json.encode(made))
        print(f"{file.stem}: {time.monotonic() - began_s:.0f} s", flush=True)


# -- running ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Run what is not there, then print and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--day-hours", type=float, default=6.0, help="simulated length of the day")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steady", action="store_true", help="play steady load alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--events", action="store_true", help="print every event")
    parser.add_argument("--parts", type=Path, default=Path("/tmp/pdgate-autoscale"), help="folder of parts")
    parser.add_argument("--minutes", type=float, default=600.0)
    asked = parser.parse_args()
    asked.parts.mkdir(parents=True, exist_ok=True)
    began_s, day_s = time.monotonic(), asked.day_hours * 3600
    with ProcessPoolExecutor(asked.jobs) as pool:
        parts = Parts(asked.parts, pool, began_s + asked.minutes * 60)
        for kind, seed in STEADY_RUNS:
            parts.ask(_steady_name(kind, seed), steady_load, kind, seed)
        if asked.steady:
            _renew_steady(parts)
            return
        for kind in KINDS:
            parts.ask(f"oracle-{kind}", oracle_table, kind, asked.parts, began_s + asked.minutes * 60)
        runs = [(model, seed) for seed in asked.seeds for model in MODELS]
        for model, seed in runs:
            parts.ask(_day_name(model, day_s, seed), one_day, model, day_s, seed)
        tables = {kind: parts.get(f"oracle-{kind}", list[Best]) for kind in KINDS}
        for model in MODELS:
            if (table := tables[model.kind]) is not None:
                parts.ask(_played_name(model, day_s, asked.seeds[-1]), played, model, table, day_s, asked.seeds[-1])
        courses = {(m.name, seed): parts.get(_day_name(m, day_s, seed), Course) for m, seed in runs}
        steady = _steady_rows(parts)
        shares = {m.name: parts.get(_played_name(m, day_s, asked.seeds[-1]), float) for m in MODELS}
    print(f"{time.monotonic() - began_s:.0f} s")
    if steady is None or None in courses.values():
        print("parts are missing: run it again")
        return
    rows = [_row(model, seed, courses, tables, day_s, print_events=asked.events) for model, seed in runs]
    figures = figures_of(
        rows,
        day_hours=asked.day_hours,
        boot_s=BOOT_S,
        steady=steady,
        oracle={kind: [_best_row(best) for best in table or ()] for kind, table in tables.items()},
        played={name: round(share, 4) if share is not None else None for name, share in shares.items()},
        surplus=_surplus(courses, tables, asked.seeds, day_s),
    )
    print(table_of_days(figures))
    print(table_of_surplus(figures["surplus"]))
    print(table_of_hours(_by_hour(courses, tables, day_s)))
    print(table_of_steady_load(figures))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"written to {RESULTS.name}")


def _renew_steady(parts: Parts) -> None:
    steady = _steady_rows(parts)
    if steady is None:
        print("parts are missing: run it again")
        return
    figures = {**read(), "steady": steady}
    print(table_of_steady_load(figures))
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


def _steady_rows(parts: Parts) -> dict[str, Any] | None:
    """Return what happened under steady load, by kind; None while a part is missing."""
    courses = {run: parts.get(_steady_name(*run), Course) for run in STEADY_RUNS}
    done = {run: course for run, course in courses.items() if course is not None}
    if len(done) < len(courses):
        return None
    return {name: steady_row(name, [course for (kind, _), course in done.items() if kind == name]) for name in KINDS}


def _steady_name(kind: str, seed: int) -> str:
    return f"steady-{kind}-{STEADY_S:.0f}-{seed}"


def _day_name(model: Model, day_s: float, seed: int) -> str:
    return f"day-{model.name}-{day_s:.0f}-{seed}"


def _played_name(model: Model, day_s: float, seed: int) -> str:
    return f"played-{model.name}-{day_s:.0f}-{seed}"


def _surplus(
    courses: dict[tuple[str, int], Course | None],
    tables: dict[str, list[Best] | None],
    seeds: Sequence[int],
    day_s: float,
) -> dict[str, dict[str, float]]:
    """Return each model's worker-hours by reason, in the mean over the seeds."""
    found: dict[str, dict[str, float]] = {}
    for model in MODELS:
        table, rows = tables[model.kind], []
        for seed in seeds:
            course = courses[model.name, seed]
            if table is not None and course is not None:
                rows += surplus_of(model, table, course.slots, day_s=day_s, hours=course.hours)
        if rows:
            found[model.name] = rounded({name: sum(row[name] for row in rows) / len(rows) for name in rows[0]})
    return found


def _by_hour(
    courses: dict[tuple[str, int], Course | None], tables: dict[str, list[Best] | None], day_s: float
) -> list[dict[str, float]]:
    """Return worker-hours by reason, for each hour after a model's peak, in the mean over all days."""
    days = []
    for model in MODELS:
        table = tables[model.kind]
        for (name, _), course in courses.items():
            if name == model.name and course is not None and table is not None:
                days.append(surplus_of(model, table, course.slots, day_s=day_s, hours=course.hours, each_hour=True))
    return [
        {name: sum(rows[hour][name] for rows in days) / max(1, len(days)) for name in REASONS} for hour in range(24)
    ]


def _best_row(best: Best) -> dict[str, Any]:
    return {"split": str(best.split), "capacity_rps": round(best.capacity_rps, 3)}


def _row(
    model: Model,
    seed: int,
    courses: dict[tuple[str, int], Course | None],
    tables: dict[str, list[Best] | None],
    day_s: float,
    *,
    print_events: bool,
) -> dict[str, Any]:
    course, table = courses[model.name, seed], tables[model.kind]
    assert course is not None
    oracle = each = None
    if table is not None:
        oracle, each = schedule_of(model, table, day_s).hours, hours_with_every_slot_served(model, table, day_s)
    if print_events:
        for event in course.events:
            print(model.name, seed, round(event[0] / 60), *event[1:])
    return {
        "model": model.name,
        "seed": seed,
        "requests": course.result.requests,
        "attainment": round(course.result.attainment_total, 4),
        "worker_hours": round(course.hours, 2),
        "oracle_hours": round(oracle, 2) if oracle is not None else None,
        "over_oracle": round(course.hours / oracle, 3) if oracle is not None else None,
        "hours_of_each_slot": round(each, 2) if each is not None else None,
        "over_oracle_of_each_slot": round(course.hours / each, 3) if each is not None else None,
        "events": len(course.events),
        "events_per_5min": round(len(course.events) * 300 / day_s, 3),
        "flips": course.result.flips,
        "why": dict(Counter(event[1] for event in course.events)),
    }


if __name__ == "__main__":
    main()
