"""Days of benches.autoscale on paper: the policy itself, over the oracle's tables instead of simulated requests.

    python -m benches.autoscale_paper --tables FOLDER

Each five seconds requests arrive by chance at the day's rate, as many of them miss as the table says of so
many workers in their best mix, and `scheduler.policy.scaling.scale` decides. Starts take their minute. What paper does
not know: queues that outlast a tick, roles that are not the best ones yet, drains. So a day takes a second instead of
minutes, and is a little too cheap: docs/autoscaling.md says by how much.

The tables are those that benches.autoscale keeps (`--parts`).
"""

import argparse
import functools
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benches.autoscale_days import KINDS, MODELS, Kind, Model
from benches.autoscale_oracle import Best, demand_of, hours_with_every_slot_served, is_whole, schedule_of
from benches.autoscale_report import HELD_OUT, span_of, sum_of
from contracts.lifecycle import Role
from scheduler.policy.arrivals import ArrivalTrend
from scheduler.policy.demand import Demand
from scheduler.policy.foresight import Belief, Outcomes
from scheduler.policy.headcount import Bounds, Ground, Member, ScaleLimits, ScaleSight, ScaleState, Start, WhyScale
from scheduler.policy.mixes import Mixes
from scheduler.policy.queueing import Corrections, Fleet, Split
from scheduler.policy.scaling import scale

RESULTS = Path(__file__).parent / "results" / "autoscale_paper.json"
BOOT_S = 60.0
MOST = 40
STEADY_S = 4 * 3600.0
SETTLING_S = 1800.0
RATE_STEP = 1.02
"""Rates that are so near to each other are taken for one."""


