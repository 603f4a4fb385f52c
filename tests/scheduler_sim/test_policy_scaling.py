"""How many workers of which role: what the autoscaler answers, tick by tick."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.lifecycle import Role
from contracts.perf import DEFAULT_LATENCY, DecodeCost, PrefillCost
from contracts.slo import SloTarget
from scheduler.policy.arrivals import ArrivalTrend, RateForecast
from scheduler.policy.demand import Demand
from scheduler.policy.foresight import Foresight, Outcomes
from scheduler.policy.headcount import (
    Bounds,
    Ground,
    Member,
    ScaleLimits,
    ScaleSight,
    ScaleState,
    Start,
    Stop,
    WhyScale,
    serves,
    split_of,
)
from scheduler.policy.mixes import Mixes
from scheduler.policy.queueing import Corrections, Fleet, Split
from scheduler.policy.scaling import scale

FLEET = Fleet(
    latency=msgspec.structs.replace(
        DEFAULT_LATENCY,
        prefill=PrefillCost(fixed_ms=20, per_token_ms=0.25),
        decode=DecodeCost(fixed_ms=20, per_request_ms=0.2, per_kv_token_ms=2e-4),
        kv_capacity_tokens=200_000,
    ),
    target=SloTarget(ttft_ms=4000, tpot_ms=60),
)
LIMITS = ScaleLimits()
BOUNDS = Bounds(max_workers=20)
ROOM = Ground(free={"": 30}, per_hour=2)


def demand(rate_rps):
    return Demand(
        rate_rps=rate_rps,
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


def members(prefill=0, decode=0, unified=0, *, ready=True, **more):
    counts = ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.UNIFIED, unified))
    return [
        Member(worker_id=f"{role}-{number}", role=role, ready=ready, **more)
        for role, count in counts
        for number in range(count)
    ]


def seen(there, rate_rps=None, *, ahead_rps=None, **more):
    rate = None
    if rate_rps is not None:
        rate = RateForecast(
            now_rps=rate_rps, ahead_rps=rate_rps if ahead_rps is None else ahead_rps, error_rps=0.02, span_s=900
        )
    given_ = {"members": there, "ground": ROOM, "demand": demand(rate_rps) if rate_rps else None, "rate": rate, **more}
    return ScaleSight(**given_)


def one(sight, state=None, bounds=BOUNDS, now_s=10_000.0, limits=LIMITS):
    return scale(state or ScaleState(), sight, bounds, FLEET, limits, now_s)


def settled(sight, bounds=BOUNDS, *, ticks=100, start_s=0.0, state=None):
    """Tick for `ticks` periods with nothing changing; return the last plan."""
    state, plans = state or ScaleState(), []
    for tick in range(ticks):
        state, plan = scale(state, sight, bounds, FLEET, LIMITS, start_s + tick * LIMITS.period_s)
        plans.append(plan)
        if plan.steps:
            break
    return plans[-1]


def starts(plan):
    return [step.role for step in plan.steps if isinstance(step, Start)]


# -- asleep and waking ---------------------------------------------------------------------------------------


def test_a_pool_without_workers_and_without_requests_sleeps():
    _, plan = one(seen([], quiet_s=10))
    assert plan.why is WhyScale.ASLEEP
    assert plan.steps == ()
    assert plan.desired == Split()


def test_the_first_request_starts_one_unified_worker_and_no_more_until_it_serves():
    state, plan = one(seen([], num_waiting=1))
    assert starts(plan) == [Role.UNIFIED]
    assert plan.steps[0].why is WhyScale.COLD_START
    _, plan = one(seen(members(unified=1, ready=False), num_waiting=3), state)
    assert plan.why is WhyScale.BOOTING
    assert plan.steps == ()


def test_the_pair_follows_once_the_first_worker_serves():
    bounds = Bounds(max_workers=3, floor=Split(prefill=1, decode=1))
    _, plan = one(seen(members(unified=1), num_running=1), bounds=bounds)
    assert sorted(starts(plan)) == [Role.DECODE, Role.PREFILL]
    assert {step.why for step in plan.steps} == {WhyScale.FLOOR}


def test_an_idle_pool_goes_to_zero_in_all_roles_together_and_not_a_tick_earlier():
    there = members(prefill=1, decode=1, unified=1)
    bounds = Bounds(max_workers=3, idle_s=300, floor=Split(prefill=1, decode=1))
    _, plan = one(seen(there, quiet_s=299), ScaleState(last_up_s=9_900.0), bounds=bounds)
    assert plan.steps == ()
    _, plan = one(seen(there, quiet_s=300), bounds=bounds)
    assert {step.worker_id for step in plan.steps if isinstance(step, Stop)} == {m.worker_id for m in there}
    assert {step.why for step in plan.steps} == {WhyScale.IDLE}


def test_a_pool_that_may_not_sleep_keeps_its_floors_when_idle():
    bounds = Bounds(max_workers=3, to_zero=False, floor=Split(prefill=1, decode=1))
    assert settled(seen(members(prefill=1, decode=1), 0.0, quiet_s=1e6), bounds).steps == ()
    _, plan = one(seen([], quiet_s=1e6), bounds=bounds)
    assert starts(plan) == [Role.UNIFIED]  # first somebody who can serve alone


def test_workers_that_others_started_are_never_stopped():
    there = members(unified=1, ours=False)
    _, plan = one(seen(there, quiet_s=1e6))
    assert plan.steps == ()


# -- up ----------------------------------------------------------------------------------------------------------


def test_too_few_workers_are_joined_at_once_by_as_many_as_it_takes_after_it_was_confirmed():
    state, plans = ScaleState(), []
    for tick in range(LIMITS.confirm_ticks):
        state, plan = one(seen(members(prefill=3, decode=1), 3.3), state, now_s=10_000 + 5 * tick)
        plans.append(plan)
    assert [plan.why for plan in plans[:-1]] == [WhyScale.UNCONFIRMED] * (LIMITS.confirm_ticks - 1)
    assert plans[-1].why is WhyScale.FORECAST
    assert plans[-1].desired.total == 4 + len(plans[-1].steps)


def test_hopelessly_few_need_no_second_look():
    _, plan = one(seen(members(prefill=1, decode=1), 4.0))
    assert plan.why is WhyScale.FORECAST
    assert len(starts(plan)) >= 3


def test_what_will_arrive_when_a_new_worker_serves_counts_as_if_it_arrived_now():
    there = members(prefill=4, decode=2)
    assert settled(seen(there, 3.8)).steps == ()
    assert settled(seen(there, 3.8, ahead_rps=7.0)).why is WhyScale.FORECAST


def test_a_backlog_is_a_reason_of_its_own():
    plan = settled(seen(members(prefill=4, decode=2), 3.8, corrections=Corrections(backlog_rps=2.5), num_waiting=150))
    assert plan.why is WhyScale.BACKLOG
    assert starts(plan)


def test_misses_beyond_what_the_model_expects_are_a_reason_of_their_own():
    calm = seen(members(prefill=4, decode=2), 3.8)
    assert settled(calm).steps == ()
    plan = settled(msgspec.structs.replace(calm, corrections=Corrections(prefill=1.6)))
    assert plan.why is WhyScale.SLO_PRESSURE
    assert starts(plan)


def test_a_change_of_roles_that_would_do_is_left_to_the_ratio_controller_for_a_while():
    """One prefill and five decode workers cannot do what four and two can."""
    state, plan = one(seen(members(prefill=1, decode=5), 2.0))
    assert plan.why is WhyScale.FLIP_CHEAPER
    assert plan.steps == ()
    late_s = 10_000 + LIMITS.flip_patience_s + 1
    for tick in range(LIMITS.confirm_ticks):
        state, plan = one(seen(members(prefill=1, decode=5), 2.0), state, now_s=late_s + 5 * tick)
    assert Role.PREFILL in starts(plan)


def test_workers_on_their_way_are_counted_and_not_asked_for_again():
    there = [*members(prefill=2, decode=1), *members(prefill=4, decode=2, ready=False)[2:]]
    assert settled(seen(there, 2.0)).steps == ()


# -- bounds ------------------------------------------------------------------------------------------------------


def test_the_operators_maximum_the_budget_and_the_room_cut_starts_short_and_say_so():
    crowd = seen(members(prefill=1, decode=1), 4.0)
    _, plan = one(crowd, bounds=Bounds(max_workers=4))
    assert len(plan.steps) == 2
    assert settled(seen(members(prefill=2, decode=2), 4.0), Bounds(max_workers=4)).why is WhyScale.AT_MAX
    _, plan = one(crowd, bounds=Bounds(max_workers=20, budget_per_hour=7))  # 2 an hour each: three of them
    assert len(plan.steps) == 1
    _, plan = one(msgspec.structs.replace(crowd, ground=Ground(free={"": 2}, per_hour=2)))
    assert len(plan.steps) == 2
    assert plan.why is WhyScale.NO_ROOM


def test_prefill_and_decode_of_a_pair_go_to_one_zone():
    ground = Ground(free={"a": 1, "b": 4})
    bounds = Bounds(max_workers=4, floor=Split(prefill=1, decode=1))
    there = members(unified=1, zone="a")
    _, plan = one(seen(there, num_running=1, ground=ground), bounds=bounds)
    assert {step.zone for step in plan.steps} == {"b"}
    lonely = [*members(decode=1, zone="a"), *members(unified=1, zone="b")]
    _, plan = one(seen(lonely, num_running=1, ground=ground), bounds=bounds)
    assert [(step.role, step.zone) for step in plan.steps] == [(Role.PREFILL, "a")]


def test_spot_capacity_serves_what_is_above_the_floors_and_is_left_before_it_is_taken():
    ground = Ground(free={"": 30}, free_spot={"": 30}, per_hour=2, spot_per_hour=1)
    bounds = Bounds(max_workers=20, floor=Split(prefill=1, decode=1), spot_share=0.5)
    _, plan = one(seen(members(prefill=1, decode=1), 4.0, ground=ground), bounds=bounds)
    num_spot = sum(step.spot for step in plan.steps)
    assert 0 < num_spot <= len(plan.steps) / 2
    there = [*members(prefill=3, decode=2), Member(worker_id="s", role=Role.PREFILL, ready=True, reclaimed=True)]
    _, plan = one(seen(there, 3.6))
    assert [step.worker_id for step in plan.steps if isinstance(step, Stop)] == ["s"]
    assert plan.split == Split(prefill=3, decode=2)  # who is going does not count


# -- down --------------------------------------------------------------------------------------------------------


def test_a_surplus_goes_only_after_it_has_lasted_and_nothing_was_started():
    there, state, whys = members(prefill=8, decode=4), ScaleState(last_up_s=0.0), []
    for tick in range(200):
        state, plan = scale(state, seen(there, 1.0), BOUNDS, FLEET, LIMITS, tick * 5.0)
        whys.append(plan.why)
        if plan.steps:
            break
    assert plan.why is WhyScale.OVERSIZED
    assert tick * 5.0 >= LIMITS.down_s(60.0)
    assert set(whys[:-1]) == {WhyScale.COOLING_DOWN}
    assert 1 <= len(plan.steps) <= 12 * LIMITS.down_share


def test_a_need_of_lately_keeps_workers_although_the_present_does_not():
    state, there = ScaleState(), members(prefill=5, decode=3)
    state, plan = scale(state, seen(there, 6.1), BOUNDS, FLEET, LIMITS, 0.0)
    assert plan.steps == ()
    for tick in range(1, int(LIMITS.down_s(60.0) / 5)):
        state, plan = scale(state, seen(there, 1.0), BOUNDS, FLEET, LIMITS, tick * 5.0)
        assert plan.steps == ()


def test_nobody_leaves_whom_the_rest_would_miss():
    """At 3.8 requests/s the closed forms give four prefill and two decode workers 97 % in time, and no five."""
    assert settled(seen(members(prefill=4, decode=2), 3.8)).steps == ()


def test_the_worker_that_costs_least_to_drain_goes_first():
    there = [
        msgspec.structs.replace(m, drain_s=60.0 if m.worker_id.endswith("0") else 5.0)
        for m in members(prefill=6, decode=3)
    ]
    plan = settled(seen(there, 1.0))
    assert plan.steps
    assert not any(step.worker_id.endswith("0") for step in plan.steps)


@settings(max_examples=60, deadline=None)
@given(
    prefill=st.integers(0, 6),
    decode=st.integers(0, 6),
    unified=st.integers(0, 3),
    rate_rps=st.floats(0.0, 8.0),
    ahead=st.floats(0.2, 3.0),
    most=st.integers(1, 12),
    waiting=st.integers(0, 50),
    free=st.integers(0, 6),
    late_s=st.floats(0, 5000),
)
def test_no_step_breaks_a_bound(prefill, decode, unified, rate_rps, ahead, most, waiting, free, late_s):
    there = members(prefill=prefill, decode=decode, unified=unified)
    sight = seen(
        there, rate_rps, ahead_rps=rate_rps * ahead, num_waiting=waiting, num_running=1, ground=Ground(free={"": free})
    )
    bounds, state, now_s = Bounds(max_workers=most), ScaleState(last_up_s=0.0), late_s
    for _ in range(4):
        state, plan = scale(state, sight, bounds, FLEET, LIMITS, now_s)
        now_s += 5
        begun, ended = starts(plan), [s.worker_id for s in plan.steps if isinstance(s, Stop)]
        assert not (begun and ended)
        assert len(begun) <= free
        assert not begun or len(there) + len(begun) <= most
        left = split_of([m for m in there if m.worker_id not in ended])
        assert serves(left) or not serves(split_of(there))


# -- what is learned -----------------------------------------------------------------------------------------------


def test_a_pool_whose_foreseen_misses_do_not_happen_does_with_fewer_workers():
    lucky = Foresight(ended=9_000, missed=150, possible=9_000, short=150, foreseen=500, square=40, product=16)
    there = members(prefill=4, decode=2)
    careful, learned_ = (settled(seen(there, 3.4), state=ScaleState(foresight=f)) for f in (Foresight(), lucky))
    assert careful.steps == ()
    assert [type(step) for step in learned_.steps] == [Stop]
    assert learned_.why is WhyScale.OVERSIZED
    assert learned_.belief.factor < careful.belief.factor == 1.0


def test_a_pool_that_has_missed_its_target_lately_is_given_more_before_it_misses_more():
    there = members(prefill=4, decode=2)
    owing = ScaleState(foresight=Foresight(ended=50_000, missed=3_500))
    calm = settled(seen(there, 4.4))
    assert calm.steps == ()
    assert LIMITS.goal < calm.in_time < LIMITS.aim
    plan = settled(seen(there, 4.4), state=owing)
    assert plan.why is WhyScale.FORECAST
    assert starts(plan)


def test_where_less_is_coming_a_worker_goes_before_the_rest_is_good_enough_and_where_it_stays_none_does():
    """At 4.4 requests/s four prefill and two decode workers promise 92 % in time, halfway from goal to aim 90."""
    there = members(prefill=5, decode=2)
    assert settled(seen(there, 4.4)).steps == ()
    falling = settled(seen(there, 4.4, ahead_rps=4.35))
    assert [(type(step), step.role) for step in falling.steps] == [(Stop, Role.PREFILL)]
    owing = ScaleState(foresight=Foresight(ended=50_000, missed=3_500))
    assert settled(seen(there, 4.4, ahead_rps=4.35), state=owing).steps == ()  # while the target is missed, nobody goes


def test_fewest_is_cheapest_from_the_other_end():
    for rate_rps in (0.5, 1.7, 3.1, 4.4):
        mixes = Mixes(demand(rate_rps), FLEET, Corrections(), Split())
        for goal in (0.9, 0.95):
            assert mixes.fewest(goal, of=8) == mixes.cheapest(goal, at_most=8)
    assert Mixes(demand(9.0), FLEET, Corrections(), Split()).fewest(0.95, of=3).split.total == 3  # none does


def test_what_was_foreseen_for_those_who_serve_is_held_against_what_became_of_the_requests():
    there = [*members(prefill=3, decode=1), *members(prefill=6, decode=3, ready=False)[3:]]
    state, _ = one(seen(there, 3.6))
    serving = Mixes(demand(3.6), FLEET, Corrections(), Split()).in_time(Split(prefill=3, decode=1))
    assert state.foresight.last == pytest.approx(1 - serving)
    state, plan = one(seen(there, 3.6, outcomes=Outcomes(ended=100, missed=9, short=8)), state, now_s=10_005.0)
    assert state.foresight.product == pytest.approx(8 * (1 - serving))
    assert plan.attained == pytest.approx(1 - (9 + 16) / 500)


# -- arrivals ----------------------------------------------------------------------------------------------------


def arrivals(trend, *, rate, from_s, to_s):
    """Observe evenly spaced arrivals of a rate that is a function of time."""
    at_s, due = from_s, 0.0
    while at_s < to_s:
        due += rate(at_s) * 0.1
        while due >= 1:
            trend.observe(at_s)
            due -= 1
        at_s += 0.1


def test_a_steady_rate_is_seen_as_steady_and_known_the_better_the_longer():
    trend = ArrivalTrend()
    arrivals(trend, rate=lambda _: 2.0, from_s=0, to_s=120)
    short = trend.forecast(120, ahead_s=90)
    arrivals(trend, rate=lambda _: 2.0, from_s=120, to_s=1800)
    long = trend.forecast(1800, ahead_s=90)
    assert abs(long.now_rps - 2.0) < 0.05
    assert long.ahead_rps == long.now_rps
    assert long.error_rps < short.error_rps


def test_a_rising_rate_is_seen_to_rise_further():
    trend = ArrivalTrend()
    arrivals(trend, rate=lambda t: 1 + t / 600, from_s=0, to_s=1200)  # 3 a second at the end, 0.1 more a minute
    got = trend.forecast(1200, ahead_s=120)
    assert abs(got.now_rps - 3.0) < 0.25
    assert 3.05 < got.ahead_rps < 3.35


def test_a_jump_is_believed_within_half_a_minute():
    trend = ArrivalTrend()
    arrivals(trend, rate=lambda _: 1.0, from_s=0, to_s=1200)
    arrivals(trend, rate=lambda _: 5.0, from_s=1200, to_s=1240)
    assert trend.forecast(1240, ahead_s=0).now_rps > 3.0


def test_silence_is_a_reading():
    trend = ArrivalTrend()
    arrivals(trend, rate=lambda _: 2.0, from_s=0, to_s=600)
    assert trend.forecast(720, ahead_s=60).now_rps < 0.2
    assert trend.forecast(10_000, ahead_s=60).now_rps == 0.0
