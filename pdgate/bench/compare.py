"""Whether two runs differ: bootstrap intervals of each measure's difference.

Requests of one run are not independent: a queue that is long for one is long for the next. So blocks of consecutive
requests are drawn, each as long as the square root of their number, which keeps that dependence; and where several
runs of one side are given, runs are drawn first, which keeps what differs from run to run. A difference is called
real if its interval excludes zero after Bonferroni's correction for the number of measures looked at.

Source: Kunsch, "The jackknife and the bootstrap for general stationary observations", Annals of Statistics 1989.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from contracts.slo import SloTarget
from pdgate.bench.records import Record, Run, Step
from pdgate.bench.summary import window_s
from pdgate.plan.workload import mean, percentile

RESAMPLES: Final = 2000
ALPHA: Final = 0.05
LEAST_IN_TAIL: Final = 5  # requests beyond a percentile, or it is not compared
LEAST_REQUESTS: Final = 20
SAME_RATE: Final = 0.05  # goodputs of open loops are compared if the rates differ by no more


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of two sides."""

    measure: str
    unit: str
    first: float
    second: float
    change: float | None  # second / first - 1; None where the first is 0
    low: float  # of second - first: interval at 95 % over all measures together
    high: float
    real: bool
    better: bool | None  # whether the second side is; None where the difference is not real


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two sides, step by step."""

    first: str
    second: str
    step: str
    requests: tuple[int, int]
    runs: tuple[int, int]
    differences: list[Difference]
    cautions: list[str]  # why the answer may not hold


class NotComparable(ValueError):
    """The message says why."""


class _Measure(msgspec.Struct, frozen=True, kw_only=True):
    """What is read off each request once, and what is made of those values in each resample."""

    name: str
    unit: str = ""
    less_is_better: bool
    value: Callable[[Record], Any]
    figure: Callable[[Sequence[Any]], float | None]

    def of(self, records: Sequence[Record]) -> float | None:
        return self.figure([self.value(record) for record in records])


def compare(
    first: Sequence[Run], second: Sequence[Run], *, seed: int = 1, resamples: int = RESAMPLES
) -> list[Comparison]:
    """Return how `second` differs from `first`, for each step that both have.

    Args:
        first: one or more runs of one configuration.
        second: the same load on the other one.
        seed: of the draws.
        resamples: how many.

    Raises:
        NotComparable: no step in common, or too few requests.
    """
    target = first[0].target
    cautions = _cautions(first, second)
    found = []
    for one in first[0].steps:
        sides = [[s for run in side for s in run.steps if s.name == one.name] for side in (first, second)]
        if not all(sides):
            continue
        numbers = tuple(sum(len(s.records) for s in side) for side in sides)
        if min(numbers) < LEAST_REQUESTS:
            raise NotComparable(f"{one.name}: {min(numbers)} requests; at least {LEAST_REQUESTS} are needed")
        invalid = [
            f"{s.name}: invalid run, {s.client.invalid_because}"
            for side in sides
            for s in side
            if s.client.invalid_because
        ]
        found.append(
            Comparison(
                first=first[0].label,
                second=second[0].label,
                step=one.name,
                requests=(numbers[0], numbers[1]),
                runs=(len(first), len(second)),
                differences=_differences(sides[0], sides[1], target, seed, resamples),
                cautions=[*cautions, *invalid],
            )
        )
    if not found:
        raise NotComparable(f"{first[0].label} and {second[0].label} have no step in common")
    return found


def _cautions(first: Sequence[Run], second: Sequence[Run]) -> list[str]:
    everyone = [*first, *second]
    found = []
    if len({run.load for run in everyone}) > 1:
        found.append("the loads differ: " + " / ".join(sorted({run.load for run in everyone})))
    if len({run.model for run in everyone}) > 1:
        found.append("the models differ: " + " / ".join(sorted({run.model for run in everyone})))
    if len({run.dialect for run in everyone}) > 1:
        found.append("one endpoint accepts options that the other refuses, so answers may differ in length")
    if min(len(first), len(second)) == 1:
        found.append("one run a side: what changes from run to run is not in the intervals")
    return found


def _differences(
    first: Sequence[Step], second: Sequence[Step], target: SloTarget, seed: int, resamples: int
) -> list[Difference]:
    sides = (_Side(first), _Side(second))
    measures = [m for m in _measures(target, sides) if all(m.of(side.records) is not None for side in sides)]
    rng = random.Random(seed)  # noqa: S311
    read = [[[m.value(record) for record in side.records] for side in sides] for m in measures]
    drawn: list[list[float]] = [[] for _ in measures]
    for _ in range(resamples):
        once, again = sides[0].draw(rng), sides[1].draw(rng)
        for values, measure, (one, other) in zip(drawn, measures, read, strict=True):
            before, after = measure.figure([one[at] for at in once]), measure.figure([other[at] for at in again])
            if before is not None and after is not None:
                values.append(after - before)
    tail = ALPHA / 2 / max(1, len(measures))
    found = []
    for values, measure in zip(drawn, measures, strict=True):
        before, after = measure.of(sides[0].records), measure.of(sides[1].records)
        assert before is not None
        assert after is not None
        values.sort()
        low, high = percentile(values, tail), percentile(values, 1 - tail)
        real = bool(values) and (low > 0 or high < 0)
        found.append(
            Difference(
                measure=measure.name,
                unit=measure.unit,
                first=before,
                second=after,
                change=after / before - 1 if before else None,
                low=low,
                high=high,
                real=real,
                better=((after < before) == measure.less_is_better) if real else None,
            )
        )
    return found


class _Side:
    """The runs of one step on one side, and how they are drawn again."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.records = [record for step in steps for record in step.records]
        starts = itertools.accumulate((len(step.records) for step in steps), initial=0)
        self._runs = [range(start, start + len(step.records)) for start, step in zip(starts, steps, strict=False)]

    def draw(self, rng: random.Random) -> list[int]:
        """Return one resample as places in `records`: runs, and blocks of consecutive requests within each."""
        drawn: list[int] = []
        for places in rng.choices(self._runs, k=len(self._runs)) if len(self._runs) > 1 else self._runs:
            size = max(1, math.isqrt(len(places)))
            around = [*places, *places[: size - 1]]  # circular, so that every request is as likely
            taken: list[int] = []
            while len(taken) < len(places):
                at = rng.randrange(len(places))
                taken += around[at : at + size]
            drawn += taken[: len(places)]
        return drawn


