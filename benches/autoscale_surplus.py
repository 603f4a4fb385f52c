"""Where the autoscaler's worker-hours go beyond the oracle's: what benches.autoscale prints by reason.

Each five minutes of a day are counted up from the oracle's workers to those that were there; every step up is a reason,
and the steps of the day add up to its worker-hours:

    oracle          the cheapest schedule that owes 95 % over the day
    each_slot       to owe 95 % in each five minutes instead: nobody who lives in the day knows when missing is cheapest
    aim             to be chosen, a mix must promise more than 95 %
    forecast        the rate that is expected, with its doubt, instead of the one that was
    closed_forms    what the policy thinks it needs at that rate, less what its simulated best mix needs
    wait            more than is needed by now, since it was needed lately (steady, cooling_down, constant_load)
    n_minus_1       fewer would do, but not without the one who would go
    roles           other roles at the same number would do, or a worker changes its role
    starting        asked for, and not serving yet
    late            less than is needed, since nobody has confirmed it or nobody serves yet (below zero)
    other           every other reason
    leaving         drained, and not gone yet
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benches.autoscale_days import Model
from benches.autoscale_oracle import GOAL, SLOT_S, Best, schedule_of
from scheduler.policy.blame import Stage
from scheduler.policy.demand import DemandSample
from scheduler.policy.headcount import ScaleLimits, ScalePlan, WhyScale
from scheduler.simulator.elastic import Scaler, Seen

AIM = ScaleLimits().aim
REASONS = (
    "oracle",
    "each_slot",
    "aim",
    "forecast",
    "closed_forms",
    "wait",
    "n_minus_1",
    "roles",
    "starting",
    "late",
    "other",
    "leaving",
)
_OF_WHY = {
    WhyScale.STEADY: "wait",
    WhyScale.COOLING_DOWN: "wait",
    WhyScale.CONSTANT_LOAD: "wait",
    WhyScale.OVERSIZED: "wait",
    WhyScale.N_MINUS_1: "n_minus_1",
    WhyScale.FLIP_CHEAPER: "roles",
    WhyScale.FLIPPING: "roles",
    WhyScale.BOOTING: "wait",
}


class Slot(msgspec.Struct, kw_only=True):
    """Five minutes, in means over their ticks."""

    ticks: int = 0
    there: float = 0.0
    """Workers that serve or are on their way."""
    desired: float = 0.0
    """Workers that the policy thought it needed."""
    expected_rps: float = 0.0
    """The highest rate that it expected."""
    attained: float = 0.0
    """What it had attained lately, 0 to 1."""
    factor: float = 0.0
    """What it multiplied foreseen misses by."""
    over: dict[str, float] = {}
    """Workers beyond the desired ones, by reason."""


class Watched:
    """A scaler whose ticks are summed up."""

    def __init__(self, inner: Scaler) -> None:
        self.period_s = inner.period_s
        self._inner = inner
        self._slots: dict[int, Slot] = {}

    def arrived(self, now_s: float, sample: DemandSample) -> None:
        """Pass it on."""
        self._inner.arrived(now_s, sample)

    def ended(self, stage: Stage | None) -> None:
        """Pass it on."""
        self._inner.ended(stage)

    def tick(self, now_s: float, seen: Seen) -> ScalePlan:
        """Ask, and count."""
        plan = self._inner.tick(now_s, seen)
        slot = self._slots.setdefault(int(now_s / SLOT_S), Slot())
        slot.ticks += 1
        there, desired = len(seen.members), plan.desired.total
        slot.there += there
        slot.desired += desired
        slot.expected_rps += max(plan.rate_rps or 0.0, plan.ahead_rps or 0.0)
        slot.attained += plan.attained or 0.0
        slot.factor += plan.belief.factor
        starting = min(max(0, there - desired), sum(not m.ready for m in seen.members))
        over = there - desired - starting
        name = "late" if over < 0 else _OF_WHY.get(plan.why, "other")
        slot.over["starting"] = slot.over.get("starting", 0.0) + starting
        slot.over[name] = slot.over.get(name, 0.0) + over
        return plan

    def slots(self) -> list[Slot]:
        """Return the means, slot by slot."""
        last = max(self._slots, default=-1)
        return [_mean(self._slots.get(number, Slot())) for number in range(last + 1)]


def _mean(slot: Slot) -> Slot:
    by = max(1, slot.ticks)
    return Slot(
        ticks=slot.ticks,
        there=slot.there / by,
        desired=slot.desired / by,
        expected_rps=slot.expected_rps / by,
        attained=slot.attained / by,
        factor=slot.factor / by,
        over={name: value / by for name, value in slot.over.items()},
    )


def surplus_of(
    model: Model, table: Sequence[Best], slots: Sequence[Slot], *, day_s: float, hours: float, each_hour: bool = False
) -> list[dict[str, float]]:
    """Return worker-hours by reason: of the whole day, or of each of its 24 hours, without those who leave.

    Hours are counted from the model's peak, so that those of several models can be summed.
    """
    count = round(day_s / SLOT_S)
    schedule = schedule_of(model, table, day_s)
    rows = [dict.fromkeys(REASONS, 0.0) for _ in range(24 if each_hour else 1)]
    counted = 0.0
    for number, slot in enumerate(slots[:count]):
        row = rows[int((24 * (number + 0.5) / count - model.peak_hour) % 24) if each_hour else 0]
        rate = model.rate_rps((number + 0.5) / count)
        steps = {
            "oracle": float(schedule.workers[number]),
            "each_slot": float(_needed(table, rate, GOAL)),
            "aim": float(_needed(table, rate, AIM)),
            "forecast": float(_needed(table, slot.expected_rps, AIM)),
            "closed_forms": slot.desired,
        }
        before = 0.0
        for name, workers in steps.items():
            row[name] += (workers - before) * SLOT_S / 3600
            before = workers
        for name, workers in slot.over.items():
            row[name] += workers * SLOT_S / 3600
        counted += slot.there * SLOT_S / 3600
    if not each_hour:
        rows[0]["leaving"] = hours - counted
    return rows


def _needed(table: Sequence[Best], rate_rps: float, share: float) -> int:
    """Return how many workers serve a rate well enough by the oracle's table."""
    enough = (number for number, best in enumerate(table, start=1) if best.in_time(rate_rps) >= share)
    return next(enough, len(table))


