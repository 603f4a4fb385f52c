"""A day's cost: a fleet that is sized for the busiest hour, and one that follows the curve."""

import math
from collections.abc import Sequence

import msgspec

from pdgate.plan.compare import Ask, Comparison
from pdgate.plan.fleet import Setting, workers_of
from pdgate.plan.shapes import Kind, Shape
from pdgate.plan.traffic import Traffics

LEVELS = 6  # rates between none and the busiest hour's that fleets are found for; hours are rounded up to the next
HOURS = 24


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest fleet for some hours of the day."""

    hours: float
    rate_rps: float
    workers: str
    price_per_hour: float


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """Both costs of a day, in the plan's currency, GPUs only."""

    fixed: float
    following: float
    levels: list[Level]


def day_of(hourly: Sequence[float], ask: Ask, traffics: Traffics, setting: Setting, chosen: Shape | None) -> Day | None:
    """Return a day's cost of the smallest fleets of the chosen kind; None without a curve or without such fleets.

    Args:
        hourly: rate of each hour over the mean; fewer than 24 stand for equal parts of the day.
        ask: the fleet's kind of GPU.
        traffics: at the busiest hour's rate.
        setting: model and targets.
        chosen: the plan's fleet.
    """
    if not hourly or chosen is None:
        return None
    kind = Kind.UNIFIED if chosen.kind is Kind.UNIFIED else Kind.SPLIT
    workers = [workers_of(gpu, count, setting) for count, gpu in ask.fleet]
    search = Comparison(ask, traffics, setting, workers)
    peak = max(hourly)
    steps = [min(LEVELS, max(1, math.ceil(rate / peak * LEVELS))) for rate in hourly]
    fleets: dict[int, Shape] = {}
    for step in sorted({*steps, LEVELS}):
        found = search.smallest(kind, traffics.rate_rps * step / LEVELS)
        if found is None:
            return None
        fleets[step] = found
    share = HOURS / len(hourly)
    levels = [
        Level(
            hours=share * steps.count(step),
            rate_rps=traffics.rate_rps * step / LEVELS,
            workers=shape.text(),
            price_per_hour=shape.price_per_hour,
        )
        for step, shape in fleets.items()
        if step in steps
    ]
    return Day(
        fixed=HOURS * fleets[LEVELS].price_per_hour,
        following=sum(level.hours * level.price_per_hour for level in levels),
        levels=levels,
    )
