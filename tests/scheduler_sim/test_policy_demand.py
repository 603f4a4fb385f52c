"""Demand is measured where it arrives, and cut where it changes."""

import math
import random

import pytest

from scheduler.policy.demand import DemandSample, DemandWindow, OutputMoments


def forecast(kind):
    mean = {"short": 100.0, "long": 1000.0}[kind]
    return OutputMoments(mean, mean * mean)


def feed(window, *, from_s, to_s, rate, prefill_ms=100.0, kind="short", seed=1, prompt=1000):
    rng = random.Random(seed)
    at = from_s
    while True:
        at += rng.expovariate(rate)
        if at >= to_s:
            return
        sample = DemandSample(kind=kind, prompt_tokens=prompt, prefill_ms=prefill_ms, feasible=True)
        window.observe(at, sample)


def test_moments_are_those_of_the_arrivals():
    window = DemandWindow()
    for number in range(100):
        window.observe(
            number / 10, DemandSample(kind="short", prompt_tokens=1000, prefill_ms=50.0, feasible=number % 2 == 0)
        )
    demand = window.demand(10.0, forecast)
    assert demand.rate_rps == pytest.approx(10.0)
    assert demand.prefill_ms == pytest.approx(50.0)
    assert demand.feasible_share == pytest.approx(0.5)
    assert demand.output_tokens == pytest.approx(100.0)
    assert demand.kv_token_steps == pytest.approx(1000 * 100 + 100 * 100 / 2)
    assert demand.kv_token_ms_before == pytest.approx(1000 * 50.0)
    assert demand.prefill_ms_quantiles == (50.0,) * 8


def test_a_steady_poisson_load_raises_no_alarm_in_an_hour():
    window = DemandWindow()
    for minute in range(60):
        feed(window, from_s=60 * minute, to_s=60 * minute + 60, rate=10.0, seed=minute)
        for tick in range(12):
            window.demand(60 * minute + 60 - 5 * (11 - tick), forecast)
    assert list(window.alarms_s) == []


@pytest.mark.parametrize("change", [{"rate": 25.0}, {"prefill_ms": 400.0}, {"kind": "long"}, {"rate": 2.0}])
def test_a_change_of_rate_prompts_or_answers_is_seen_within_seconds_and_cuts_the_window(change):
    window = DemandWindow()
    feed(window, from_s=0, to_s=120, rate=10.0)
    window.demand(120.0, forecast)
    after = {"rate": 10.0, **change}
    demand = None
    for second in range(120, 140):
        feed(window, from_s=second, to_s=second + 1, seed=second, **after)
        demand = window.demand(float(second + 1), forecast)
    assert len(window.alarms_s) == 1
    assert window.alarms_s[0] == pytest.approx(120, abs=4)
    assert demand.rate_rps == pytest.approx(after["rate"], rel=0.35)
    assert window.segments[0].rate_rps == pytest.approx(10.0, rel=0.15)


def test_a_better_forecast_values_the_whole_window_anew_and_is_no_change_of_demand():
    window = DemandWindow()
    feed(window, from_s=0, to_s=60, rate=10.0)
    first = window.demand(60.0, lambda kind: OutputMoments(50.0, 2500.0))
    second = window.demand(61.0, lambda kind: OutputMoments(500.0, 250_000.0))
    assert second.output_tokens == pytest.approx(10 * first.output_tokens)
    assert list(window.alarms_s) == []


def ask(window, *, from_s, to_s, prefill_ms=100.0, answers=()):
    """Ten requests a second of one kind, named by their time; answers end as they are told, in the order of arrival."""
    names = []
    for number in range(from_s * 10, to_s * 10):
        sample = DemandSample(kind="long", prompt_tokens=500, prefill_ms=prefill_ms, feasible=True)
        names.append(("asked", number))
        window.observe(number / 10, sample, names[-1])
    for name, tokens in zip(names, answers, strict=False):
        window.ended(name, tokens)
    return names


