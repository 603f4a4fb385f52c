"""The scheduler's own decision log is a workload for the planner, and long traffic has a daily curve."""

import json
import sys

import pytest
from typer.testing import CliRunner

from contracts.lifecycle import HandOff
from contracts.perf import DEFAULT_LATENCY
from pdgate.cli import app, main
from pdgate.plan.portrait import portray
from pdgate.plan.traces import read_trace
from pdgate.plan.workload import Request, WorkloadError, workload_of
from scheduler.policy.blame import Stage
from scheduler.policy.decisions import Arrived, Ended, Head, Refused, encode
from scheduler.policy.ratio import Mode


def head(zero_ms, block_tokens=64):
    return Head(
        at_unix_ms=zero_ms,
        model="tiny",
        hand_off=HandOff.DIRECT,
        mode=Mode("auto"),
        latency=DEFAULT_LATENCY,
        targets={},
        block_tokens=block_tokens,
    )


def arrived(at_ms, rid, *, prompt=200, blocks=(), session=""):
    return Arrived(
        at_ms=at_ms,
        rid=rid,
        tier="default",
        tenant="t",
        prompt_tokens=prompt,
        max_tokens=4096,
        session=session,
        blocks=blocks,
    )


def ended(at_ms, rid, output, *, cached=0):
    return Ended(
        at_ms=at_ms,
        rid=rid,
        prompt_tokens=200,
        cached_tokens=cached,
        output_tokens=output,
        ttft_ms=100.0,
        tpot_ms=10.0,
        met=True,
        blamed=Stage.NONE,
    )


def write(file, *records):
    file.write_bytes(b"".join(encode(r) for r in records))


def test_a_rotated_log_is_one_workload_with_its_sessions_and_prefixes(tmp_path):
    """A request that arrived in the older file and ended in the newer one is one request."""
    older, current = tmp_path / "chat.1.jsonl", tmp_path / "chat.jsonl"
    write(older, head(1_000_000), arrived(0, "a", blocks=(1, 2, 3), session="s"), arrived(500, "b"), ended(900, "b", 7))
    write(
        current,
        head(1_010_000),
        ended(0, "a", 30),
        arrived(2_000, "c", blocks=(1, 2, 3), session="s"),
        ended(3_000, "c", 9, cached=192),
    )
    load = read_trace(current)
    assert load.source == "pdgate decision log"
    assert [(r.arrival_s, r.output_tokens) for r in load.requests] == [(0.0, 30), (0.5, 7), (12.0, 9)]
    report = portray(load)
    assert report.sessions is not None
    assert (report.sessions.count, report.sessions.turns) == (1, 2.0)
    # 3 of the second turn's blocks were seen before: 192 of all 600 prompt tokens
    assert report.prefix_hits[-1].hit == pytest.approx(192 / 600)


def test_a_refused_request_is_traffic_with_the_usual_answer(tmp_path):
    file = tmp_path / "chat.jsonl"
    write(
        file,
        head(0, block_tokens=0),
        arrived(0, "a"),
        ended(100, "a", 10, cached=64),
        arrived(1000, "b"),
        ended(1100, "b", 30),
        arrived(2000, "c"),
        ended(2100, "c", 20),
        arrived(3000, "d"),
        Refused(at_ms=3000, rid="d", reason="no_capacity"),
    )
    load = read_trace(file)
    assert [r.output_tokens for r in load.requests] == [10, 30, 20, 20]
    assert [r.cached_tokens for r in load.requests] == [64, 0, 0, None]


def test_a_log_without_an_answer_and_a_torn_log_say_what_is_wrong(tmp_path):
    file = tmp_path / "chat.jsonl"
    write(file, head(0), arrived(0, "a"), arrived(1, "b"))
    with pytest.raises(WorkloadError, match="2 requests arrived, none has an answer"):
        read_trace(file)
    file.write_bytes(encode(head(0)) + b'{"kind":"dream"}\n')
    with pytest.raises(WorkloadError, match="line 2"):
        read_trace(file)


def test_a_daily_curve_folds_days_onto_each_other_and_sizes_the_fleet():
    """Two days of one request an hour but three in each day's last hour: 26 a day, so that hour is 3 / (26/24)."""
    times = [hour * 3600 + 600.0 * i for hour in range(48) for i in range(3 if hour % 24 == 23 else 1)]
    requests = [Request(arrival_s=t, prompt_tokens=10, output_tokens=10) for t in (*times, 48 * 3600.0)]
    load = workload_of(requests, name="days")
    assert len(load.hourly) == 24
    assert load.hourly[23] == pytest.approx(3 / (26 / 24))
    assert load.hourly[0] == pytest.approx(1 / (26 / 24))
    short = workload_of(requests[:5], name="short")
    assert short.hourly == ()


def test_the_peak_is_the_busiest_hour_of_a_given_curve():
    asked = ["plan", "--rate", "2", "--prompt-tokens", "500", "--output-tokens", "50", "--model", "llama-3-8b"]
    result = CliRunner().invoke(app, [*asked, "--daily", "1,1,4", "--no-simulation", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["planned_rps"] == pytest.approx(4.0)  # 2/s on average, twice that in the busiest hour
    assert found["workload"]["hourly"] == [0.5, 0.5, 2.0]
    day = found["day"]
    # 16 hours of a quarter of the peak's rate (rounded up to two sixths), 8 of the peak's
    assert [(level["hours"], level["rate_rps"]) for level in day["levels"]] == [(16, 4 / 3), (8, 4)]
    assert day["following"] == sum(level["hours"] * level["price_per_hour"] for level in day["levels"])
    assert day["following"] <= day["fixed"]


def test_a_daily_curve_that_is_none_is_refused(monkeypatch, capsys):
    asked = ["plan", "--rate", "2", "--prompt-tokens", "500", "--output-tokens", "50", "--daily", "1,-1"]
    monkeypatch.setattr(sys, "argv", ["pdgate", *asked])
    with pytest.raises(SystemExit):
        main()
    assert "--daily" in capsys.readouterr().err
