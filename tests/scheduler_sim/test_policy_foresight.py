"""What is made of foreseen misses: learned from those that happen."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.blame import Stage
from scheduler.policy.foresight import Belief, Foresight, ForesightLimits, Outcomes
from scheduler.policy.headcount import ScaleLimits

LIMITS = ForesightLimits()


def learned(hours, *, begin=None, period_s=5.0):
    """Play (foreseen share, share that misses for lack of workers, requests a tick, ticks), one after the other."""
    foresight, now_s = begin or Foresight(at_s=0.0), 0.0
    for foreseen, short, ended, ticks in hours:
        owed = 0.0
        for _ in range(ticks):
            now_s += period_s
            owed += short * ended
            missed, owed = int(owed), owed - int(owed)
            foresight = msgspec.structs.replace(foresight, last=foreseen)
            foresight = foresight.after(Outcomes(ended=ended, missed=missed, short=missed), now_s, LIMITS)
    return foresight


def test_who_has_seen_nothing_believes_the_closed_forms():
    belief = Foresight().belief(LIMITS)
    assert belief.factor == pytest.approx(1.0)
    assert belief.floor == pytest.approx(0.003)
    assert Belief().in_time(0.1) == pytest.approx(0.9)


def test_misses_that_happen_half_as_often_as_foreseen_are_believed_half_as_often():
    foresight = learned([(0.04, 0.02, 50, 300), (0.12, 0.06, 50, 300)])
    belief = foresight.belief(LIMITS)
    assert belief.factor == pytest.approx(0.5, abs=0.03)
    assert belief.floor < 0.002
    assert 1 - belief.in_time(0.1) == pytest.approx(0.05, abs=0.003)


def test_misses_of_a_quiet_night_are_a_floor_and_make_nothing_worse_that_is_foreseen_of_a_full_pool():
    """One in a hundred misses where next to none were foreseen: ten times as many, and no word about a full pool."""
    belief = learned([(0.001, 0.01, 20, 3000)]).belief(LIMITS)
    assert belief.factor == pytest.approx(1.0, abs=0.05)
    assert belief.floor == pytest.approx(0.009, abs=0.002)


def test_a_few_requests_teach_little_and_an_hour_of_them_is_forgotten_in_some_hours():
    few = learned([(0.1, 0.0, 10, 4)]).belief(LIMITS)
    assert 0.6 < few.factor < 1.0
    luck = learned([(0.1, 0.04, 50, 720)])
    assert luck.belief(LIMITS).factor == pytest.approx(0.4, abs=0.05)
    later = learned([(0.1, 0.1, 50, 4 * 720)], begin=luck)
    assert later.belief(LIMITS).factor == pytest.approx(0.96, abs=0.06)


def test_silence_is_no_reason_to_forget():
    luck = learned([(0.1, 0.05, 50, 720)])
    assert luck.after(Outcomes(), 1e6, LIMITS).belief(LIMITS) == luck.belief(LIMITS)


def test_what_is_learned_stays_within_bounds():
    assert learned([(0.1, 0.0, 50, 720)]).belief(LIMITS).factor == LIMITS.factor_bounds[0]
    assert learned([(0.05, 0.5, 50, 720)]).belief(LIMITS).factor == LIMITS.factor_bounds[1]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 500), st.integers(1, 20)), max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_belief_keeps_shares_and_the_order_of_what_was_foreseen(hours, one, other):
    belief = learned(hours).belief(LIMITS)
    low, high = min(one, other), max(one, other)
    assert 0.0 <= belief.in_time(high) <= belief.in_time(low) <= 1.0


def test_only_lack_of_workers_is_held_against_what_was_foreseen_and_every_miss_against_the_target():
    outcomes = Outcomes()
    for stage in (Stage.NONE, Stage.PREFILL_QUEUE, Stage.DECODE_MEMORY, Stage.GATEWAY, Stage.STRUCTURAL, None):
        outcomes = outcomes.and_one(stage)
    assert outcomes == Outcomes(ended=6, missed=5, short=3, structural=1)


def test_the_goal_rises_to_the_aim_as_what_was_attained_falls_to_the_target():
    limits = ScaleLimits()

    def goal(missed):
        return limits.goal_of(Foresight(ended=1e6, missed=1e6 * missed))

    assert goal(0.01) == limits.goal
    assert goal(1 - limits.target - limits.spare / 2) == pytest.approx((limits.goal + limits.aim) / 2, abs=0.002)
    assert goal(0.2) == limits.aim >= limits.target
