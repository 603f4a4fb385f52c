"""What `pdgate why` draws."""

import pytest
from rich.console import Console

from contracts.identity import new_rid
from contracts.slo import SloTarget, Timings
from pdgate.story import Bill, Story, Unknown, rid_of
from pdgate.why import picture, spans_of


def story(**fields) -> Story:
    return Story(
        **{
            "rid": new_rid(1_700_000_000_000), "status": "billed", "arrived_unix_ms": 1_700_000_000_000,
            "running_ms": None, "organisation": "org_1", "model": "tiny", "pool": "tiny", "tier": "default",
            "target": SloTarget(ttft_ms=100, tpot_ms=50), "currency": "EUR", "decisions": (), "refused": "",
            "attempts": (), "blamed": "prefill_queue", "blame_from": "decision_log", "bill": bill(), **fields,
        }
    )  # fmt: skip


def bill(**fields) -> Bill:
    timings = Timings(ttft_ms=180, decode_ms=380, decode_tokens=20, queue_ms=90, prefill_ms=60, transfer_ms=20)
    return Bill(
        **{
            "outcome": "finished", "cause": "", "finish_reason": "stop", "path": "pd", "hand_off": "direct",
            "attempts": 1, "prefill_worker": "p1", "decode_worker": "d1", "timings": timings, "slo_met": False,
            "estimated": False, "simulated": False, "settled_by": "gateway", "cost": 0, "meters": (), **fields,
        }
    )  # fmt: skip


def drawn(told: Story) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(picture(told))
    return captured.get()


def test_the_phases_follow_each_other_and_what_no_phase_explains_is_shown():
    spans = {phase: (start, end) for phase, start, end, _ in spans_of(story()) or ()}
    assert spans == {
        "queue": (0, 90),
        "prefill": (90, 150),
        "transfer": (150, 170),
        "other": (170, 180),
        "decode": (180, 560),
    }


def test_a_screen_says_what_was_promised_what_was_missed_and_who_is_to_blame():
    text = drawn(story())
    for said in ("TTFT 180 of 100 ms MISSED", "TPOT 20 of 50 ms met", "prefill_queue", "direct hand-off"):
        assert said in text


def test_a_unified_request_has_no_transfer():
    whole = bill(path="unified", hand_off=None, prefill_worker="")
    assert "transfer" not in {phase for phase, *_ in spans_of(story(bill=whole)) or ()}


def test_the_id_of_an_answer_names_its_request():
    rid = new_rid(1_700_000_000_000)
    assert rid_of(f"chatcmpl-{rid}") == rid_of(f" {rid} ") == rid
    for bad in ("hello", "8b1f6d7e-52a5-4b7e-9f00-000000000000", ""):
        with pytest.raises(Unknown, match="no request id"):
            rid_of(bad)