def table_of_surplus(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return worker-hours by reason as a table: a column for each model, and their sum over the oracle's."""
    lines = [
        f"| Worker-hours | {' | '.join(rows)} | all | over the oracle's |",
        "|---|" + "---|" * (len(rows) + 2),
    ]
    total: Counter[str] = Counter()
    for row in rows.values():
        total.update(row)
    for name in REASONS:
        cells = " | ".join(f"{row[name]:.1f}" for row in rows.values())
        share = total[name] / total["oracle"] if total["oracle"] else 0.0
        lines.append(f"| {name} | {cells} | {total[name]:.1f} | {share:+.3f} |")
    whole = sum(total.values())
    cells = " | ".join(f"{sum(row.values()):.1f}" for row in rows.values())
    lines.append(f"| in all | {cells} | {whole:.1f} | {whole / total['oracle'] if total['oracle'] else 0.0:.3f} |")
    return "\n".join(lines)


def table_of_hours(rows: Sequence[Mapping[str, float]]) -> str:
    """Return worker-hours by reason, a row for each hour from the peak on."""
    lines = [f"| Hours after the peak | {' | '.join(REASONS[:-1])} |", "|---|" + "---|" * (len(REASONS) - 1)]
    for hour, row in enumerate(rows):
        lines.append(f"| {hour} | {' | '.join(f'{row[name]:.2f}' for name in REASONS[:-1])} |")
    return "\n".join(lines)


def rounded(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row for the file of results."""
    return {name: round(value, 2) for name, value in row.items()}
