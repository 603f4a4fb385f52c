"""The closed form: textbook values by hand, invariants, and agreement with an event-driven referee."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import attained, simulate_split, simulate_unified

from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.slo import SloTarget
from pdgate.plan.described import Description, sample
from pdgate.plan.fit import fitted
from pdgate.plan.fleet import Setting, workers_of
from pdgate.plan.hardware import accelerators
from pdgate.plan.models import find_model
from pdgate.plan.options import best, capacity_rps, load_of
from pdgate.plan.pools import decode_capacity_rps, decode_step_ms, split_outcome
from pdgate.plan.queueing import NONE, Wait, Waits, erlang_c, quantile_of_sum, wait
from pdgate.plan.shapes import Kind, split_shapes, unified_shapes
from pdgate.plan.traffic import DecodeMoments, Traffics, decode_moments, dispersion
from pdgate.plan.unified import unified_outcome
from pdgate.plan.workload import Request, workload_of


def latency(d0=6.0, d1=0.0, d2=0.0, a=0.0, b=1.0, kv=10**9):
    return LatencyModel(
        prefill=PrefillCost(fixed_ms=a, per_token_ms=b),
        decode=DecodeCost(fixed_ms=d0, per_request_ms=d1, per_kv_token_ms=d2),
        transfer=TransferCost(fixed_ms=0.0, bytes_per_ms=1e12, kv_bytes_per_token=1),
        kv_capacity_tokens=kv,
        max_running=10**6,
    )


@pytest.mark.parametrize(
    ("servers", "load", "expected"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (5, 4.0, 0.5541), (10, 8.0, 0.4092)]
)
def test_erlang_c_has_its_textbook_values(servers, load, expected):
    assert erlang_c(servers, load) == pytest.approx(expected, abs=1e-4)


def test_one_server_waits_as_pollaczek_and_khinchine_say():
    # M/G/1 at load 0.5 with service 100 ms: rho*S/(1-rho)*(1+C^2)/2
    for squared_cv in (0.0, 1.0, 1.72):
        found = wait(servers=1, rate_rps=5, mean_service_ms=100, service_squared_cv=squared_cv, dispersion=1)
        assert found.mean_ms == pytest.approx(100 * (1 + squared_cv) / 2)


def test_deterministic_service_understates_the_wait_of_public_prompts_by_1_9_to_2_7_times():
    def mean_wait(squared_cv):
        return wait(servers=1, rate_rps=5, mean_service_ms=100, service_squared_cv=squared_cv, dispersion=1).mean_ms

    assert mean_wait(0.92) / mean_wait(0) == pytest.approx(1.9, abs=0.05)
    assert mean_wait(1.72) / mean_wait(0) == pytest.approx(2.7, abs=0.05)


def test_an_overloaded_pool_never_answers_in_time():
    found = wait(servers=2, rate_rps=21, mean_service_ms=100, service_squared_cv=1, dispersion=1)
    both = Waits(first=found, second=NONE)
    assert both.within_all([1e9]) == 0
    assert math.isinf(quantile_of_sum([1.0], both, 0.5))


def test_quantiles_of_a_sum_invert_its_distribution():
    found = wait(servers=1, rate_rps=5, mean_service_ms=100, service_squared_cv=1, dispersion=1)
    # M/M/1 with a constant added: P(W > t) = 0.5*exp(-t/200), so P95 = 200*ln(10)
    only = Waits(first=found, second=NONE)
    assert quantile_of_sum([30.0], only, 0.95) == pytest.approx(30 + 200 * math.log(10), rel=1e-6)


@pytest.mark.parametrize("means", [(100.0, 40.0), (40.0, 100.0), (60.0, 60.0)])
def test_two_waits_in_a_row_add_up(means):
    """Against a plain simulation of the sum."""
    rng = random.Random(2)
    first, second = (Wait(delayed=d, mean_delay_ms=m) for d, m in zip((0.6, 0.3), means, strict=True))
    drawn = [
        sum(rng.expovariate(1 / w.mean_delay_ms) if rng.random() < w.delayed else 0.0 for w in (first, second))
        for _ in range(40_000)
    ]
    for limit in (0.0, 20.0, 90.0, 300.0):
        seen = sum(value <= limit for value in drawn) / len(drawn)
        assert Waits(first=first, second=second).within_all([limit]) == pytest.approx(seen, abs=0.01)


def test_the_limit_for_large_pools_meets_the_recursion():
    for load in (45.0, 55.0, 58.0):
        assert erlang_c(61, load * 61 / 60) == pytest.approx(erlang_c(60, load), abs=0.02)
    assert erlang_c(5000, 100.0) == 0.0


MOMENTS = DecodeMoments(o=100, o_squared=0, kv=100 * 1000 + 5000, kv_squared=0, prompt=1100)


def test_decode_capacity_is_the_design_formula_when_time_binds():
    worker = latency(d0=6, d1=0.02, d2=4e-6)
    work = 0.02 * 100 + 4e-6 * 105_000
    assert decode_capacity_rps(worker, MOMENTS, 20) == pytest.approx((1 - 6 / 20) / work * 1000)
    assert decode_step_ms(worker, MOMENTS, (1 - 6 / 20) / work * 1000) == pytest.approx(20)


def test_decode_capacity_fills_the_memory_exactly_when_memory_binds():
    worker = latency(d0=6, d1=0.02, d2=4e-6, kv=200_000)
    rate = decode_capacity_rps(worker, MOMENTS, 20)
    step = decode_step_ms(worker, MOMENTS, rate)
    assert step < 20
    assert rate / 1000 * step * 105_000 == pytest.approx(200_000)


def test_a_step_slower_than_the_target_alone_has_no_capacity():
    assert decode_capacity_rps(latency(d0=25), MOMENTS, 20) == 0


@pytest.mark.parametrize(("tau", "pays"), [(60, False), (10, True)])
def test_a_tight_tpot_favours_the_split_and_a_loose_one_unified(tau, pays):
    """The law: a split pays only if the prefill load that TTFT allows exceeds (1 - d0/tau)/kappa."""
    worker = latency(d0=6, d1=0.005, d2=1e-7, b=0.1)
    load = sample(Description(rate_rps=10, prompt_tokens=4000, output_tokens=40, prompt_cv=1.0, sample=2000))
    target = SloTarget(ttft_ms=4000, tpot_ms=tau)
    traffic = Traffics(load, target).whole(0)

    def highest(attainment):
        low, high = 0.0, 100.0
        for _ in range(30):
            rate = (low + high) / 2
            low, high = (rate, high) if attainment(traffic.at(rate)) >= 0.9 else (low, rate)
        return low

    def split(moved):
        return max(
            split_outcome(
                prefill=worker, decode=worker, num_prefill=p, num_decode=8 - p, traffic=moved, target=target, layers=32
            ).attainment
            for p in range(1, 8)
        )

    def unified(moved):
        return unified_outcome(latency=worker, num_workers=8, traffic=moved, target=target, mixing=1.0).attainment

    assert (highest(split) > highest(unified)) == pays


def setting_of(load, *, model="llama-3-70b", weights="fp8", ttft_ms=1000.0, tpot_ms=30.0, network=""):
    return Setting(
        shape=find_model(model).shape,
        fit=fitted(),
        weights=weights,
        kv="bf16",
        engine="vllm",
        target=SloTarget(ttft_ms=ttft_ms, tpot_ms=tpot_ms),
        moments=decode_moments(load),
        network=network,
    )


CASES = [
    (Description(rate_rps=10, prompt_tokens=1155, output_tokens=211, prompt_cv=0.96, output_cv=0.77), {}),
    (
        Description(rate_rps=10, prompt_tokens=4000, output_tokens=300, prompt_cv=1.2, output_cv=0.8),
        {"model": "llama-3-8b", "weights": "bf16", "tpot_ms": 20.0},
    ),
    (
        Description(rate_rps=10, prompt_tokens=2000, output_tokens=100, arrival_cv=2.0),
        {"model": "qwen3-32b", "ttft_ms": 2000.0, "tpot_ms": 40.0},
    ),
    (
        Description(rate_rps=10, prompt_tokens=800, output_tokens=1200),
        {"model": "llama-3-8b", "weights": "bf16", "ttft_ms": 500.0, "tpot_ms": 15.0},
    ),
]


@pytest.mark.parametrize(("described", "asked"), CASES)
@pytest.mark.parametrize("kind", [Kind.UNIFIED, Kind.SPLIT_NO_REUSE])
def test_the_closed_form_agrees_with_the_referee(described, asked, kind):
    """At nine tenths of its capacity a fleet keeps the targets in both; at five quarters in neither."""
    load = sample(described)
    setting = setting_of(load, **asked)
    traffics = Traffics(load, setting.target)
    workers = workers_of(accelerators()["H100"], 8, setting)
    shapes = unified_shapes(workers, 8) if kind is Kind.UNIFIED else split_shapes(kind, workers, workers, 8)
    shape, capacity = best(shapes, traffics, setting)

    def seen(rate):
        requests = [(r.arrival_s * 1000, r.prompt_tokens, r.output_tokens) for r in load.at_rate(rate).requests]
        if kind is Kind.UNIFIED:
            step = load_of(shape, rate, traffics, setting).unified.step
            budget = min(step.mixed_ms, setting.target.tpot_ms)
            found = simulate_unified(requests, shape.unified_worker.latency, shape.unified, budget, setting.mixing)
        else:
            found = simulate_split(
                requests,
                shape.prefill_worker.latency,
                shape.decode_worker.latency,
                shape.prefill,
                shape.decode,
                setting.shape.layers,
                setting.target.tpot_ms,
            )
        return attained(found, setting.target.ttft_ms, setting.target.tpot_ms)

    assert load_of(shape, capacity, traffics, setting).attainment == pytest.approx(0.9, abs=0.01)
    assert seen(0.9 * capacity) >= 0.9
    assert seen(1.25 * capacity) < 0.5
    assert seen(0.7 * capacity) == pytest.approx(load_of(shape, 0.7 * capacity, traffics, setting).attainment, abs=0.02)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.2, 3), st.floats(1.05, 1.5))
def test_more_load_never_helps(rate, more):
    load = sample(Description(rate_rps=1, prompt_tokens=2000, output_tokens=200, sample=400))
    setting = setting_of(load)
    traffics = Traffics(load, setting.target)
    workers = workers_of(accelerators()["H100"], 8, setting)
    for shape in (*unified_shapes(workers, 8), *list(split_shapes(Kind.SPLIT, workers, workers, 8))[:3]):
        less = load_of(shape, rate, traffics, setting).attainment
        assert load_of(shape, rate * more, traffics, setting).attainment <= less + 1e-9


def test_more_gpus_never_serve_less():
    load = sample(Description(rate_rps=1, prompt_tokens=2000, output_tokens=200, sample=400))
    setting = setting_of(load)
    traffics = Traffics(load, setting.target)
    previous = 0.0
    for gpus in (4, 8, 16, 32):
        workers = workers_of(accelerators()["H100"], gpus, setting)
        _, capacity = best(split_shapes(Kind.SPLIT, workers, workers, gpus), traffics, setting)
        assert capacity >= previous
        previous = capacity


def test_transfer_time_hardly_moves_the_best_split_until_the_link_is_the_bottleneck():
    load = sample(Description(rate_rps=1, prompt_tokens=4000, output_tokens=200, sample=400))

    def chosen(network):
        setting = setting_of(load, ttft_ms=2000, network=network)
        traffics = Traffics(load, setting.target)
        workers = workers_of(accelerators()["H100"], 8, setting)
        return best(split_shapes(Kind.SPLIT, workers, workers, 8), traffics, setting)

    (fast, fast_rps), (slow, slow_rps) = chosen("nvlink"), chosen("200Gb")
    assert (fast.prefill, fast.decode) == (slow.prefill, slow.decode)
    assert slow_rps == pytest.approx(fast_rps, rel=0.05)
    starved = chosen("1Gb")
    assert starved is None or starved[1] < 0.2 * fast_rps


def test_a_shape_that_fails_at_once_has_no_capacity():
    load = sample(Description(rate_rps=1, prompt_tokens=2000, output_tokens=200, sample=400))
    setting = setting_of(load, ttft_ms=1.0)
    traffics = Traffics(load, setting.target)
    workers = workers_of(accelerators()["H100"], 8, setting)
    assert best(split_shapes(Kind.SPLIT, workers, workers, 8), traffics, setting) is None
    assert capacity_rps(next(unified_shapes(workers, 8)), traffics, setting) == 0


def test_poisson_arrivals_have_a_dispersion_of_one_and_batched_ones_their_batch_size():
    steady = sample(Description(rate_rps=10, prompt_tokens=100, output_tokens=10))
    assert dispersion(steady, 0.5) == pytest.approx(1, abs=0.2)
    fours = workload_of(
        [
            Request(arrival_s=r.arrival_s, prompt_tokens=1, output_tokens=1)
            for r in sample(Description(rate_rps=1, prompt_tokens=100, output_tokens=10, sample=2000)).requests
            for _ in range(4)
        ],
        name="fours",
    )
    assert dispersion(fours, 5.0) == pytest.approx(4, abs=0.8)
