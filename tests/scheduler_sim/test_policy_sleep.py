"""Workers sleep before they go, and wake before others are started."""

import msgspec
from test_policy_scaling import BOUNDS, FLEET, LIMITS, members, one, seen, starts

from contracts.lifecycle import Role
from scheduler.policy.headcount import Bounds, Ground, Lull, ScaleState, Stop, Wake, WhyScale
from scheduler.policy.scaling import scale

SLEEPY = msgspec.structs.replace(BOUNDS, idle_s=300.0, sleep_s=900.0)


def taken(plan, kind):
    return [step.worker_id for step in plan.steps if isinstance(step, kind)]


def test_after_the_idle_time_those_who_can_sleep_do_and_the_others_go():
    there = [*members(prefill=1, decode=1, sleeps=True), *members(unified=1)]
    _, plan = one(seen(there, quiet_s=300), bounds=SLEEPY)
    assert plan.why is WhyScale.IDLE
    assert taken(plan, Lull) == ["prefill-0", "decode-0"]
    assert taken(plan, Stop) == ["unified-0"]


def test_without_sleep_in_the_bounds_all_go():
    _, plan = one(seen(members(unified=2, sleeps=True), quiet_s=300))
    assert taken(plan, Stop) == ["unified-0", "unified-1"]


def test_who_sleeps_is_left_asleep_until_the_time_is_over():
    asleep = members(unified=2, ready=False, sleeps=True)
    _, plan = one(seen([], asleep=asleep, quiet_s=1199), bounds=SLEEPY)
    assert (plan.why, plan.steps) == (WhyScale.ASLEEP, ())
    _, plan = one(seen([], asleep=asleep, quiet_s=1200), bounds=SLEEPY)
    assert plan.why is WhyScale.IDLE
    assert taken(plan, Stop) == ["unified-0", "unified-1"]


def test_a_request_wakes_one_and_starts_none():
    asleep = members(prefill=1, decode=1, unified=1, ready=False, sleeps=True)
    _, plan = one(seen([], asleep=asleep, num_waiting=1, ground=Ground(free={"": 0})), bounds=SLEEPY)
    assert taken(plan, Wake) == ["unified-0"]
    assert starts(plan) == []
    assert plan.why is WhyScale.COLD_START


def test_where_only_a_pair_sleeps_both_of_it_wake():
    asleep = members(prefill=2, decode=1, ready=False, sleeps=True)
    _, plan = one(seen([], asleep=asleep, num_waiting=1), bounds=SLEEPY)
    assert taken(plan, Wake) == ["prefill-0", "decode-0"]


def test_the_floors_wake_before_they_start():
    bounds = Bounds(max_workers=4, floor=msgspec.structs.replace(SLEEPY.floor, prefill=1, decode=1), sleep_s=900)
    asleep = members(decode=1, ready=False, sleeps=True)
    _, plan = one(seen(members(unified=1), asleep=asleep, num_running=1), bounds=bounds)
    assert taken(plan, Wake) == ["decode-0"]
    assert starts(plan) == [Role.PREFILL]


def test_one_of_an_old_launch_is_not_woken_but_stopped():
    asleep = members(unified=1, ready=False, sleeps=True, old=True)
    _, plan = scale(ScaleState(), seen([], asleep=asleep, num_waiting=1), SLEEPY, FLEET, LIMITS, 10_000.0)
    assert taken(plan, Stop) == ["unified-0"]
    assert taken(plan, Wake) == []
