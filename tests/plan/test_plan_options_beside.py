"""Speculation, a small local model, work without targets, the price book, and the catalogue entry that is written."""

import json
import sys
import tomllib

import pytest
from typer.testing import CliRunner

from contracts.catalog import read_catalog
from contracts.perf import DecodeCost
from pdgate.cli import app, main
from pdgate.plan import played
from pdgate.plan.beside import HYBRID, OFFLINE
from pdgate.plan.speculation import parse_speculation
from pdgate.plan.workload import WorkloadError
from scheduler.profile import PoolProfile

ASKED = ["plan", "--rate", "8", "--prompt-tokens", "1000", "--output-tokens", "200", "--gpus", "2xH100"]
ASKED += ["--model", "qwen3-8b", "--local-model", "qwen3-1.7b", "--no-simulation", "--json"]
BIG = ["--model", "llama-3-70b", "--weights", "fp8", "--gpus", "8xH100"]
QUICK = [*ASKED, "--slo", "ttft=1s,tpot=40ms"]


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_speculation_yields_the_tokens_that_its_acceptance_allows():
    """With 0.5 accepted and two drafts: 1 + 0.5 + 0.25 = 1.75 tokens a step, over three positions."""
    drafts = parse_speculation("accept=0.5,tokens=2,draft=0")
    assert drafts.tokens_per_step == pytest.approx(1.75)
    found = drafts.per_token(DecodeCost(fixed_ms=7.0, per_request_ms=0.7, per_kv_token_ms=0.07))
    assert found.fixed_ms == pytest.approx(4.0)
    assert found.per_request_ms == pytest.approx(1.2)  # 3 positions of 0.7 each, over 1.75 tokens
    assert found.per_kv_token_ms == pytest.approx(0.04)


def test_drafting_takes_time_in_the_decode_loop():
    """Four drafts of a quarter step each double the step; none is accepted, so each token costs twice."""
    drafts = parse_speculation("accept=0,tokens=4,draft=0.25")
    assert drafts.per_token(DecodeCost(fixed_ms=10.0)).fixed_ms == pytest.approx(20.0)


@pytest.mark.parametrize("text", ["0.7", "accept=1", "accept=0.7,tokens=0", "tokens=3", "accept=0.5,accept=0.6"])
def test_speculation_that_cannot_be_is_refused(text):
    with pytest.raises(WorkloadError, match="--speculate"):
        parse_speculation(text)


@pytest.fixture(scope="module")
def plain():
    return run(*QUICK)


def test_good_drafts_serve_more_and_useless_ones_less(plain):
    unified = plain["options"][0]["capacity_rps"]
    good = run(*QUICK, "--speculate", "accept=0.8,tokens=3,draft=0.02")["options"][0]["capacity_rps"]
    bad = run(*QUICK, "--speculate", "accept=0.0,tokens=3,draft=0.2")["options"][0]["capacity_rps"]
    assert bad < unified < good


def test_the_options_include_a_small_local_model_and_work_without_targets(plain):
    rows = {o["name"]: o for o in plain["options"]}
    assert "prompts, up to 512 tokens, get the small model's answers" in rows[HYBRID]["note"]
    assert "qwen3-1.7b" in rows[HYBRID]["workers"]
    assert rows[OFFLINE]["note"].startswith("do not split")
    assert rows[OFFLINE]["capacity_rps"] >= rows["unified"]["capacity_rps"]
    assert HYBRID not in {o["name"] for o in run(*QUICK, "--local-model", "none")["options"]}


def test_a_model_as_small_as_the_local_one_has_no_hybrid():
    rows = {o["name"] for o in run(*QUICK, "--model", "qwen3-1.7b")["options"]}
    assert HYBRID not in rows
    assert OFFLINE in rows


CATALOG = """
[models.tiny]
tokenizer = "tiny"
context_tokens = 8192
[models.tiny.price]
prefill_computed = "1.00"
prefill_cached = "0.10"
decode = "4.00"
"""


def test_the_margin_is_that_of_the_catalogues_price_book(tmp_path):
    """1,000 prompt tokens at 1.00 and 200 answered at 4.00 a million, 8/s: (1,000 + 800) x 28,800 / 1e6 = 51.84/h."""
    file = tmp_path / "models.toml"
    file.write_text(CATALOG)
    found = run(*QUICK, "--sell", f"{file}:tiny")
    assert found["money"]["revenue_per_hour"] == pytest.approx(51.84, rel=0.01)
    assert found["money"]["margin"] == pytest.approx(1 - 2 * 2.95 / 51.84, abs=0.01)


def test_the_written_file_has_a_catalogue_entry_that_the_scheduler_reads(tmp_path):
    written = tmp_path / "scheduler.toml"
    plan = run(*ASKED, *BIG, "--slo", "ttft=1s,tpot=22ms", "--write", str(written))
    assert plan["verdict"] == "split"
    ours = tomllib.loads(written.read_text())["models"][plan["model"]]
    block = written.read_text().partition(f'[models."{plan["model"]}"]\n')[2]
    own, tables = block[: block.index("\n[")], block[block.index("\n[") :]
    merged = tmp_path / "models.toml"
    catalog = CATALOG.replace("models.tiny", f'models."{plan["model"]}"')
    merged.write_text(catalog.replace("context_tokens = 8192", f"context_tokens = 8192\n{own}") + tables)
    profile = PoolProfile.of(read_catalog(merged), plan["model"])
    assert profile.target.tpot_ms == 22
    assert profile.latency is not None
    assert profile.latency.decode.fixed_ms == plan["latency"]["decode"]["decode"]["fixed_ms"]
    assert profile.latency.prefill.fixed_ms == plan["latency"]["prefill"]["prefill"]["fixed_ms"]
    assert ours["hand_off"] == plan["hand_off"]


def test_the_same_question_has_the_same_answer_to_the_byte(monkeypatch):
    monkeypatch.setattr(played, "SAMPLE", 150)
    monkeypatch.setattr(played, "MOST", 150)
    asked = ["plan", "--rate", "20", "--prompt-tokens", "300", "--output-tokens", "20", "--gpus", "2xH100", "--json"]
    asked += ["--model", "llama-3-8b"]
    one, two = (CliRunner().invoke(app, asked).stdout for _ in range(2))
    assert one == two
    assert json.loads(one)["simulation"]["fleets"]


def test_a_fleet_that_nothing_can_save_says_what_binds_on_a_large_one(monkeypatch):
    """One L40S does not hold the model, yet on eight it fits: then it is the targets that no fleet keeps."""
    found = run(*QUICK, "--model", "llama-3-70b", "--gpus", "1xL40S", "--slo", "ttft=1s,tpot=5ms")
    assert found["verdict"] == "infeasible"
    assert "memory bandwidth" in found["reason"]
    monkeypatch.setattr(sys, "argv", ["pdgate", *QUICK, "--sell", "missing.toml:tiny"])
    with pytest.raises(SystemExit):
        main()
