"""Latency coefficients learned from measurements."""

import random

import msgspec
import pytest

from contracts.perf import DEFAULT_LATENCY, DecodeCost, LatencyModel, PrefillCost
from scheduler.policy.fit import LatencyFit

TRUTH = msgspec.structs.replace(
    DEFAULT_LATENCY,
    prefill=PrefillCost(fixed_ms=9.0, per_token_ms=0.02, per_token_pair_ms=8.8e-7),
    decode=DecodeCost(fixed_ms=8.0, per_request_ms=0.05, per_kv_token_ms=4.5e-5),
)


def feed(fit: LatencyFit, truth: LatencyModel, *, number: int = 300, seed: int = 1) -> LatencyFit:
    rng = random.Random(seed)
    for _ in range(number):
        n, h = rng.randint(50, 16_000), rng.choice((0, 0, 2000))
        noise = rng.uniform(0.95, 1.05)
        fit.prompt(uncached_tokens=n, cached_tokens=h, compute_ms=truth.prefill.ms(n, h) * noise)
        batch, kv = rng.randint(1, 128), rng.randint(1000, 300_000)
        fit.step(num_requests=batch, kv_tokens=kv, step_ms=truth.decode.step_ms(batch, kv) * noise)
    return fit


def errors(model: LatencyModel, truth: LatencyModel) -> list[float]:
    got = []
    for n in (100, 1000, 4000, 12_000):
        got.append(abs(model.prefill.ms(n) / truth.prefill.ms(n) - 1))
        got.append(abs(model.decode.step_ms(n // 100, n * 20) / truth.decode.step_ms(n // 100, n * 20) - 1))
    return got


def test_measurements_move_a_stated_prior_to_the_truth_within_its_bounds():
    model = feed(LatencyFit(DEFAULT_LATENCY, stated=True), TRUTH).model
    assert max(errors(model, TRUTH)) < 0.05


def test_a_stated_prior_is_left_by_half_at_most():
    far = msgspec.structs.replace(TRUTH, prefill=PrefillCost(fixed_ms=900.0, per_token_ms=2.0, per_token_pair_ms=1e-4))
    prior, model = DEFAULT_LATENCY.prefill, feed(LatencyFit(DEFAULT_LATENCY, stated=True), far).model.prefill
    assert model.per_token_ms == pytest.approx(1.5 * prior.per_token_ms)
    assert model.per_token_pair_ms == pytest.approx(1.5 * prior.per_token_pair_ms)


def test_an_assumed_prior_is_left_as_far_as_measured():
    cpu = msgspec.structs.replace(
        TRUTH,
        prefill=PrefillCost(fixed_ms=30.0, per_token_ms=1.2),
        decode=DecodeCost(fixed_ms=45.0, per_request_ms=2.0),
    )
    model = feed(LatencyFit(DEFAULT_LATENCY, stated=False), cpu, number=60).model
    assert max(errors(model, cpu)) < 0.25


@pytest.mark.parametrize("stated", [True, False])
def test_hours_of_prompts_of_one_length_leave_what_is_known_of_the_others(stated):
    fit = feed(LatencyFit(DEFAULT_LATENCY, stated=stated), TRUTH)
    rng = random.Random(2)
    for _ in range(5000):
        ms = TRUTH.prefill.ms(8192) * rng.uniform(0.95, 1.05)
        fit.prompt(uncached_tokens=8192, cached_tokens=0, compute_ms=ms)
        step_ms = TRUTH.decode.step_ms(32, 80_000) * rng.uniform(0.95, 1.05)
        fit.step(num_requests=32, kv_tokens=80_000, step_ms=step_ms)
    assert max(errors(fit.model, TRUTH)) < 0.1


@pytest.mark.parametrize("stated", [True, False])
def test_a_worker_that_becomes_slower_is_followed_where_it_is_measured(stated):
    fit = feed(LatencyFit(DEFAULT_LATENCY, stated=stated), TRUTH)
    for _ in range(400):
        fit.prompt(uncached_tokens=8192, cached_tokens=0, compute_ms=1.2 * TRUTH.prefill.ms(8192))
    assert fit.model.prefill.ms(8192) == pytest.approx(1.2 * TRUTH.prefill.ms(8192), rel=0.05)


def test_one_absurd_measurement_changes_little():
    fit = feed(LatencyFit(DEFAULT_LATENCY, stated=True), TRUTH)
    before = fit.model.prefill.ms(2000)
    fit.prompt(uncached_tokens=2000, cached_tokens=0, compute_ms=before * 50)
    assert fit.model.prefill.ms(2000) == pytest.approx(before, rel=0.1)


def test_measurements_without_sense_are_ignored():
    fit = LatencyFit(DEFAULT_LATENCY, stated=True)
    fit.prompt(uncached_tokens=0, cached_tokens=10, compute_ms=5.0)
    fit.prompt(uncached_tokens=10, cached_tokens=0, compute_ms=0.0)
    fit.step(num_requests=0, kv_tokens=0, step_ms=5.0)
    assert (fit.num_seen, fit.model) == ((0, 0), DEFAULT_LATENCY)
