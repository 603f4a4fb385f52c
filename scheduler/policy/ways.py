"""Every direction in which workers could move, valued by predicted goodput. Pure."""

from collections.abc import Iterable, Iterator, Sequence

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


def ways(
    split: Split, demands: Sequence[Demand], fleet: Fleet, corrections: Corrections, least: Split
) -> tuple[Prediction, list[Way]]:
    """Return what the split would do as it is, and each direction at its best number of moves.

    With several demands, values are means over their spans: the split that suits all of them. A split
    keeps the floors `least`; one that is below them may only come closer. Directions that break them
    are valued for one move, and marked.
    """
    predictors = [Predictor(demand, fleet, corrections) for demand in demands]
    spans_s = [demand.span_s for demand in demands]
    now = _value(split, predictors, spans_s)
    found = []
    for from_role, to_role in _directions(split):
        step = Way.step(split, from_role, to_role)
        legal = _keeps(step.next, split, least)
        best = msgspec.structs.replace(
            step,
            goodput_rps=_value(step.next, predictors, spans_s).goodput_rps,
            legal=legal,
            last_unified=step.next.unified < min(least.unified, split.unified),
        )
        for steps in range(2, _MAX_STEPS + 1):
            if not legal or getattr(best.target, from_role) < 1:
                break
            target = moved(best.target, from_role, to_role)
            if not _keeps(target, split, least) or target.unified < min(least.unified, split.unified):
                break
            goodput_rps = _value(target, predictors, spans_s).goodput_rps
            if goodput_rps <= best.goodput_rps:
                break
            best = msgspec.structs.replace(best, target=target, steps=steps, goodput_rps=goodput_rps)
        found.append(best)
    return now, found


def _keeps(split: Split, before: Split, least: Split) -> bool:
    return split.prefill >= min(least.prefill, before.prefill) and split.decode >= min(least.decode, before.decode)


def best_way(found: Iterable[Way]) -> Way | None:
    """Return the direction with the highest goodput at its target; fewer moves break ties."""
    return max(found, key=lambda way: (way.goodput_rps, -way.steps), default=None)


def _directions(split: Split) -> Iterator[tuple[Role, Role]]:
    for from_role in Role:
        for to_role in Role:
            if from_role is not to_role and getattr(split, from_role) > 0:
                yield from_role, to_role


def _value(split: Split, predictors: Sequence[Predictor], spans_s: Sequence[float]) -> Prediction:
    predictions = [predictor.predict(split) for predictor in predictors]
    if len(predictions) == 1:
        return predictions[0]
    total_s = sum(spans_s)

    def mean(values: Iterable[float]) -> float:
        return sum(value * span_s for value, span_s in zip(values, spans_s, strict=True)) / total_s

    return Prediction(
        goodput_rps=mean(p.goodput_rps for p in predictions),
        unified_share=mean(p.unified_share for p in predictions),
        prefill_load=mean(p.prefill_load for p in predictions),
        decode_load=mean(p.decode_load for p in predictions),
    )
