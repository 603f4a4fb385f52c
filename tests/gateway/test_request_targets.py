"""Targets that a request names for itself, and the gaps that one of them needs."""

import pytest

from contracts.errors import BadRequest
from contracts.slo import SloTarget, Timings, met
from gateway.gaps import Gaps
from gateway.scopes import Scopes
from gateway.targets import read_targets, targets_of

TIER = SloTarget(ttft_ms=1000, tpot_ms=50)


def test_the_header_names_any_subset():
    assert read_targets("") is None
    assert read_targets("e2e=20s") == SloTarget(e2e_ms=20_000)
    got = read_targets("ttft=800ms, tpot=40.5ms,itl_p99=90ms , e2e=1s")
    assert got == SloTarget(ttft_ms=800, tpot_ms=40.5, itl_p99_ms=90, e2e_ms=1000)


@pytest.mark.parametrize("header", ["ttft", "ttft=1", "speed=1s", "ttft=1s,ttft=2s", "ttft=0ms", "e2e=90000s", "=1s"])
def test_what_cannot_be_read_is_refused_by_name(header):
    with pytest.raises(BadRequest) as refused:
        read_targets(header)
    assert refused.value.param == "x-pdgate-slo"


def test_named_targets_replace_the_tiers_as_a_whole():
    assert targets_of(None, TIER, ()) == TIER
    assert targets_of(SloTarget(e2e_ms=30_000), TIER, ()) == SloTarget(e2e_ms=30_000)


def test_a_request_may_be_stricter_than_its_tier_only_by_agreement():
    asked = SloTarget(ttft_ms=200, tpot_ms=10)
    assert targets_of(asked, TIER, (Scopes(),)) == TIER
    agreed = (Scopes(strictest_ttft_ms=100), Scopes(strictest_ttft_ms=300, strictest_tpot_ms=5))
    assert targets_of(asked, TIER, agreed) == SloTarget(ttft_ms=300, tpot_ms=10)
    assert targets_of(SloTarget(ttft_ms=5000), TIER, agreed) == SloTarget(ttft_ms=5000)


def test_a_key_or_its_project_may_have_targets_of_its_own_below_what_a_request_names():
    project = Scopes(slo=SloTarget(e2e_ms=60_000))
    key = Scopes(slo=SloTarget(ttft_ms=300))
    assert targets_of(None, TIER, (Scopes(), project)) == SloTarget(e2e_ms=60_000)
    assert targets_of(None, TIER, (key, project)) == SloTarget(ttft_ms=300)
    assert targets_of(SloTarget(ttft_ms=200, tpot_ms=10), TIER, (key, project)) == SloTarget(ttft_ms=300, tpot_ms=50)
    assert targets_of(SloTarget(e2e_ms=9_000), TIER, (Scopes(), project)) == SloTarget(e2e_ms=60_000)


def test_the_percentile_of_gaps_is_exact_to_nine_percent():
    gaps = Gaps()
    assert gaps.p99_ms() is None
    now_s = 10.0
    for number in range(200):
        gaps.add(1, now_s)
        now_s += 0.5 if number == 50 else 0.02  # 1 of 199 gaps is long
    assert gaps.p99_ms() == pytest.approx(20, rel=0.09)
    gaps.add(1, now_s + 0.5)
    gaps.add(1, now_s + 1.0)
    assert gaps.p99_ms() == pytest.approx(500, rel=0.09)


def test_tokens_that_come_together_have_no_gap_between_them():
    gaps = Gaps()
    gaps.add(4, 1.0)
    assert gaps.p99_ms() == 0
    gaps.add(0, 5.0)
    gaps.add(4, 1.1)
    assert gaps.p99_ms() == pytest.approx(100, rel=0.09)


def test_each_target_is_met_or_missed_by_itself():
    seen = Timings(ttft_ms=500, decode_ms=900, decode_tokens=10, itl_p99_ms=300)
    assert met(seen, SloTarget(ttft_ms=500, tpot_ms=100, itl_p99_ms=300, e2e_ms=1400))
    for missed in ({"ttft_ms": 499}, {"tpot_ms": 99}, {"itl_p99_ms": 299}, {"e2e_ms": 1399}):
        assert not met(seen, SloTarget(**missed))
    assert met(seen, SloTarget())
