"""Each miss is blamed on one stage."""

import msgspec
import pytest

from contracts.lifecycle import Role
from contracts.slo import SloTarget
from scheduler.policy.blame import BlameWindow, Stage, Stamps, blame

GOOD = Stamps(
    target=SloTarget(ttft_ms=1000, tpot_ms=20),
    ttft_ms=500.0,
    tpot_ms=15.0,
    prefill_ms=300.0,
    expected_prefill_ms=300.0,
    transfer_ms=20.0,
    expected_transfer_ms=20.0,
    idle_step_ms=7.0,
)


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({}, Stage.NONE),
        ({"ttft_ms": 1500.0, "prefill_wait_ms": 900.0, "decode_wait_ms": 100.0}, Stage.PREFILL_QUEUE),
        ({"ttft_ms": 1500.0, "prefill_wait_ms": 100.0, "decode_wait_ms": 900.0}, Stage.DECODE_MEMORY),
        ({"ttft_ms": 1500.0, "gateway_ms": 900.0}, Stage.GATEWAY),
        ({"ttft_ms": 1500.0, "prefill_ms": 1200.0, "prefill_wait_ms": 100.0}, Stage.PREFILL_COMPUTE),
        ({"ttft_ms": 1500.0, "transfer_ms": 1100.0}, Stage.TRANSFER),
        ({"tpot_ms": 25.0}, Stage.DECODE_LOAD),
        ({"tpot_ms": 25.0, "mixed_share": 0.4}, Stage.INTERFERENCE),
        ({"ttft_ms": 1500.0, "expected_prefill_ms": 1100.0, "prefill_ms": 1100.0}, Stage.STRUCTURAL),
        ({"tpot_ms": 25.0, "idle_step_ms": 22.0}, Stage.STRUCTURAL),
        ({"lost": True}, Stage.LOST),
        ({"target": SloTarget(), "ttft_ms": 9e9, "tpot_ms": 9e9}, Stage.NONE),
    ],
)
def test_the_stage_with_the_largest_excess_is_blamed(change, stage):
    assert blame(msgspec.structs.replace(GOOD, **change)) is stage


def test_the_window_counts_sides_over_feasible_requests_and_forgets():
    window = BlameWindow(span_s=60.0)
    for stage in (Stage.NONE, Stage.PREFILL_QUEUE, Stage.DECODE_MEMORY, Stage.DECODE_LOAD, Stage.STRUCTURAL):
        window.add(10.0, stage)
    window.refuse(10.0)
    seen = window.blamed(20.0)
    assert (seen.feasible, seen.met, seen.refused) == (4, 1, 1)
    assert seen.attainment == pytest.approx(0.25)
    assert seen.share(Role.PREFILL) == pytest.approx(0.25)
    assert seen.share(Role.DECODE) == pytest.approx(0.5)
    assert seen.refused_share == pytest.approx(0.2)
    later = window.blamed(100.0)
    assert (later.feasible, later.attainment) == (0, None)
    assert later.share(Role.PREFILL) == 0.0
