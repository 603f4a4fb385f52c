"""Since when load is the same, and whom that keeps."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.lifecycle import Role
from contracts.perf import DEFAULT_LATENCY
from contracts.slo import SloTarget
from scheduler.policy.arrivals import ArrivalTrend, RateForecast
from scheduler.policy.demand import Demand
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
)
from scheduler.policy.mixes import Mix, Mixes
from scheduler.policy.plateau import Plateau, plateau_of
from scheduler.policy.queueing import Corrections, Fleet, Split
from scheduler.policy.scaling import scale

LIMITS = ScaleLimits()
BAND = LIMITS.plateau_band
BOUNDS = Bounds(max_workers=20, to_zero=False)
FLEET = Fleet(latency=DEFAULT_LATENCY, target=SloTarget(ttft_ms=4000, tpot_ms=60))
BOOT_S = 60.0
HOUR_S = 3600.0


def seen_rate(now_rps, *, error_rps=0.02):
    return RateForecast(now_rps=now_rps, ahead_rps=now_rps, error_rps=error_rps, span_s=1800.0)


def walk(rates, *, every_s=60.0):
    """Return the plateaus along some rates, one a minute."""
    found, plateau = [], None
    for minute, rate in enumerate(rates):
        plateau = plateau_of(plateau, rate, minute * every_s, band=BAND)
        found.append(plateau)
    return found


# -- the rate ----------------------------------------------------------------------------------------------------


def test_a_rate_that_stays_within_a_tenth_is_the_same_and_one_that_leaves_it_begins_anew():
    *_, same, gone = walk([seen_rate(r) for r in (2.0, 2.1, 1.9, 2.15, 1.85, 1.7)])
    assert same == Plateau(rate_rps=2.0, error_rps=0.02, since_s=0.0)
    assert gone == Plateau(rate_rps=1.7, error_rps=0.02, since_s=300.0)
    assert gone.age_s(420.0) == 120.0


def test_a_slow_change_is_one_too():
    plateaus = walk([seen_rate(2.0 + 0.01 * minute) for minute in range(120)])
    ages_s = [plateau.age_s(60.0 * minute) for minute, plateau in enumerate(plateaus)]
    assert max(ages_s) <= 60 * 40
    assert len({plateau.since_s for plateau in plateaus}) >= 4


def test_what_chance_explains_is_no_change():
    *_, plateau = walk([seen_rate(2.0), seen_rate(2.7, error_rps=0.2)])
    assert plateau.since_s == 0.0
    *_, plateau = walk([seen_rate(2.0), seen_rate(3.0, error_rps=0.2)])
    assert plateau.since_s == 60.0


def test_a_longer_look_corrects_the_rate_and_not_the_time():
    *_, plateau = walk([seen_rate(1.6, error_rps=0.4), seen_rate(2.05), seen_rate(2.2)])
    assert plateau == Plateau(rate_rps=2.05, error_rps=0.02, since_s=0.0)


def test_without_a_rate_there_is_no_plateau():
    assert walk([seen_rate(2.0), None])[-1] is None


def test_silence_is_a_rate_and_the_end_of_another():
    *_, silent, still = walk([seen_rate(2.0), seen_rate(0.0, error_rps=0.01), seen_rate(0.0, error_rps=0.01)])
    assert silent.since_s == still.since_s == 60.0


@pytest.mark.parametrize("rate_rps", [0.5, 3.0])
def test_chance_ends_no_plateau_in_hours_and_a_fall_by_a_third_does_within_minutes(rate_rps):
    rng, trend, plateau, next_s, since = random.Random(5), ArrivalTrend(), None, 0.0, {}
    for tick in range(2, 5 * 720 + 240, 2):
        now_s = 5.0 * tick
        while next_s <= now_s:
            trend.observe(next_s)
            next_s += rng.expovariate(rate_rps if now_s < 5 * HOUR_S else rate_rps / 1.5)
        plateau = plateau_of(plateau, trend.forecast(now_s, ahead_s=90.0), now_s, band=BAND)
        since[now_s] = plateau.since_s if plateau is not None else now_s
    assert since[5 * HOUR_S] < 1200
    assert since[max(since)] > 5 * HOUR_S


@given(
    rates=st.lists(st.floats(0, 50), min_size=1, max_size=40),
    errors=st.lists(st.floats(0, 5), min_size=40, max_size=40),
)
def test_a_plateau_begins_when_its_rate_was_first_seen_and_lies_in_no_future(rates, errors):
    found = walk([seen_rate(r, error_rps=e) for r, e in zip(rates, errors, strict=False)])
    for minute, plateau in enumerate(found):
        assert 0 <= plateau.since_s <= 60.0 * minute
        before = found[minute - 1] if minute else None
        if before is not None and plateau.since_s == before.since_s:
            assert plateau == before or plateau.error_rps < before.error_rps
        else:
            assert plateau == Plateau(rate_rps=rates[minute], error_rps=errors[minute], since_s=60.0 * minute)


@given(boot_s=st.floats(0, 1000), plateau_s=st.floats(0, 1e6))
def test_the_window_is_never_shorter_than_without_a_plateau_and_has_an_end(boot_s, plateau_s):
    window_s = LIMITS.window_s(boot_s, plateau_s)
    assert LIMITS.down_s(boot_s) <= window_s <= max(LIMITS.down_s(boot_s), LIMITS.plateau_most_s)
    assert window_s >= LIMITS.window_s(boot_s, plateau_s / 2)


# -- the workers -------------------------------------------------------------------------------------------------


class Needing(Mixes):
    """Says that so many workers are needed, whatever is asked of them."""

    def __init__(self, need, short=0.92):
        """`short`: what too few would do; by itself not too few to be, but too few to remain."""
        self._need = need
        self._short = short

    def in_time(self, split):
        return self._of(split.total)

    def best(self, total):
        return Mix(split=Split(unified=total), in_time=self._of(total))

    def _of(self, total):
        return 0.99 if total >= self._need else self._short


def ticks(needs, *, rates=None, workers=5, every_s=60.0, state=None):
    """Play what was needed, minute by minute; return the workers of each minute, and the reasons."""
    state, counts, whys = state or ScaleState(last_up_s=-HOUR_S), [], []
    for minute, need in enumerate(needs):
        rate = seen_rate(rates[minute] if rates else 2.0)
        sight = ScaleSight(
            members=[Member(worker_id=f"w{n}", role=Role.UNIFIED, ready=True) for n in range(workers)],
            ground=Ground(free={"": 20}),
            demand=msgspec.structs.replace(DEMAND, rate_rps=rate.now_rps),
            rate=rate,
            num_running=1,
            boot_s=BOOT_S,
        )
        state, plan = scale(
            state, sight, BOUNDS, FLEET, LIMITS, minute * every_s, valued=lambda *_, need=need: Needing(need)
        )
        workers += sum(isinstance(step, Start) for step in plan.steps)
        workers -= sum(isinstance(step, Stop) for step in plan.steps)
        counts.append(workers)
        whys.append(plan.why)
    return counts, whys


DEMAND = Demand(
    rate_rps=2.0,
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


def test_under_the_same_load_a_worker_that_was_needed_a_while_ago_stays():
    """Needed each twenty minutes of four hours: between, four minutes without need are nothing new."""
    counts, whys = ticks([5] * 30 + [5 if minute % 20 == 0 else 4 for minute in range(30, 240)])
    assert set(counts) == {5}
    assert whys[230] is WhyScale.CONSTANT_LOAD


def test_a_load_that_has_fallen_is_another_and_the_worker_goes_as_soon_as_it_has_lasted():
    needs = [5] * 180 + [4] * 20
    rates = [2.0] * 180 + [1.6] * 20
    counts, whys = ticks(needs, rates=rates)
    assert counts[183] == 5
    assert counts[185] == 4  # four starts' length after the last need
    assert whys.count(WhyScale.OVERSIZED) == 1


def test_under_the_same_load_fewer_must_have_been_enough_for_half_the_time_since_it_is_the_same():
    counts, whys = ticks([5] * 60 + [4] * 120)
    went = next(minute for minute, count in enumerate(counts) if count == 4)
    assert went == 119  # an hour of need, and an hour without
    assert set(whys[70:went]) == {WhyScale.CONSTANT_LOAD}


def starts_after(rate, *, backlog_rps=0.0, constant_s=3600.0):
    """Return after how many ticks of a need that is far from met workers are started, 20 at most."""
    now_s = 10_000.0
    state = ScaleState(plateau=Plateau(rate_rps=2.0, error_rps=0.03, since_s=now_s - constant_s))
    for tick in range(1, 21):
        sight = ScaleSight(
            members=[Member(worker_id=f"w{n}", role=Role.UNIFIED, ready=True) for n in range(5)],
            ground=Ground(free={"": 20}),
            demand=DEMAND,
            rate=rate,
            corrections=Corrections(backlog_rps=backlog_rps),
            num_running=1,
        )
        state, plan = scale(
            state, sight, BOUNDS, FLEET, LIMITS, now_s, valued=lambda *_: Needing(7, short=LIMITS.sure_goal - 0.1)
        )
        now_s += LIMITS.period_s
        if plan.steps:
            assert len(plan.steps) == 2
            return tick
        assert plan.why is WhyScale.UNCONFIRMED
    return None


def test_a_burst_that_chance_may_have_made_starts_nobody_until_it_has_lasted():
    """2.9/s seen for a minute or two, give or take 0.3, may still be 2.0/s."""
    burst = seen_rate(2.9, error_rps=0.3)
    assert starts_after(burst) == LIMITS.same_ticks
    assert starts_after(burst, backlog_rps=1.0) == 1  # somebody waits for them
    assert starts_after(seen_rate(2.9, error_rps=0.1)) == 1  # that is no chance
    assert starts_after(burst, constant_s=60.0) == 1  # load was not the same for long enough to know it


def test_a_pool_finds_its_size_quickly_where_load_has_just_come():
    counts, _ = ticks([3] * 30, workers=6)
    assert counts[-1] == 3


@settings(max_examples=25, deadline=None)
@given(needed=st.lists(st.booleans(), min_size=120, max_size=240), workers=st.integers(5, 7))
def test_nobody_goes_who_was_needed_in_the_later_half_of_the_time_since_load_is_the_same(needed, workers):
    needs = [5 if need else 4 for need in needed]
    counts, _ = ticks(needs, workers=workers)
    for minute in range(1, len(counts)):
        if counts[minute] < counts[minute - 1]:
            half = needs[(minute + 1) // 2 : minute + 1]
            assert counts[minute] >= max(half)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_longer_load_is_the_same_the_rarer_are_the_steps_that_chance_makes(seed):
    """A pool that needs the fifth worker in a tenth of the minutes, by chance: no waves over hours."""
    rng = random.Random(seed)
    counts, _ = ticks([5 if rng.random() < 0.1 else 4 for _ in range(720)])
    steps = [minute for minute in range(1, 720) if counts[minute] != counts[minute - 1]]
    assert len([minute for minute in steps if minute > 240]) == 0
    assert len(steps) <= 2
