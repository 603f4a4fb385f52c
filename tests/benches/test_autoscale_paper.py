"""Days on paper: the autoscaler over tables of what so many workers can do."""

import pytest

from benches.autoscale_days import KINDS, MODELS
from benches.autoscale_oracle import Best
from benches.autoscale_paper import Paper, rates_of, table_of_paper
from benches.autoscale_report import sum_of
from scheduler.policy.demand import Demand
from scheduler.policy.headcount import ScaleLimits, WhyScale
from scheduler.policy.queueing import Split

DEMAND = Demand(
    rate_rps=1.0,
    prefill_ms=800,
    feasible_share=1.0,
    feasible_prefill_ms=800,
    dispersion=2.0,
    prefill_ms_quantiles=(200, 300, 450, 600, 800, 1000, 1300, 1750),
    prompt_tokens=3000,
    output_tokens=250,
    kv_token_steps=800_000,
    kv_token_steps_square=3e9,
    kv_token_ms_before=2_400_000,
    span_s=180,
)
LIMITS = ScaleLimits()
HOUR = 720


def best(workers: int) -> Best:
    """About what the closed forms say of DEMAND, with half of their misses."""
    capacity = 0.35 * workers**1.3
    curve = tuple((capacity * factor, share) for factor, share in ((0.6, 0.999), (0.9, 0.98), (1.0, 0.96), (1.3, 0.85)))
    return Best(split=Split(unified=workers), capacity_rps=capacity, curve=curve)


@pytest.fixture(scope="module")
def paper():
    return Paper(KINDS["documents"], [best(workers) for workers in range(1, 11)], DEMAND, LIMITS)


def test_a_day_on_paper_is_the_same_whenever_its_seed_is(paper):
    rates = rates_of(MODELS[0], HOUR * 5.0, 5.0)
    assert len(rates) == HOUR
    assert max(rates) / min(rates) > MODELS[0].swing
    assert paper.day(rates[:200], seed=3) == paper.day(rates[:200], seed=3)


def test_workers_follow_the_load_and_are_paid_from_their_asking_to_their_going(paper):
    calm = paper.day([0.5] * HOUR, seed=1)
    day = paper.day([0.5] * HOUR + [4.0] * HOUR + [0.5] * HOUR, seed=1)
    assert {event[1] for event in day.events} == {WhyScale.FORECAST, WhyScale.OVERSIZED}
    up = [at_s for at_s, why, _, _ in day.events if why is WhyScale.FORECAST and at_s > 60]
    assert 3600 < up[0] < 3660
    assert day.events[-1][0] > 7200 + LIMITS.down_s(60.0)
    assert day.hours > 3 * calm.hours
    assert day.in_time > 0.9


def test_a_steady_load_keeps_its_workers(paper):
    day = paper.day([2.0] * 2 * HOUR, seed=2)
    assert [event for event in day.events if event[0] > 1800] == []
    assert day.in_time > 0.95


def test_the_table_has_each_model_and_the_sum_of_the_held_out_seeds():
    days = [
        {
            "model": "chat-a",
            "seed": seed,
            "requests": 1000,
            "attainment": share,
            "worker_hours": hours,
            "oracle_hours": 10.0,
            "over_oracle": hours / 10,
            "hours_of_each_slot": 11.0,
            "over_oracle_of_each_slot": round(hours / 11, 3),
            "events_per_5min": 0.2,
        }
        for seed, share, hours in ((101, 0.96, 11.0), (102, 0.97, 12.4))
    ]
    table = table_of_paper({"days": days, "held_out": sum_of(days), "steady": [{"events": 0}, {"events": 1}]})
    assert "| chat-a | 96.0 to 97.0 % | 1.10 to 1.24 | 1.00 to 1.13 | 0.20 |" in table
    assert "| all, held-out seeds (101, 102) | 96.5 % | 1.17 | 1.06 | at most 0.20 |" in table
    assert "1 after half an hour" in table
