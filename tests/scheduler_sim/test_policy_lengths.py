"""Output lengths: quantiles, what a forecast rests on, calibration, bounds."""

import random

import pytest

from scheduler.policy.lengths import LengthKey, LengthModel


def key(tenant: str = "a", prompt: int = 1000) -> LengthKey:
    return LengthKey.of(model="m", tenant=tenant, prompt_tokens=prompt)


def teach(model: LengthModel, where: LengthKey, median: float, number: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    answers = [max(1, int(median * 2 ** rng.gauss(0, 0.7))) for _ in range(number)]
    for answer in answers:
        model.learn(where, answer)
    return answers


def test_learned_quantiles_are_those_of_the_answers_within_a_bucket():
    model = LengthModel()
    answers = sorted(teach(model, key(), 300, 400))
    forecast = model.forecast(key())
    for share in (0.1, 0.5, 0.9):
        assert forecast.quantile(share) == pytest.approx(answers[int(share * 400)], rel=0.3)
    assert forecast.mean == pytest.approx(sum(answers) / 400, rel=0.1)
    assert forecast.share_up_to(forecast.quantile(0.7)) >= 0.7


def test_nothing_learned_is_the_prior_and_a_new_shape_leans_on_the_tenant_then_on_the_model():
    model = LengthModel(prior_tokens=256)
    assert model.forecast(key()).quantile(0.5) == pytest.approx(256, rel=0.3)
    teach(model, key("a", 1000), 2000, 300)
    teach(model, key("b", 1000), 20, 300)
    assert model.forecast(key("a", 60_000)).mean > 1000
    assert model.forecast(key("b", 60_000)).mean < 100
    assert 100 < model.forecast(key("new", 1000)).mean < 2500


def test_old_answers_fade_when_a_tenant_changes():
    model = LengthModel(memory=128)
    teach(model, key(), 50, 2000)
    teach(model, key(), 1000, 600, seed=2)
    assert model.forecast(key()).mean == pytest.approx(1000 * 1.13, rel=0.25)


def test_forecasts_are_calibrated_on_answers_they_had_not_seen():
    model = LengthModel()
    teach(model, key(), 400, 3000)
    deciles = model.calibration()
    assert sum(deciles) == pytest.approx(1.0)
    # Buckets are a fifth of an octave wide, so a decile may get its neighbour's share, but the ends must hold.
    assert 0.05 < deciles[0] + deciles[1] < 0.35
    assert 0.05 < deciles[8] + deciles[9] < 0.35


def test_memory_is_bounded_however_many_tenants_come():
    model = LengthModel(max_keys=100)
    for number in range(2000):
        model.learn(key(f"tenant-{number}"), 10)
        model.forecast(key(f"tenant-{number}"))
    assert len(model) <= 100
    assert len(model._forecasts) <= 100