def _measures(target: SloTarget, sides: tuple[_Side, _Side]) -> list[_Measure]:
    least = min(len(side.records) for side in sides)
    has_target = any(value is not None for value in msgspec.structs.astuple(target))
    found = [
        _Measure(
            name=f"{name} P{share * 100:g}",
            unit="ms",
            less_is_better=True,
            value=get,
            figure=partial(_percentile, share),
        )
        for name, get in _LATENCIES
        for share in (0.5, 0.95, 0.99)
        if (1 - share) * least >= LEAST_IN_TAIL
    ]
    if has_target:
        found.append(
            _Measure(name="attainment", less_is_better=False, value=lambda r: float(r.meets(target)), figure=mean)
        )
    users = {step.concurrency for side in sides for step in side.steps}
    rates = [mean([len(step.records) / window_s(step) for step in side.steps]) for side in sides]
    if len(users) == 1 and (number := users.pop()) is not None:
        think_s = sides[0].steps[0].think_s
        # Little's law: so many users, each with a token count per time in the system
        found.append(
            _Measure(
                name="output",
                unit="tokens/s",
                less_is_better=False,
                value=lambda r: (0 if r.error else number * r.output_tokens, r.end_s - r.sent_s + think_s),
                figure=_ratio,
            )
        )
    elif has_target and max(rates) <= (1 + SAME_RATE) * min(rates):
        rate = mean(rates)
        found.append(
            _Measure(
                name="goodput",
                unit="requests/s",
                less_is_better=False,
                value=lambda r: rate * r.meets(target),
                figure=mean,
            )
        )
    found.append(_Measure(name="errors", less_is_better=True, value=lambda r: float(r.error is not None), figure=mean))
    if all(any(r.cost_nano is not None for r in side.records) for side in sides):
        # nano-units per token are thousandths of a unit per million tokens
        found.append(
            _Measure(
                name="cost per million output",
                less_is_better=True,
                value=lambda r: ((r.cost_nano or 0) / 1000, 0 if r.error else r.output_tokens),
                figure=_ratio,
            )
        )
    return found


_LATENCIES: Final[tuple[tuple[str, Callable[[Record], float | None]], ...]] = (
    ("TTFT", lambda r: r.ttft_ms),
    ("TPOT", lambda r: r.tpot_ms),
    ("end to end", lambda r: r.e2e_ms),
)


def _percentile(share: float, values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return percentile(known, share) if known else None


def _ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The first ones' sum over the second ones'."""
    below = math.fsum(pair[1] for pair in pairs)
    return math.fsum(pair[0] for pair in pairs) / below if below else None
