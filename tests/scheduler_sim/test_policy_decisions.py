"""The decision log: what is written is what is read, and half a last line does no harm."""

import pytest

from contracts.lifecycle import HandOff, Path, Role, WorkerState
from contracts.slo import SloTarget
from scheduler.policy.blame import Stage
from scheduler.policy.decisions import (
    Arrived,
    Ended,
    Head,
    LogError,
    Placed,
    Refused,
    RungChanged,
    Ticked,
    WorkerSeen,
    decode,
    encode,
)
from scheduler.policy.queueing import Split
from scheduler.policy.ratio import Mode, Move
from scheduler.simulator.setup import H100_8B

RECORDS = (
    Head(at_unix_ms=1_700_000_000_000, model="m", hand_off=HandOff.DIRECT, mode=Mode.SHADOW, latency=H100_8B,
         targets={"default": SloTarget(ttft_ms=2000, tpot_ms=20), "batch": SloTarget()}),
    WorkerSeen(at_ms=0, worker_id="w0", epoch=1, role=Role.PREFILL, state=WorkerState.READY),
    Arrived(at_ms=5.5, rid="r", tier="default", tenant="t", prompt_tokens=9, max_tokens=7, blocks=(1, -2)),
    Placed(at_ms=6, rid="r", attempt=1, path=Path.PD, decode="w1", prefill="w0", reason="short_prompt", waited_ms=1),
    Refused(at_ms=7, rid="q", reason="queue_full", retry_after_s=2.0),
    Ended(at_ms=90, rid="r", prompt_tokens=9, cached_tokens=0, output_tokens=3, ttft_ms=12.0, tpot_ms=6.0, met=True,
          blamed=Stage.NONE),
    Ticked(at_ms=5000, split=Split(prefill=1, decode=1), why="gain", target=Split(prefill=1, decode=1), gain=0.1,
           move=Move(worker_id="w1", from_role=Role.DECODE, to_role=Role.PREFILL)),
    RungChanged(at_ms=6000, before="normal", after="shed_batch", why="overload"),
)  # fmt: skip


def test_what_is_written_is_what_is_read():
    lines = [encode(record) for record in RECORDS]
    assert all(line.count(b"\n") == 1 for line in lines)
    assert tuple(decode(lines)) == RECORDS


def test_a_line_that_its_writer_could_not_finish_is_left_out():
    lines = [encode(record) for record in RECORDS]
    assert tuple(decode([*lines[:-1], lines[-1][:20]])) == RECORDS[:-1]


@pytest.mark.parametrize("broken", [b'{"kind": "none"}\n', b"{\n", b'{"kind":"arrived","at_ms":1}\n'])
def test_any_other_broken_line_is_named(broken):
    with pytest.raises(LogError, match="line 2"):
        list(decode([encode(RECORDS[0]), broken, encode(RECORDS[1])]))
