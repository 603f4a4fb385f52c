"""Failures that other controllers are known for, and ways this one must keep open."""

import msgspec
import pytest

from contracts.lifecycle import HandOff, Role
from contracts.slo import SloTarget
from scheduler.policy.demand import DemandSample, DemandWindow, OutputMoments
from scheduler.policy.growing import GrowingAnswers
from scheduler.policy.offers import offers
from scheduler.policy.queueing import Fleet, Split
from scheduler.policy.ratio import Mode, Why, decide
from scheduler.policy.sight import Donor, RatioLimits, RatioState, Sight
from scheduler.policy.ways import moved
from scheduler.simulator.arrivals import Lengths, Workload, poisson
from scheduler.simulator.play import Policy, play
from scheduler.simulator.setup import H100_8B, Setup

TIGHT = Fleet(latency=H100_8B, target=SloTarget(ttft_ms=2000, tpot_ms=20))
DIRECT = RatioLimits.of(HandOff.DIRECT)


def demand_of(rate: float, *, prompt: int, output: int, seconds: int = 60):
    """Arrivals at even distances, measured as they come."""
    window = DemandWindow()
    prefill_ms = H100_8B.prefill.ms(prompt)
    for number in range(int(rate * seconds)):
        window.observe(
            number / rate, DemandSample(kind="k", prompt_tokens=prompt, prefill_ms=prefill_ms, feasible=True)
        )
    return window.demand(float(seconds), lambda _: OutputMoments(output, output * output))


def sight_of(split: Split, demand, **other) -> Sight:
    donors = [
        Donor(worker_id=f"{role.value}{n}", role=role, drain_s=2.0)
        for role in Role
        for n in range(getattr(split, role))
    ]
    return Sight(**({"split": split, "moving": False, "donors": donors, "demand": demand} | other))


def course(split: Split, demand, fleet: Fleet, ticks: int, state: RatioState = RatioState(), start: int = 0):  # noqa: B008
    """Play ticks under one demand, each move done by the next; return the state and every split on the way."""
    splits = [split]
    for tick in range(start, start + ticks):
        state, decision = decide(
            state, sight_of(split, demand), fleet, DIRECT, mode=Mode.AUTO, now_s=tick * DIRECT.period_s
        )
        if decision.move is not None:
            split = moved(split, decision.move.from_role, decision.move.to_role)
            splits.append(split)
    return state, splits


def test_all_unified_is_reached_when_it_wins_and_left_when_it_does_not():
    answers = demand_of(22.0, prompt=300, output=1500)  # four unified workers serve all, no split with a pair does
    state, splits = course(Split(prefill=1, decode=1, unified=2), answers, TIGHT, 200)
    assert splits[-1] == Split(unified=4)
    prompts = demand_of(18.0, prompt=3000, output=400)  # prompts in the decode steps cost the targets
    _, splits = course(splits[-1], prompts, TIGHT, 200, state, start=200)
    assert splits[-1].prefill >= 1
    assert splits[-1].decode >= 1


def test_a_half_dissolved_pool_goes_on_dissolving_and_any_other_half_pair_is_completed():
    half = sight_of(Split(prefill=1, unified=7), demand_of(10.0, prompt=900, output=100))
    _, back = decide(RatioState(), half, TIGHT, DIRECT, mode=Mode.AUTO, now_s=5.0)
    _, on = decide(RatioState(dissolving=True), half, TIGHT, DIRECT, mode=Mode.AUTO, now_s=5.0)
    assert (back.why, on.why) == (Why.POOL_EMPTY, Why.POOL_EMPTY)
    assert (back.move.from_role, back.move.to_role) == (Role.UNIFIED, Role.DECODE)
    assert (on.move.from_role, on.move.to_role) == (Role.PREFILL, Role.UNIFIED)


@pytest.mark.parametrize("rate", [4.0, 6.0, 8.0, 10.0])
def test_three_workers_at_constant_load_never_swing_between_two_to_one_and_one_to_two(rate):
    _, splits = course(Split(prefill=2, decode=1), demand_of(rate, prompt=4000, output=400), TIGHT, 200)
    assert len(splits) <= 3
    assert len(set(splits)) == len(splits)


def test_demand_is_what_arrives_even_when_nothing_comes_out():
    """A pool that is stuck has no output: measured there, its demand would be zero and nothing would move."""
    demand = demand_of(20.0, prompt=6000, output=100)
    assert demand.rate_rps == pytest.approx(20.0)
    _, splits = course(Split(prefill=2, decode=6), demand, TIGHT, 60)
    assert splits[-1].prefill >= 4


def test_a_burst_that_waits_counts_although_the_mean_rate_is_low():
    demand = demand_of(9.0, prompt=5000, output=100)
    split = Split(prefill=2, decode=6)
    calm, waits = (
        offers(RatioState(), sight_of(split, demand, waiting_in_time=n), demand, TIGHT, DIRECT, 60.0) for n in (0, 120)
    )
    assert waits.now.prefill_load > calm.now.prefill_load + 0.2
    assert waits.best is not None
    assert waits.best.way.target.prefill > split.prefill


def test_both_pools_are_scaled_in_one_run():
    prompts = demand_of(20.0, prompt=6000, output=60)
    answers = demand_of(24.0, prompt=500, output=1800)
    state, splits = course(Split(prefill=4, decode=3, unified=1), prompts, TIGHT, 120)
    assert splits[-1].prefill > 4
    _, later = course(splits[-1], answers, TIGHT, 200, state, start=120)
    assert later[-1].decode + later[-1].unified > splits[-1].decode + splits[-1].unified


def test_answers_under_way_count_before_the_first_has_ended():
    growing = GrowingAnswers()
    for number in range(40):
        growing.started(0.0, number, "k", forecast_tokens=100.0, step_ms=10.0)
    learned = OutputMoments(100.0, 10_000.0)
    growing.look(0.5)
    assert growing.moments("k", learned) == learned  # 50 tokens so far: as forecast
    growing.look(8.0)
    assert growing.moments("k", learned).mean == pytest.approx(1000.0)  # 800 so far, and a quarter more
    for number in range(40):
        growing.ended(number, 900)
    growing.look(9.0)
    assert growing.moments("k", learned).mean == pytest.approx(900.0)
    growing.look(70.0)
    assert growing.moments("k", learned) == learned
    assert len(growing) == 0


def test_overload_costs_what_is_too_much_and_not_the_rest():
    """At 1.3 times what the prefill workers can compute, 1/1.3 could be in time; one turn in 16 goes to late ones."""
    load = Workload(prompt=Lengths(median=6000), output=Lengths(median=20), rate_rps=1.0)
    per_worker_rps = 1000 / H100_8B.prefill.ms(6000)
    load = msgspec.structs.replace(load, rate_rps=2 * per_worker_rps * 1.3)
    setup = Setup(split=Split(prefill=2, decode=2), target=TIGHT.target)
    result, _ = play(list(poisson(load, duration_s=120, seed=1)), setup, Policy.STATIC)
    assert result.attainment_total == pytest.approx(1 / 1.3 * 15 / 16, abs=0.07)
