"""Where worker-hours go: the reasons of a day add up to what it took."""

import pytest

from benches.autoscale_days import MODELS
from benches.autoscale_oracle import SLOT_S, Best, schedule_of
from benches.autoscale_surplus import REASONS, Slot, Watched, surplus_of, table_of_hours, table_of_surplus
from contracts.lifecycle import Role
from scheduler.policy.headcount import Member, ScalePlan, WhyScale
from scheduler.policy.queueing import Corrections, Split
from scheduler.simulator.elastic import Seen

SLOTS = 12
DAY_S = SLOTS * SLOT_S


def best(workers: int) -> Best:
    capacity = 1.5 * workers**1.2
    curve = tuple((capacity * factor, share) for factor, share in ((0.6, 1.0), (0.9, 0.98), (1.0, 0.95), (1.3, 0.7)))
    return Best(split=Split(unified=workers), capacity_rps=capacity, curve=curve)


TABLE = [best(workers) for workers in range(1, 9)]


class Told:
    """A scaler that answers with the plans it is given."""

    period_s = 5.0

    def __init__(self, plans):
        self._plans = iter(plans)

    def arrived(self, now_s, sample):
        pass

    def ended(self, stage):
        pass

    def tick(self, now_s, seen):
        return next(self._plans)


def seen(ready, booting=0):
    members = [Member(worker_id=f"w{n}", role=Role.UNIFIED, ready=n < ready) for n in range(ready + booting)]
    return Seen(members=members, sight=None, num_running=0, forecast=None, pressure=Corrections())


def plan(desired, why):
    return ScalePlan(steps=(), why=why, split=Split(), desired=Split(unified=desired), rate_rps=2.0, ahead_rps=2.4)


def test_ticks_are_counted_by_what_was_thought_at_them():
    plans = [plan(2, WhyScale.COOLING_DOWN), plan(5, WhyScale.UNCONFIRMED), plan(3, WhyScale.N_MINUS_1)]
    scaler = Watched(Told(plans))
    scaler.tick(5.0, seen(4))  # two too many, since they were needed lately
    scaler.tick(10.0, seen(4))  # one too few, not confirmed
    scaler.tick(15.0, seen(4, booting=1))  # two too many, one of them still starting
    (slot,) = scaler.slots()
    assert slot.there == pytest.approx((4 + 4 + 5) / 3)
    assert slot.desired == pytest.approx((2 + 5 + 3) / 3)
    assert slot.expected_rps == pytest.approx(2.4)
    assert slot.over == pytest.approx({"starting": 1 / 3, "wait": 2 / 3, "late": -1 / 3, "n_minus_1": 1 / 3})


def test_the_reasons_of_a_day_add_up_to_its_worker_hours_by_day_and_by_hour():
    model = MODELS[0]
    slots = [
        Slot(ticks=60, there=4.5, desired=4.0, expected_rps=2.0 + 0.1 * n, over={"wait": 0.5}) for n in range(SLOTS)
    ]
    (row,) = surplus_of(model, TABLE, slots, day_s=DAY_S, hours=4.6)
    assert set(row) == set(REASONS)
    assert sum(row.values()) == pytest.approx(4.6)
    assert row["oracle"] == pytest.approx(schedule_of(model, TABLE, DAY_S).hours)
    assert row["wait"] == pytest.approx(0.5)
    assert row["leaving"] == pytest.approx(4.6 - 4.5)
    hours = surplus_of(model, TABLE, slots, day_s=DAY_S, hours=4.6, each_hour=True)
    assert sum(sum(of.values()) for of in hours) == pytest.approx(4.5)
    # The first slot of twelve is the first hours of 24: ten after a peak at 14.
    assert hours[int((1 - model.peak_hour) % 24)]["wait"] == pytest.approx(0.5 / 12)
    assert "| in all | 4.6 | 4.6 |" in table_of_surplus({model.name: row})
    assert len(table_of_hours(hours).splitlines()) == 2 + 24
