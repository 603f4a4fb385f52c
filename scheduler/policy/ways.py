"""Every direction in which workers could move, valued by predicted goodput. Pure."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from contracts.lifecycle import Role
from scheduler.policy.demand import Demand
from scheduler.policy.queueing import Corrections, Fleet, Prediction, Predictor, Split

_MAX_STEPS = 8


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A number of equal moves from one role to another."""

    from_role: Role
    to_role: Role
    next: Split
    """After the first move."""
    target: Split
    """After the last one."""
    steps: int = 1
    goodput_rps: float = 0.0
    """At the target."""
    legal: bool = True
    """Whether the first move keeps the floors of prefill and decode."""
    last_unified: bool = False
    """Whether it gives up the unified workers that the floors ask for."""

    @classmethod
    def step(cls, split: Split, from_role: Role, to_role: Role) -> "Way":
        """Return a way of one move, not valued."""
        target = moved(split, from_role, to_role)
        return cls(from_role=from_role, to_role=to_role, next=target, target=target)


def moved(split: Split, from_role: Role, to_role: Role) -> Split:
    """Return the split after one worker has moved."""
    counts = {role.value: getattr(split, role) for role in Role}
    counts[from_role] -= 1
    counts[to_role] += 1
    return Split(**counts)


class Weighted(msgspec.Struct, frozen=True):
    """A demand and how much it counts."""

    demand: Demand
    weight: float


def ways(
    split: Split, demands: Sequence[Weighted], fleet: Fleet, corrections: Corrections, least: Split
) -> tuple[Prediction, list[Way]]:
    """Return what the split would do as it is, and each direction at its best number of moves.

    With several demands, values are weighted means. A split
    keeps the floors `least`; one that is below them may only come closer. Directions that break them
    are valued for one move, and marked.
    """
    predictors = [(Predictor(entry.demand, fleet, corrections), entry.weight) for entry in demands]
    now = _value(split, predictors)
    found = []
    for from_role, to_role in _directions(split):
        step = Way.step(split, from_role, to_role)
        legal = _keeps(step.next, split, least)
        best = msgspec.structs.replace(
            step,
            goodput_rps=_value(step.next, predictors).goodput_rps,
            legal=legal,
            last_unified=step.next.unified < min(least.unified, split.unified),
        )
        for steps in range(2, _MAX_STEPS + 1):
            if not legal or getattr(best.target, from_role) < 1:
                break
            target = moved(best.target, from_role, to_role)
            if not _keeps(target, split, least) or target.unified < min(least.unified, split.unified):
                break
            goodput_rps = _value(target, predictors).goodput_rps
            if goodput_rps <= best.goodput_rps:
                break
            best = msgspec.structs.replace(best, target=target, steps=steps, goodput_rps=goodput_rps)
        found.append(best)
    return now, found


def _keeps(split: Split, before: Split, least: Split) -> bool:
    return split.prefill >= min(least.prefill, before.prefill) and split.decode >= min(least.decode, before.decode)


def _directions(split: Split) -> Iterator[tuple[Role, Role]]:
    for from_role in Role:
        for to_role in Role:
            if from_role is not to_role and getattr(split, from_role) > 0:
                yield from_role, to_role


def _value(split: Split, predictors: Sequence[tuple[Predictor, float]]) -> Prediction:
    if len(predictors) == 1:
        return predictors[0][0].predict(split)
    predictions = [(predictor.predict(split), weight) for predictor, weight in predictors]
    total = sum(weight for _, weight in predictors)

    def mean(read: Callable[[Prediction], float]) -> float:
        return sum(read(prediction) * weight for prediction, weight in predictions) / total

    return Prediction(
        goodput_rps=mean(lambda p: p.goodput_rps),
        unified_share=mean(lambda p: p.unified_share),
        prefill_load=mean(lambda p: p.prefill_load),
        decode_load=mean(lambda p: p.decode_load),
    )
