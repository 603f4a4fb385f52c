"""Predicted goodput: known values, sane shape, and agreement with the simulator on the order of splits."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.slo import SloTarget
from scheduler.policy.bursts import in_time_of_course
from scheduler.policy.demand import Demand, DemandWindow
from scheduler.policy.queueing import (
    Corrections,
    Fleet,
    Split,
    erlang_c,
    predict,
    prefill_in_time,
)
from scheduler.simulator.arrivals import Lengths, Workload, poisson
from scheduler.simulator.pilot import StaticPilot
from scheduler.simulator.play import result_of
from scheduler.simulator.setup import H100_8B, Setup
from scheduler.simulator.simulation import Simulation

TARGET = SloTarget(ttft_ms=2000, tpot_ms=20)
FLEET = Fleet(latency=H100_8B, target=TARGET)
DEMAND = Demand(
    rate_rps=20.0,
    prefill_ms=150.0,
    feasible_share=1.0,
    feasible_prefill_ms=150.0,
    dispersion=2.0,
    prefill_ms_quantiles=(30.0, 60.0, 90.0, 120.0, 150.0, 190.0, 240.0, 320.0),
    prompt_tokens=4000.0,
    output_tokens=200.0,
    kv_token_steps=820_000.0,
    kv_token_steps_square=3.4e9,
    kv_token_ms_before=900_000.0,
    span_s=60.0,
)


@pytest.mark.parametrize(
    ("servers", "offered", "expected"),
    # One server: its load. Two servers at one erlang: 1/3. Ten at eight: 0.4092 (tables of Erlang C).
    [(1, 0.5, 0.5), (1, 0.0, 0.0), (2, 1.0, 1 / 3), (10, 8.0, 0.4092), (3, 3.0, 1.0), (500, 400.0, 0.0)],
)
def test_erlang_c_has_the_values_of_the_tables(servers, offered, expected):
    assert erlang_c(servers, offered) == pytest.approx(expected, abs=1e-3)


def test_one_server_with_poisson_arrivals_waits_as_m_m_1():
    # P(wait > x) = rho * exp(-(1 - rho) * x / S) for exponential service, where the dispersion is 2.
    got = prefill_in_time((1e-6,), load=0.8, feasible_load=0.8, servers=1, spread_ms=2 * 100.0, ttft_ms=500.0)
    assert got == pytest.approx(1 - 0.8 * math.exp(-0.2 * 500 / 100))


@pytest.mark.parametrize("servers", [1, 2, 5, 9])
def test_more_load_is_never_in_time_for_more_of_the_prompts_and_overload_gives_up_the_longest(servers):
    """A pool at 95 to 100 % of its load once promised less than one at 105 %."""
    own_ms = (285.0, 420.0, 554.0, 690.0, 843.0, 1068.0, 1343.0, 2272.0)
    shares = [
        prefill_in_time(
            own_ms,
            load=hundredth / 100,
            feasible_load=hundredth / 100,
            servers=servers,
            spread_ms=1910.0,
            ttft_ms=4000.0,
            besides_ms=50.0,
        )
        for hundredth in range(40, 300)
    ]
    assert max(after - before for before, after in itertools.pairwise(shares)) < 0.002
    # Twice the load: the five shortest eighths are half of the work, and a worker that is just full is late for some.
    assert 3 / 8 < shares[200 - 40] < 6.2 / 8


def test_a_burst_that_fits_in_the_slack_costs_nothing_and_a_longer_one_costs_its_excess():
    quiet = ((1, 100.0),) * 10
    assert in_time_of_course((*quiet, (10, 2500.0), *quiet), servers=1.0, slack_ms=1500.0) == 1.0
    # 5 s of work at one server with 1.5 s of slack: 5 - 1 (served in its second) - 1.5 = 2.5 of 5 are late.
    assert in_time_of_course(((10, 5000.0),), servers=1.0, slack_ms=1500.0) == pytest.approx(0.5)
    assert in_time_of_course((), servers=1.0, slack_ms=0.0) == 1.0


def test_of_an_overloaded_second_the_longest_prompts_are_given_up_first_if_the_order_can_tell_them_apart():
    # Ten prompts, 5,000 ms in all; 2,500 ms can be in time. Two of 1,500 ms and a part of the next make up the rest.
    own_ms = (100.0, 100.0, 100.0, 100.0, 100.0, 300.0, 500.0, 700.0, 1500.0, 1500.0)
    in_time = in_time_of_course(((10, 5000.0),), servers=1.0, slack_ms=1500.0, own_ms=own_ms)
    assert in_time == pytest.approx(1 - (2500 / 1500) / 10)
    # The same in a hundredth of the size: beside the slack all are short, and chance decides.
    short = in_time_of_course(((1000, 5000.0),), servers=1.0, slack_ms=1500.0, own_ms=[ms / 100 for ms in own_ms])
    assert short == pytest.approx(1 - 0.5 + 0.02 * (0.5 - (2500 / 1500) / 10))


@given(
    rate=st.floats(0, 500),
    prefill=st.integers(0, 12),
    decode=st.integers(0, 12),
    unified=st.integers(0, 12),
    gain=st.floats(0.7, 1.6),
    feasible=st.booleans(),
)
def test_predictions_are_finite_and_never_above_the_demand(rate, prefill, decode, unified, gain, feasible):
    demand = msgspec.structs.replace(
        DEMAND,
        rate_rps=rate,
        prefill_ms_quantiles=DEMAND.prefill_ms_quantiles if feasible else (),
        feasible_share=1.0 if feasible else 0.0,
    )
    got = predict(
        Split(prefill=prefill, decode=decode, unified=unified), demand, FLEET, Corrections(prefill=gain, decode=gain)
    )
    assert 0 <= got.goodput_rps <= rate + 1e-9
    assert all(math.isfinite(getattr(got, field)) for field in got.__struct_fields__)


@given(rate=st.floats(1, 120), prefill=st.integers(1, 8), decode=st.integers(1, 8))
def test_more_workers_never_predict_less(rate, prefill, decode):
    demand = msgspec.structs.replace(DEMAND, rate_rps=rate)

    def goodput(p: int, d: int) -> float:
        return predict(Split(prefill=p, decode=d), demand, FLEET, Corrections()).goodput_rps

    assert goodput(prefill + 1, decode) >= goodput(prefill, decode) - 1e-6
    assert goodput(prefill, decode + 1) >= goodput(prefill, decode) - 1e-6


def test_without_targets_only_capacity_counts():
    open_fleet = Fleet(latency=H100_8B, target=SloTarget())
    got = predict(Split(prefill=4, decode=4), DEMAND, open_fleet, Corrections())
    assert got.goodput_rps == pytest.approx(DEMAND.rate_rps, rel=0.05)


class Recorder(StaticPilot):
    """Measures the demand of a whole run."""

    def __init__(self) -> None:
        self.window = DemandWindow(span_s=10_000, alarm_sigma=1e9)

    def arrived(self, now_s, request, sample):
        self.window.observe(now_s, sample)


@pytest.mark.parametrize(
    ("prompt", "output", "rate"),
    [(5000, 100, 20.0), (500, 1000, 30.0), (2500, 400, 24.0)],
    ids=["prefill-heavy", "decode-heavy", "balanced"],
)
def test_the_split_predicted_best_is_near_the_best_simulated(prompt, output, rate):
    load = Workload(
        prompt=Lengths(median=prompt, p90_over_median=2.0), output=Lengths(median=output, p90_over_median=2.0),
        rate_rps=rate,
    )  # fmt: skip
    arrivals = list(poisson(load, duration_s=90, seed=1))
    simulated, predicted = {}, {}
    for prefill in range(2, 7):
        split = Split(prefill=prefill, decode=8 - prefill)
        pilot = Recorder()
        simulation = Simulation(Setup(split=split, target=TARGET), pilot)
        simulation.run(arrivals)
        simulated[prefill] = result_of(simulation).attainment_total
        demand = pilot.window.demand(90, simulation.router.moments)
        assert demand is not None
        predicted[prefill] = predict(split, demand, FLEET, Corrections()).goodput_rps
    chosen = max(predicted, key=lambda p: predicted[p])
    assert simulated[chosen] >= max(simulated.values()) - 0.03
