"""Unified workers with chunks of a fixed size: the closed form against a referee that plays each request."""

import pytest

from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.slo import SloTarget
from pdgate.plan.chunks import answers_of, chunked_outcome
from pdgate.plan.described import Description, sample
from pdgate.plan.traffic import Traffics
from pdgate.plan.workload import mean
from tests.plan.simulated import attained, simulate_unified

WORKER = LatencyModel(
    prefill=PrefillCost(fixed_ms=8.0, per_token_ms=0.02),
    decode=DecodeCost(fixed_ms=6.0, per_request_ms=0.05, per_kv_token_ms=2e-5),
    transfer=TransferCost(fixed_ms=0.0, bytes_per_ms=1e9, kv_bytes_per_token=1),
    kv_capacity_tokens=500_000,
)
CODE = Description(rate_rps=10, prompt_tokens=1500, output_tokens=40, output_cv=1.5, sample=3000)
CHAT = Description(rate_rps=10, prompt_tokens=1000, output_tokens=200, sample=3000)
WORKERS = 4


def closed_form(load, rate_rps, tpot_ms, chunk_tokens):
    target = SloTarget(ttft_ms=2000, tpot_ms=tpot_ms)
    traffic = Traffics(load, target).whole(0).at(rate_rps)
    return chunked_outcome(
        latency=WORKER, num_workers=WORKERS, traffic=traffic, target=target, mixing=1.0, chunk_tokens=chunk_tokens
    ).attainment


@pytest.mark.parametrize(
    ("described", "tpot_ms", "chunk_tokens", "rates"),
    [(CODE, 25.0, 2048, (10.0, 30.0, 50.0)), (CHAT, 15.0, 512, (8.0, 24.0, 40.0)), (CHAT, 20.0, 8192, (20.0, 60.0))],
)
def test_the_closed_form_is_near_what_is_played(described, tpot_ms, chunk_tokens, rates):
    load = sample(described)
    for rate in rates:
        requests = [(r.arrival_s * 1000, r.prompt_tokens, r.output_tokens) for r in load.at_rate(rate).requests]
        seen = simulate_unified(requests, WORKER, WORKERS, 0.0, 1.0, chunk_tokens)
        assert closed_form(load, rate, tpot_ms, chunk_tokens) == pytest.approx(attained(seen, 2000, tpot_ms), abs=0.12)


def test_small_chunks_pay_the_fixed_part_more_often_and_large_ones_delay_short_answers():
    """At little load a chunk of 8,192 tokens breaks the TPOT of short answers less often than many small ones cost."""
    load = sample(CODE)
    assert closed_form(load, 40.0, 25.0, 256) < closed_form(load, 40.0, 25.0, 2048)
    alone = [closed_form(load, 1.0, tpot_ms, 8192) for tpot_ms in (7.0, 25.0)]
    assert alone[0] < alone[1]


def test_answer_lengths_have_the_mean_of_the_traffic_and_at_least_one_token():
    moments = Traffics(sample(CHAT), SloTarget(ttft_ms=2000, tpot_ms=30)).moments
    lengths = answers_of(moments)
    assert mean(lengths) == pytest.approx(moments.o, rel=0.01)
    assert min(lengths) >= 1
