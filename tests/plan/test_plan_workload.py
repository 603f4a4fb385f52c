"""Traces are read as they are, and the report of a workload states figures worked out elsewhere."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdgate.plan.described import DATA, Description, preset_workload, sample
from pdgate.plan.portrait import portray
from pdgate.plan.prefix import cached_tokens, hit_share
from pdgate.plan.traces import read_trace
from pdgate.plan.workload import Request, WorkloadError, percentile, squared_cv, workload_of


@pytest.mark.parametrize(
    ("file", "requests", "rate_rps", "arrival_cv", "prompt", "output", "short", "prompt_squared_cv"),
    [
        ("AzureLLMInferenceTrace_code.csv.xz", 8819, 2.57, 13.2, 2048, 28, 0.233, 0.93),
        ("AzureLLMInferenceTrace_conv.csv.xz", 19366, 5.53, 1.1, 1155, 211, 0.395, 0.92),
        ("conversation_trace.jsonl.xz", 12031, 3.40, 3.0, 12035, 343, 0.0, 1.72),
    ],
)
def test_the_shipped_traces_have_the_figures_published_for_them(
    file, requests, rate_rps, arrival_cv, prompt, output, short, prompt_squared_cv
):
    report = portray(read_trace(DATA / file))
    assert report.requests == requests
    assert report.rate_rps == pytest.approx(rate_rps, abs=0.005)
    assert report.arrival_cv == pytest.approx(arrival_cv, abs=0.06)
    assert report.prompt.mean == pytest.approx(prompt, abs=0.5)
    assert report.output.mean == pytest.approx(output, abs=0.5)
    assert report.short_share == pytest.approx(short, abs=0.001)
    assert report.prompt.squared_cv == pytest.approx(prompt_squared_cv, abs=0.005)


def test_the_conversation_trace_hits_37_4_percent_with_an_unlimited_cache_and_less_with_a_small_one():
    trace = read_trace(DATA / "conversation_trace.jsonl.xz")
    assert hit_share(trace, cache_tokens=None) == pytest.approx(0.374, abs=0.0005)
    assert hit_share(trace, cache_tokens=1_000_000) < 0.1


def request(at=0.0, prompt=1000, output=10, blocks=()):
    return Request(arrival_s=at, prompt_tokens=prompt, output_tokens=output, blocks=tuple(blocks))


def test_a_prefix_counts_up_to_the_first_block_that_is_not_cached():
    load = workload_of(
        [request(0, 1536, blocks=[1, 2, 3]), request(1, 1536, blocks=[1, 9, 3])], name="two", block_tokens=512
    )
    assert cached_tokens(load, cache_tokens=None) == [0, 512]


def test_a_full_cache_gives_up_the_end_of_a_prompt_before_its_beginning():
    load = workload_of(
        [request(0, 1536, blocks=[1, 2, 3]), request(1, 512, blocks=[7]), request(2, 1536, blocks=[1, 2, 3])],
        name="three",
        block_tokens=512,
    )
    assert cached_tokens(load, cache_tokens=3 * 512) == [0, 0, 1024]


def test_cached_tokens_that_the_engine_reported_are_taken_as_they_are():
    seen = Request(arrival_s=1, prompt_tokens=1000, output_tokens=1, cached_tokens=768)
    assert cached_tokens(workload_of([request(), seen], name="log"), cache_tokens=0) == [0, 768]


def test_an_openai_style_log_is_read_with_its_cached_tokens(tmp_path):
    lines = [
        {"created": 1000, "usage": {"prompt_tokens": 100, "completion_tokens": 7}},
        {
            "created_at": "1970-01-01T00:16:42Z",
            "response": {
                "body": {
                    "usage": {
                        "prompt_tokens": 300,
                        "completion_tokens": 5,
                        "prompt_tokens_details": {"cached_tokens": 256},
                    }
                }
            },
        },
    ]
    file = tmp_path / "log.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    load = read_trace(file)
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens, r.cached_tokens) for r in load.requests] == [
        (0.0, 100, 7, None),
        (2.0, 300, 5, 256),
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "neither an Azure CSV"),
        ("hello\n", "neither an Azure CSV"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808\n", r":2: expected time,prompt"),
        ('{"timestamp": 0, "input_length": 6}\n', r":1: Object missing required field `output_length`"),
        ('{"created": 1, "model": "x"}\n{"created": 2}\n', r":1: no usage with prompt and output tokens \(2 such"),
        ('{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n', "no time in any of created"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "0 usable requests; at least 2"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,1\n2023-11-16 18:17:04,0,1\n",
            "request 2 has 0 prompt and 1 output tokens",
        ),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_with_the_line_and_the_fault(tmp_path, text, fault):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(WorkloadError, match=fault):
        read_trace(file)


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_a_described_load_has_the_described_means_spread_burstiness_and_reuse():
    load = sample(
        Description(
            rate_rps=5, prompt_tokens=2000, output_tokens=200, prompt_cv=0.5, arrival_cv=2, prefix_reuse=0.4, seed=3
        )
    )
    report = portray(load)
    assert report.rate_rps == pytest.approx(5, rel=1e-6)
    assert report.prompt.mean == pytest.approx(2000, rel=0.001)
    assert report.output.mean == pytest.approx(200, rel=0.01)
    assert report.prompt.squared_cv**0.5 == pytest.approx(0.5, rel=0.1)
    assert report.arrival_cv == pytest.approx(2, rel=0.15)
    assert hit_share(load, cache_tokens=None) == pytest.approx(0.4, abs=0.03)


def test_sessions_reuse_their_own_history():
    load = sample(Description(rate_rps=2, prompt_tokens=4000, output_tokens=200, prefix_reuse=0.6, turns=5))
    assert load.mean_prompt_tokens == pytest.approx(4000, rel=0.01)
    assert hit_share(load, cache_tokens=None) == pytest.approx(0.6, abs=0.03)


def test_the_same_seed_gives_the_same_load():
    load = Description(rate_rps=1, prompt_tokens=100, output_tokens=10, sample=50)
    assert sample(load) == sample(load)


@pytest.mark.parametrize("name", ["chat", "agent", "rag", "docs", "batch"])
def test_every_preset_gives_traffic_without_a_file(name):
    preset, load = preset_workload(name)
    assert preset.about
    assert load.rate_rps > 0


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(WorkloadError, match="chat, agent, rag, docs, batch"):
        preset_workload("games")


@given(st.lists(st.floats(1, 1e4), min_size=2, max_size=50), st.floats(0.1, 100))
def test_stretching_the_arrivals_keeps_requests_and_burstiness(gaps, rate_rps):
    times = [sum(gaps[:i]) for i in range(len(gaps) + 1)]
    load = workload_of([request(at) for at in times], name="x")
    moved = load.at_rate(rate_rps)
    assert moved.rate_rps == pytest.approx(rate_rps)
    assert portray(moved).arrival_cv == pytest.approx(portray(load).arrival_cv, abs=1e-6)


def test_percentiles_and_spread_by_hand():
    assert percentile([10.0, 20.0, 30.0], 0.25) == 15.0
    assert squared_cv([1.0, 3.0]) == 0.25
