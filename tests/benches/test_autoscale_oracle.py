"""The oracle that the autoscaler is held against: it finds the cheapest day that its tables allow."""

import itertools

import pytest

from benches.autoscale_days import MODELS
from benches.autoscale_oracle import SLOT_S, Best, all_splits, schedule_of
from scheduler.policy.queueing import Split


def best(workers: int) -> Best:
    capacity = 1.5 * workers**1.2
    curve = tuple((capacity * factor, share) for factor, share in ((0.6, 1.0), (0.9, 0.98), (1.0, 0.95), (1.3, 0.7)))
    return Best(split=Split(unified=workers), capacity_rps=capacity, curve=curve)


TABLE = [best(workers) for workers in range(1, 9)]


def missed(model, workers, slots):
    rates = [model.rate_rps((slot + 0.5) / slots) for slot in range(slots)]
    misses = sum(r * (1 - TABLE[n - 1].in_time(r)) for r, n in zip(rates, workers, strict=True))
    return misses / sum(rates)


@pytest.mark.parametrize("model", MODELS[:3], ids=lambda model: model.name)
def test_no_day_of_the_tables_that_serves_as_much_has_fewer_worker_hours(model):
    slots = 4
    schedule = schedule_of(model, TABLE, slots * SLOT_S)
    assert schedule.in_time >= 0.95
    assert 1 - missed(model, schedule.workers, slots) == pytest.approx(schedule.in_time)
    days = itertools.product(range(1, len(TABLE) + 1), repeat=slots)
    cheapest = min(sum(day) for day in days if missed(model, day, slots) <= 0.05)
    # A multiplier finds the hull of the choices: less than one worker in one slot above the very best.
    assert cheapest <= sum(schedule.workers) <= cheapest + 1
    assert schedule.hours == pytest.approx(sum(schedule.workers) * SLOT_S / 3600)


def test_more_load_is_never_served_better_and_beyond_the_curve_less_and_less():
    shares = [TABLE[2].in_time(rate / 10) for rate in range(1, 200)]
    assert shares == sorted(shares, reverse=True)
    assert TABLE[2].in_time(2 * TABLE[2].curve[-1][0]) == pytest.approx(0.35)


def test_every_mix_that_can_serve_is_tried():
    assert set(all_splits(2)) == {Split(unified=2), Split(prefill=1, decode=1)}
    assert len(all_splits(3)) == len({*all_splits(3)}) == 4  # 3U; 1P1D1U; 2P1D, 1P2D
