"""Periodic loops of a process wake together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.beat import beat, to_next_s

SECONDS = st.floats(0, 1e7)


@given(SECONDS, SECONDS, st.sampled_from([1, 2, 5, 10, 20]))
def test_loops_of_different_periods_wake_at_common_moments(one_s, other_s, times):
    tenth_s, longer_s = 0.125, 0.125 * times  # without rounding
    for now_s, period_s in ((one_s, tenth_s), (other_s, longer_s)):
        ends = (now_s + to_next_s(now_s, period_s)) / tenth_s
        assert ends == pytest.approx(round(ends), abs=1e-6)


@given(SECONDS, st.sampled_from([0.1, 0.2, 0.5, 1.0]))
def test_a_beat_is_between_a_half_and_one_and_a_half_periods_away(now_s, period_s):
    assert 0.5 * period_s <= to_next_s(now_s, period_s) <= 1.5 * period_s


async def test_a_beat_comes():
    await beat(0.001)
