"""What the load generator sends, and what it makes of the answers."""

import itertools
import json
import random

import msgspec
import pytest

from contracts.slo import SloTarget
from pdgate.bench.campaign import Campaign
from pdgate.bench.compare import NotComparable, compare
from pdgate.bench.endpoint import Dialect
from pdgate.bench.load import Arrivals, Described, Lengths, arrival_times, described_sessions, traced_sessions
from pdgate.bench.measurements import FitError, write_measurements
from pdgate.bench.prices import price_of, priced
from pdgate.bench.records import Client, Record, Run, RunError, Step, read_run, write_run
from pdgate.bench.summary import summary_of
from pdgate.bench.texts import Author, Piece, Scale
from pdgate.plan.calibration import read_measurements
from pdgate.plan.hardware import accelerators, find_accelerator
from pdgate.plan.models import find_model
from pdgate.plan.traces import read_trace
from pdgate.plan.workload import mean, squared_cv

FIT = Client(late_p50_ms=0, late_p99_ms=0, lag_p99_ms=0, cpu=0.1, limit_ms=20)


def record(number, *, at_s=0.0, ttft_ms=100.0, tpot_ms=10.0, tokens=11, **changes):
    first_s = at_s + ttft_ms / 1000
    last_s = first_s + tpot_ms * (tokens - 1) / 1000
    fields = {
        "session": number, "turn": 0, "intended_s": at_s, "sent_s": at_s, "first_s": first_s, "last_s": last_s,
        "end_s": last_s, "asked_prompt_tokens": 100, "asked_output_tokens": tokens, "output_tokens": tokens,
        "prompt_tokens": 100, "cached_tokens": 0, "counted_by_server": True,
    }  # fmt: skip
    return Record(**{**fields, **changes})


def step(records, **changes):
    fields = {"name": "x", "rate_rps": 10.0, "wall_s": max(r.end_s for r in records), "client": FIT}
    return Step(records=records, **{**fields, **changes})


def run(*steps, label="a", **changes):
    fields = {
        "label": label, "started": "2026-01-01T00:00:00+00:00", "url": "http://x", "model": "m", "route": "chat",
        "load": "l", "seed": 1, "target": SloTarget(ttft_ms=150, tpot_ms=20), "scale": Scale(), "dialect": Dialect(),
    }  # fmt: skip
    return Run(steps=list(steps), **{**fields, **changes})


def drawn(seed, *, ttft_ms, number=300, label="a", **changes):
    rng = random.Random(seed)
    records = [record(n, at_s=n / 10, ttft_ms=ttft_ms * rng.lognormvariate(0, 0.4)) for n in range(number)]
    return run(step(records, **changes), label=label)


