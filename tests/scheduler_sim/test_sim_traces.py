"""Trace readers and generated loads."""

import pytest

from scheduler.simulator.arrivals import Lengths, Workload, burst, faster, jittered, poisson, regimes, window
from scheduler.simulator.traces import TraceError, TraceKind, kind_of, read_trace

LOAD = Workload(prompt=Lengths(median=1000, p90_over_median=2.0), output=Lengths(median=100), rate_rps=50.0, name="a")


def test_an_azure_trace_is_read_in_order_with_times_from_its_start(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799600,4808,10\n"
    )
    first, second = read_trace(file)
    assert kind_of(file) is TraceKind.AZURE_CSV
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at_s == pytest.approx(0.052, abs=1e-6)


def test_a_mooncake_trace_keeps_its_prefix_blocks(tmp_path):
    file = tmp_path / "mooncake.jsonl"
    file.write_text('{"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [4, 5]}\n')
    (only,) = read_trace(file)
    assert (only.at_s, only.prompt_tokens, only.output_tokens, only.blocks) == (0.0, 600, 7, (4, 5))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "neither a CSV"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,x,1\n", ":2:"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}\n', ":1:"),
        ('{"timestamp": 0}\n', ":1:"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
    ],
)
def test_what_is_not_a_trace_is_refused_with_its_place(tmp_path, text, says):
    file = tmp_path / "bad"
    file.write_text(text)
    with pytest.raises(TraceError, match=says):
        read_trace(file)


def test_a_poisson_load_has_its_rate_and_is_the_same_for_a_seed():
    arrivals = list(poisson(LOAD, duration_s=100, seed=3))
    assert len(arrivals) == pytest.approx(5000, rel=0.06)
    assert arrivals == list(poisson(LOAD, duration_s=100, seed=3))
    assert arrivals != list(poisson(LOAD, duration_s=100, seed=4))
    lengths = sorted(a.prompt_tokens for a in arrivals)
    assert lengths[len(lengths) // 2] == pytest.approx(1000, rel=0.05)
    assert lengths[len(lengths) * 9 // 10] == pytest.approx(2000, rel=0.06)


def test_regimes_take_turns():
    other = Workload(prompt=Lengths(median=10), output=Lengths(median=10), rate_rps=5.0, name="b")
    arrivals = list(regimes([LOAD, other], period_s=10, duration_s=35, seed=1))
    assert {a.regime for a in arrivals if a.at_s < 10 or 20 <= a.at_s < 30} == {"a"}
    assert {a.regime for a in arrivals if 10 <= a.at_s < 20 or a.at_s >= 30} == {"b"}
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)


def test_a_burst_multiplies_the_rate_for_a_while():
    arrivals = list(burst(LOAD, factor=3, from_s=20, length_s=10, duration_s=60, seed=1))
    inside = sum(1 for a in arrivals if 20 <= a.at_s < 30)
    assert inside == pytest.approx(1500, rel=0.1)
    assert len(arrivals) - inside == pytest.approx(2500, rel=0.1)


def test_traces_can_be_squeezed_cut_and_shaken():
    arrivals = list(poisson(LOAD, duration_s=20, seed=1))
    assert [a.at_s for a in faster(arrivals, 2)] == [a.at_s / 2 for a in arrivals]
    part = list(window(arrivals, from_s=5, length_s=5))
    assert len(part) == sum(1 for a in arrivals if 5 <= a.at_s < 10)
    assert 0 <= part[0].at_s < 1
    shaken = jittered(arrivals, by_s=0.5, seed=2)
    assert [a.at_s for a in shaken] == sorted(a.at_s for a in shaken)
    assert sorted(a.prompt_tokens for a in shaken) == sorted(a.prompt_tokens for a in arrivals)


def test_shared_prefixes_are_shared_and_the_rest_is_not():
    load = Workload(
        prompt=Lengths(median=600), output=Lengths(median=10), rate_rps=20.0, shared_prefixes=2, prefix_tokens=1024
    )
    arrivals = list(poisson(load, duration_s=10, seed=1))
    assert len({a.blocks[:2] for a in arrivals}) == 2
    assert len({a.blocks[2:] for a in arrivals}) == len(arrivals)
    assert all(len(a.blocks) == 4 and a.prompt_tokens == 1624 for a in arrivals)