class PaperDay(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one."""

    hours: float
    in_time: float
    """Share (0 to 1) of the requests."""
    events: tuple[tuple[float, WhyScale, int, int], ...]
    """When, s; why; how many workers; how many steps."""
    over: Mapping[str, float]
    """Worker-hours beyond what the policy thought it needed, by the reason of the tick."""
    factor: float
    """What it multiplied foreseen misses by at the end."""


class KeptMixes(Mixes):
    """Mixes at one of few rates, whose values are kept from tick to tick and from day to day."""

    def __init__(
        self,
        kept: dict[int, dict[Split, float]],
        demand: Demand,
        fleet: Fleet,
        corrections: Corrections,
        floor: Split,
        belief: Belief | None,
    ) -> None:
        bucket = round(math.log(max(demand.rate_rps, 1e-3), RATE_STEP))
        demand = msgspec.structs.replace(demand, rate_rps=RATE_STEP**bucket)
        super().__init__(demand, fleet, corrections, floor)
        self._of_rate = kept.setdefault(bucket, {})
        self._learned = belief or Belief()

    def in_time(self, split: Split) -> float:
        """Return the share of requests that a mix serves in time."""
        known = self._of_rate.get(split)
        if known is None:
            known = self._of_rate[split] = super().in_time(split)
        return self._learned.in_time(1 - known)


class _Worker:
    def __init__(self, number: int, ready_s: float) -> None:
        self.worker_id = f"w{number}"
        self.ready_s = ready_s


class Paper:
    """Plays days of one kind of traffic."""

    def __init__(self, kind: Kind, table: Sequence[Best], demand: Demand, limits: ScaleLimits) -> None:
        self._kind = kind
        self._table = table
        self._demand = demand
        self._limits = limits
        self._kept: dict[int, dict[Split, float]] = {}

    def day(self, rates: Sequence[float], *, seed: int, first: int = 4) -> PaperDay:
        """Play the rates of each five seconds, requests/s."""
        rng, trend, step_s = random.Random(seed), ArrivalTrend(), self._limits.period_s
        workers = [_Worker(number, 0.0) for number in range(first)]
        made, state = first, ScaleState(last_up_s=0.0)
        hours, ended, met, factor = 0.0, 0, 0, 1.0
        events: list[tuple[float, WhyScale, int, int]] = []
        over: dict[str, float] = {}
        for tick, rate in enumerate(rates):
            now_s = tick * step_s
            number = _poisson(rng, rate * step_s)
            for arrival in range(number):
                trend.observe(now_s + step_s * arrival / number)
            serving = sum(worker.ready_s <= now_s for worker in workers)
            missed = min(number, _poisson(rng, number * (1 - self._in_time(serving, rate))))
            ended, met = ended + number, met + number - missed
            hours += len(workers) * step_s / 3600
            now_s += step_s
            forecast = trend.forecast(now_s, ahead_s=BOOT_S + self._limits.fresh_s)
            sight = ScaleSight(
                members=self._members(workers, rate, now_s),
                ground=Ground(free={"": MOST}),
                demand=self._demand,
                rate=forecast,
                num_running=1,
                boot_s=BOOT_S,
                outcomes=Outcomes(ended=number, missed=missed, short=missed),
            )
            bounds = Bounds(max_workers=MOST, to_zero=False)
            fleet, valued = self._kind.fleet, functools.partial(KeptMixes, self._kept)
            state, plan = scale(state, sight, bounds, fleet, self._limits, now_s, valued=valued)
            beyond = (len(workers) - plan.desired.total) * step_s / 3600
            over[plan.why.value] = over.get(plan.why.value, 0.0) + beyond
            factor = plan.belief.factor
            if plan.steps:
                events.append((now_s, plan.why, len(workers), len(plan.steps)))
            for step in plan.steps:
                if isinstance(step, Start):
                    workers.append(_Worker(made, now_s + BOOT_S))
                    made += 1
                else:
                    workers = [worker for worker in workers if worker.worker_id != step.worker_id]
        return PaperDay(hours=hours, in_time=met / max(1, ended), events=tuple(events), over=over, factor=factor)

    def _in_time(self, workers: int, rate_rps: float) -> float:
        """Return the share in time of so many workers; beyond the table as many more requests as workers."""
        if not workers:
            return 0.0
        known = min(workers, len(self._table))
        return self._table[known - 1].in_time(rate_rps * known / workers)

    def _members(self, workers: Sequence[_Worker], rate_rps: float, now_s: float) -> list[Member]:
        demand = msgspec.structs.replace(self._demand, rate_rps=max(rate_rps, 0.01))
        mixes = KeptMixes(self._kept, demand, self._kind.fleet, Corrections(), Split(), None)
        split = mixes.best(len(workers)).split  # roles are changed at once and for nothing
        roles = [role for role in Role for _ in range(getattr(split, role))]
        return [
            Member(worker_id=worker.worker_id, role=role, ready=worker.ready_s <= now_s)
            for worker, role in zip(workers, roles, strict=True)
        ]


def _poisson(rng: random.Random, mean: float) -> int:
    if mean > 50:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    number, left = 0, rng.random()
    part = math.exp(-mean)
    while left > part and number < 1000:
        left -= part
        number += 1
        part *= mean / number
    return number


def rates_of(model: Model, day_s: float, step_s: float) -> list[float]:
    """Return a model's rate in each step of its day."""
    steps = round(day_s / step_s)
    return [model.rate_rps(step / steps) for step in range(steps)]


def tables_in(folder: Path) -> dict[str, list[Best]]:
    """Return the oracle's tables that a folder of parts has, whole or as far as they go."""
    tables: dict[str, list[Best]] = {}
    for kind in KINDS:
        files = []
        while (file := folder / f"oracle-{kind}-{len(files) + 1}.json").exists():
            files.append(file)
        tables[kind] = [msgspec.json.decode(file.read_bytes(), type=Best) for file in files]
    return tables


def figures_of(tables: Mapping[str, Sequence[Best]], *, day_s: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Play each model's day and each kind's steady load under each seed; models without a whole table are left out."""
    limits, days, steady = ScaleLimits(), [], []
    for name, kind in KINDS.items():
        models = [model for model in MODELS if model.kind == name and _is_known(model, tables[name])]
        if not models:
            continue
        paper = Paper(kind, tables[name], demand_of(kind), limits)
        for model, seed in itertools.product(models, seeds):
            rates = rates_of(model, day_s, limits.period_s)
            day = paper.day(rates, seed=seed)
            oracle, each = (
                schedule_of(model, tables[name], day_s).hours,
                hours_with_every_slot_served(model, tables[name], day_s),
            )
            days.append(
                {
                    "model": model.name,
                    "seed": seed,
                    "requests": round(sum(rates) * limits.period_s),
                    "attainment": round(day.in_time, 4),
                    "worker_hours": round(day.hours, 2),
                    "oracle_hours": round(oracle, 2),
                    "over_oracle": round(day.hours / oracle, 3),
                    "hours_of_each_slot": round(each, 2),
                    "over_oracle_of_each_slot": round(day.hours / each, 3),
                    "events_per_5min": round(len(day.events) * 300 / day_s, 3),
                    "factor": round(day.factor, 2),
                    "over": {why: round(beyond, 2) for why, beyond in day.over.items()},
                }
            )
            print(days[-1], flush=True)
        for seed in seeds:
            day = paper.day([kind.steady_rps] * round(STEADY_S / limits.period_s), seed=seed)
            late = [event for event in day.events if event[0] > SETTLING_S]
            steady.append({"kind": name, "seed": seed, "attainment": round(day.in_time, 4), "events": len(late)})
            print(steady[-1], flush=True)
    held_out = [day for day in days if day["seed"] >= HELD_OUT]
    return {
        "day_hours": day_s / 3600,
        "held_out": sum_of(held_out),
        "all": sum_of(days),
        "days": days,
        "steady": steady,
    }


def _is_known(model: Model, table: Sequence[Best]) -> bool:
    return is_whole(table, max(model.rate_rps(i / 1000) for i in range(1000)))


def table_of_paper(figures: Mapping[str, Any]) -> str:
    """Return the days as a table: each model over all its seeds, then all of the held-out seeds."""
    lines = [
        "| On paper | Attainment | Hours over the oracle's | over those with 95 % in each slot | Events in 5 min |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(day["model"] for day in figures["days"]):
        rows = [day for day in figures["days"] if day["model"] == name]
        lines.append(
            f"| {name} | {span_of(rows, 'attainment', percent=True)} | {span_of(rows, 'over_oracle')}"
            f" | {span_of(rows, 'over_oracle_of_each_slot')} | {span_of(rows, 'events_per_5min')} |"
        )
    of = figures["held_out"]
    seeds = ", ".join(str(seed) for seed in of["seeds"])
    lines.append(
        f"| all, held-out seeds ({seeds}) | {100 * of['attainment']:.1f} % | {of['over_oracle']:.2f}"
        f" | {of['over_oracle_of_each_slot']:.2f} | at most {of['most_events_per_5min']:.2f} |"
    )
    late = sum(row["events"] for row in figures["steady"])
    lines.append(
        f"| steady load, {len(figures['steady'])} runs of {STEADY_S / 3600:g} h | | | | {late} after half an hour |"
    )
    return "\n".join(lines)


def read_paper() -> dict[str, Any]:
    """Return the results that are committed."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def main() -> None:
    """Play and print each model's day under each seed; with whole tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=Path("/tmp/pdgate-autoscale"), help="folder of parts")
    parser.add_argument("--day-hours", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=(101, 102, 7))
    asked = parser.parse_args()
    figures = figures_of(tables_in(asked.tables), day_s=asked.day_hours * 3600, seeds=asked.seeds)
    print(table_of_paper(figures))
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"written to {RESULTS.name}")


if __name__ == "__main__":
    main()