def test_answers_that_have_ended_count_as_they_were_and_those_under_way_as_forecast():
    window = DemandWindow()
    ask(window, from_s=0, to_s=40, answers=[400] * 100)
    assert window.demand(40.0, forecast).output_tokens == pytest.approx(0.25 * 400 + 0.75 * 1000)
    assert window.demand(40.0, forecast, as_forecast=True).output_tokens == pytest.approx(1000)
    assert list(window.alarms_s) == []


def test_the_short_answers_that_end_first_say_nothing_about_those_that_arrived_with_them():
    window = DemandWindow()
    names = ask(window, from_s=0, to_s=10)
    for number, name in enumerate(names):  # ten arrive in a second, four of them have ended
        if number % 10 < 4:
            window.ended(name, 100)
    assert window.demand(10.0, forecast).output_tokens == pytest.approx(1000)
    for number, name in enumerate(names):
        if number % 10 == 4:
            window.ended(name, 600)
    assert window.demand(10.0, forecast).output_tokens == pytest.approx((4 * 100 + 600 + 5 * 1000) / 10)


def test_a_remembered_demand_is_valued_by_its_own_answers_and_not_by_those_of_the_next_one():
    window = DemandWindow()
    before = ask(window, from_s=0, to_s=60)
    window.demand(60.0, forecast)
    after = []
    for second in range(60, 80):
        after += ask(window, from_s=second, to_s=second + 1, prefill_ms=400.0)
        window.demand(second + 1.0, forecast)
    assert list(window.alarms_s) == [60.0]
    assert window.segments[0].output_tokens == pytest.approx(1000)  # nothing has ended
    for name in before:
        window.ended(name, 300)
    for name in after:
        window.ended(name, 50)
    window.demand(80.0, forecast)
    cut = window.segments[0]
    assert cut.output_tokens == pytest.approx(300)
    assert cut.kv_token_steps == pytest.approx(500 * 300 + 300 * 300 / 2)
    assert cut.rate_rps == pytest.approx(10.0)


def test_an_answer_that_was_broken_off_says_nothing_about_lengths_and_one_that_nobody_asked_for_is_none():
    window = DemandWindow()
    names = ask(window, from_s=0, to_s=10)
    for number, name in enumerate(names):
        window.ended(name, None if number % 2 else 200)
    window.ended(("never", 1), 9000)
    window.ended(names[0], 9000)  # a second time
    assert window.demand(10.0, forecast).output_tokens == pytest.approx(200)


def test_silence_is_a_reading_and_nothing_measured_is_not():
    window = DemandWindow()
    assert window.demand(100.0, forecast) is None
    feed(window, from_s=101, to_s=110, rate=10.0)
    assert window.demand(1000.0, forecast).rate_rps == 0.0


def test_clustered_arrivals_show_in_the_dispersion():
    calm, bursty = DemandWindow(), DemandWindow(alarm_sigma=1e9)
    feed(calm, from_s=0, to_s=120, rate=10.0)
    for start in range(0, 120, 10):
        feed(bursty, from_s=start, to_s=start + 1, rate=100.0, seed=start)
    assert calm.demand(120.0, forecast).dispersion == pytest.approx(1.2, abs=0.5)
    assert bursty.demand(120.0, forecast).dispersion > 8


@pytest.mark.parametrize("quiet_s", range(1, 40))
def test_arrivals_followed_by_silence_are_a_reading_like_any_other(quiet_s):
    window = DemandWindow()
    for at_s in (0.2, 0.7, 1.1):
        window.observe(at_s, DemandSample(kind="short", prompt_tokens=1000, prefill_ms=100.0, feasible=True))
    demand = window.demand(2.0 + quiet_s, forecast)
    assert demand is not None
    assert demand.rate_rps == pytest.approx(3 / (2 + quiet_s))
    assert math.isfinite(demand.dispersion)