@pytest.mark.parametrize(
    ("kind", "cv", "expected"), [(Arrivals.POISSON, 1, 1.0), (Arrivals.CONSTANT, 1, 0.0), (Arrivals.GAMMA, 3, 9.0)]
)
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(kind, cv, expected):
    times = list(itertools.islice(arrival_times(kind, rate_rps=20, cv=cv, seed=1), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert mean(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert squared_cv(gaps) == pytest.approx(expected, rel=0.15, abs=0.01)
    assert times == list(itertools.islice(arrival_times(kind, rate_rps=20, cv=cv, seed=1), 20_000))


def test_lengths_have_the_mean_and_the_spread_asked_for():
    rng = random.Random(1)
    values = [Lengths(mean=500, cv=1.5).draw(rng) for _ in range(20_000)]
    assert mean(values) == pytest.approx(500, rel=0.05)
    assert squared_cv(values) == pytest.approx(2.25, rel=0.2)
    assert {Lengths(mean=64).draw(rng) for _ in range(10)} == {64}


def test_blocks_with_one_hash_are_one_text_and_the_rest_is_new(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 500, "input_length": 1300, "output_length": 7, "hash_ids": [1, 2, 4]},
        {"timestamp": 900, "input_length": 600, "output_length": 9, "hash_ids": [8, 9]},
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(traced_sessions(read_trace(file)))
    author = Author(Scale(tokens_per_word=1.0), salt="s")
    texts = [author.text(s.turns[0].pieces).split() for s in found]
    assert [len(words) for words in texts] == [1200, 1300, 600]  # 512 + 512 + 176, 512 + 512 + 276, 512 + 88
    assert texts[0][:1024] == texts[1][:1024]
    assert texts[0][1024:1200] != texts[1][1024:1200]
    assert texts[0][:512] != texts[2][:512]
    assert [s.at_s for s in found] == [0.0, 0.5, 0.9]
    assert [s.turns[0].output_tokens for s in found] == [5, 7, 9]


def test_a_log_with_cached_tokens_gets_prompts_that_share_so_many(tmp_path):
    file = tmp_path / "log.jsonl"
    usage = {"prompt_tokens": 100, "completion_tokens": 3}
    rows = [
        {"created": number, "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}}
        for number, cached in enumerate((0, 40, 60))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    author = Author(Scale(tokens_per_word=1.0), salt="s")
    texts = [author.text(s.turns[0].pieces).split() for s in traced_sessions(read_trace(file))]
    assert [len(words) for words in texts] == [100, 100, 100]
    assert texts[1][:40] == texts[2][:40]
    assert texts[1][40:60] != texts[2][40:60]


def test_no_step_finds_the_texts_of_another_one():
    pieces = (Piece("b1", 200),)
    one, other = (Author(Scale(), salt=salt).text(pieces) for salt in ("x", "y"))
    assert one != other


def test_sessions_share_their_prefixes_and_nothing_else():
    load = Described(prompt=Lengths(mean=20), output=Lengths(mean=5), prefix_tokens=30, prefixes=2, turns=2)
    found = list(itertools.islice(described_sessions(load, None), 20))
    assert {s.system[0].seed for s in found} == {"prefix0", "prefix1"}
    assert len({turn.pieces[0].seed for s in found for turn in s.turns}) == 40


def test_a_campaign_is_bounded_by_sessions_and_by_time():
    fields = {
        "concurrencies": (), "arrivals": Arrivals.CONSTANT, "burst_cv": 1.0, "trace": None, "length_scale": 1.0,
        "described": Described(prompt=Lengths(mean=5), output=Lengths(mean=5)), "deadline_s": 1.0,
    }  # fmt: skip
    assert len(list(Campaign(rates=(10,), requests=7, duration_s=None, **fields).sessions(10.0))) == 7
    assert len(list(Campaign(rates=(10,), requests=None, duration_s=2.05, **fields).sessions(10.0))) == 20


def test_goodput_counts_whole_answers_within_both_targets_over_the_window_of_arrivals():
    records = [record(n, at_s=n / 10) for n in range(8)]  # within 150 and 20 ms
    records += [record(8, at_s=0.8, ttft_ms=151), record(9, at_s=0.9, tpot_ms=21)]
    records += [record(10, at_s=1.0, error="cut")]
    found = summary_of(step(records), SloTarget(ttft_ms=150, tpot_ms=20))
    assert found.attainment == pytest.approx(8 / 11)
    assert found.goodput_rps == pytest.approx(8 / 1.1)  # eleven requests, 0.1 s apart: a window of 1.1 s
    assert found.errors == {"cut": 1}
    assert sum(part.requests for part in found.over_time) == 11
    assert found.ttft_ms["p50"] == pytest.approx(100)
    assert found.tpot_ms["p50"] == pytest.approx(10)


def test_the_price_is_the_endpoints_or_else_by_meter():
    price = price_of("0.10,0.02,0.40")
    records, by = priced([record(0, prompt_tokens=1000, cached_tokens=400, tokens=50)], price)
    # 600 x 0.10 + 400 x 0.02 + 50 x 0.40 = 60 + 8 + 20 millionths = 88,000 nano
    assert (records[0].cost_nano, by) == (88_000, "--price")
    assert priced([record(0, cost_nano=5)], price)[1] == "endpoint"
    assert priced([record(0)], None)[1] == ""
    with pytest.raises(ValueError, match="--price"):
        price_of("1,2")


def test_two_runs_of_one_system_do_not_differ_and_a_slower_one_does():
    same = compare([drawn(1, ttft_ms=100)], [drawn(2, ttft_ms=100, label="b")], resamples=400)[0]
    assert [d.measure for d in same.differences if d.real] == []
    slower = compare([drawn(1, ttft_ms=100)], [drawn(2, ttft_ms=130, label="b")], resamples=400)[0]
    by_name = {d.measure: d for d in slower.differences}
    assert by_name["TTFT P50"].real
    assert by_name["TTFT P50"].better is False
    assert by_name["TTFT P50"].low <= 30 <= by_name["TTFT P50"].high
    assert by_name["attainment"].real
    assert not by_name["TPOT P50"].real
    assert "TTFT P99" not in by_name  # three requests lie beyond it: too few to say
    assert any("one run a side" in caution for caution in slower.cautions)


def test_false_alarms_stay_below_their_rate():
    """Twenty pairs of runs of one system: at 5 % over all measures together one alarm is expected."""
    alarms = sum(
        any(d.real for d in one.differences)
        for seed in range(20)
        for one in compare(
            [drawn(seed, ttft_ms=100, number=60)], [drawn(1000 + seed, ttft_ms=100, number=60)], resamples=200
        )
    )
    assert alarms <= 4


def test_a_comparison_says_what_makes_it_doubtful():
    late = msgspec.structs.replace(FIT, invalid_because="late")
    other = drawn(2, ttft_ms=100, label="b", client=late)
    other = msgspec.structs.replace(other, load="another", model="n")
    cautions = compare([drawn(1, ttft_ms=100)], [other], resamples=50)[0].cautions
    assert [any(word in c for c in cautions) for word in ("loads differ", "models differ", "invalid run")] == [True] * 3
    with pytest.raises(NotComparable, match="at least 20"):
        compare([drawn(1, ttft_ms=100, number=5)], [drawn(2, ttft_ms=100)])
    with pytest.raises(NotComparable, match="no step in common"):
        compare([drawn(1, ttft_ms=100)], [drawn(2, ttft_ms=100, name="y")])


def test_runs_of_one_side_are_drawn_too():
    """Between two runs of each side lies more than within one: so the sides do not differ for sure."""
    first = [drawn(1, ttft_ms=100), drawn(2, ttft_ms=140)]
    second = [drawn(3, ttft_ms=110, label="b"), drawn(4, ttft_ms=155, label="b")]
    by_name = {d.measure: d for d in compare(first, second, resamples=400)[0].differences}
    assert not by_name["TTFT P50"].real
    alone = {d.measure: d for d in compare(first[:1], second[1:], resamples=400)[0].differences}
    assert alone["TTFT P50"].real


def test_a_results_file_comes_back_as_it_was(tmp_path):
    file = tmp_path / "deep" / "a.json"
    before = drawn(1, ttft_ms=100, number=30)
    write_run(file, before)
    assert read_run(file) == before
    file.write_text("{}")
    with pytest.raises(RunError, match="no result of"):
        read_run(file)


def test_measurements_are_read_by_the_planner(tmp_path):
    file = tmp_path / "fit.csv"
    loops = [
        step([record(n, tpot_ms=tpot_ms, ttft_ms=50) for n in range(5)], concurrency=users, rate_rps=None)
        for users, tpot_ms in ((1, 10.0), (8, 12.0), (32, 20.0))
    ]
    write_measurements(file, run(*loops), gpus=2)
    gpu = find_accelerator("H100", accelerators())
    rows = read_measurements(
        file, shape=find_model("llama-3-8b").shape, gpu=gpu, weights="bf16", kv="bf16", engine="sglang"
    )
    assert [(r.concurrency, r.use.gpus, r.prompt_tokens, r.output_tokens) for r in rows] == [
        (1, 2, 100, 11), (8, 2, 100, 11), (32, 2, 100, 11),
    ]  # fmt: skip
    assert [r.tpot_ms for r in rows] == pytest.approx([10.0, 12.0, 20.0])
    assert rows[0].ttft_ms == pytest.approx(50)
    with pytest.raises(FitError, match="3 concurrencies"):
        write_measurements(file, run(*loops[:2]), gpus=1)
