"""Splits that workers could be moved to, valued by predicted goodput, and the first move on the way. Pure."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from contracts.lifecycle import Role
from scheduler.policy.demand import Demand
from scheduler.policy.queueing import Corrections, Fleet, Prediction, Predictor, Split

_ALL_SPLITS_UP_TO = 12
_MAX_STEPS = 8


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A target and the moves that lead there, the first one named."""

    from_role: Role
    to_role: Role
    next: Split
    """After the first move."""
    target: Split
    """After the last one."""
    steps: int = 1
    restarts: int = 0
    """How many of the moves are to or from unified."""
    goodput_rps: float = 0.0
    """At the target."""
    legal: bool = True
    """Whether the target keeps the floors of prefill and decode."""
    last_unified: bool = False
    """Whether it gives up the unified workers that the floors ask for."""

    @classmethod
    def step(cls, split: Split, from_role: Role, to_role: Role) -> "Way":
        """Return a way of one move, not valued."""
        target = moved(split, from_role, to_role)
        restarts = int(Role.UNIFIED in (from_role, to_role))
        return cls(from_role=from_role, to_role=to_role, next=target, target=target, restarts=restarts)

    @property
    def dissolves(self) -> bool:
        """Whether no pair is left at the target."""
        return not self.target.prefill and not self.target.decode

    def gain_over(self, now: Prediction) -> float:
        """Return the relative gain in goodput at the target; 1.0 when there is none now."""
        if now.goodput_rps <= 0:
            return 1.0 if self.goodput_rps > 0 else 0.0
        return self.goodput_rps / now.goodput_rps - 1


def moved(split: Split, from_role: Role, to_role: Role) -> Split:
    """Return the split after one worker has moved."""
    counts = {Role.PREFILL: split.prefill, Role.DECODE: split.decode, Role.UNIFIED: split.unified}
    counts[from_role] -= 1
    counts[to_role] += 1
    return Split(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], unified=counts[Role.UNIFIED])


class Weighted(msgspec.Struct, frozen=True):
    """A demand and how much it counts."""

    demand: Demand
    weight: float


def ways(
    split: Split, demands: Sequence[Weighted], fleet: Fleet, corrections: Corrections, least: Split
) -> tuple[Prediction, list[Way]]:
    """Return what the split would do as it is, and a valued way to every other split worth a thought.

    With several demands, values are weighted means. A target keeps the floors `least` or has no pairs at all; from a
    split below the floors any that is not further below will do. Single moves that break the floors are valued, too,
    and marked.
    """
    predictors = [(Predictor(entry.demand, fleet, corrections), entry.weight) for entry in demands]
    known: dict[Split, Prediction] = {}

    def value(of: Split) -> Prediction:
        if of not in known:
            known[of] = _value(of, predictors)
        return known[of]

    found = []
    for target in _targets(split):
        legal = _keeps(target, split, least)
        if not legal and _distance(split, target) > 1:
            continue
        first = _first_move(split, target, value)
        found.append(
            Way(
                from_role=first[0],
                to_role=first[1],
                next=moved(split, *first),
                target=target,
                steps=_distance(split, target),
                restarts=abs(target.unified - split.unified),
                goodput_rps=value(target).goodput_rps,
                legal=legal,
                last_unified=target.unified < min(least.unified, split.unified),
            )
        )
    return value(split), found


def _targets(split: Split) -> Iterator[Split]:
    """Yield every other split of a small pool; of a large one those along one direction, and all-unified."""
    total = split.total
    if total <= _ALL_SPLITS_UP_TO:
        for prefill in range(total + 1):
            for decode in range(total + 1 - prefill):
                target = Split(prefill=prefill, decode=decode, unified=total - prefill - decode)
                if target != split:
                    yield target
        return
    for from_role in Role:
        for to_role in Role:
            target = split
            for _ in range(_MAX_STEPS):
                if from_role is to_role or not getattr(target, from_role):
                    break
                target = moved(target, from_role, to_role)
                yield target
    if split.unified < total:
        yield Split(unified=total)


def _distance(split: Split, target: Split) -> int:
    return (
        max(0, target.prefill - split.prefill)
        + max(0, target.decode - split.decode)
        + max(0, target.unified - split.unified)
    )


def _first_move(split: Split, target: Split, value: Callable[[Split], Prediction]) -> tuple[Role, Role]:
    """Return the move towards the target after which the pool does best."""
    givers = [role for role in Role if getattr(split, role) > getattr(target, role)]
    takers = [role for role in Role if getattr(split, role) < getattr(target, role)]
    choices = [(giver, taker) for giver in givers for taker in takers]
    if len(choices) == 1:
        return choices[0]
    return max(choices, key=lambda move: value(moved(split, *move)).goodput_rps)


def _keeps(target: Split, before: Split, least: Split) -> bool:
    if not target.prefill and not target.decode:
        return True
    return target.prefill >= min(least.prefill, before.prefill or least.prefill) and target.decode >= min(
        least.decode, before.decode or least.decode
    )


def _value(split: Split, predictors: Sequence[tuple[Predictor, float]]) -> Prediction:
    if len(predictors) == 1:
        return predictors[0][0].predict(split)
    predictions = [(predictor.predict(split), weight) for predictor, weight in predictors]
    total = sum(weight for _, weight in predictions)

    def mean(read: Callable[[Prediction], float]) -> float:
        return sum(read(prediction) * weight for prediction, weight in predictions) / total

    return Prediction(
        goodput_rps=mean(lambda p: p.goodput_rps),
        unified_share=mean(lambda p: p.unified_share),
        prefill_load=mean(lambda p: p.prefill_load),
        decode_load=mean(lambda p: p.decode_load),
        prefill_missed=mean(lambda p: p.prefill_missed),
        decode_missed=mean(lambda p: p.decode_missed),
    )
