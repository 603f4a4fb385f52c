"""Mixtures: expert-parallel degrees per phase, the exchange of tokens, and uneven hits."""

import json

import msgspec
import pytest
from typer.testing import CliRunner

from contracts.roofline import Deployment, ExpertLoad, all_to_all_ms, decode_terms, prefill_terms, touched_experts
from pdgate.cli import app
from pdgate.plan.experts import Hits, expert_load, imbalance, read_hits
from pdgate.plan.hardware import accelerators
from pdgate.plan.models import find_model
from pdgate.plan.workload import WorkloadError

DEEPSEEK = find_model("deepseek-v3").shape
H200 = accelerators()["H200"]


def test_greedy_placement_leaves_the_imbalance_worked_out_by_hand():
    """4, 2, 1, 1 on two GPUs with two slots each: 4+1 and 2+1 of 8, so the busiest has 5/4 of the mean."""
    assert imbalance([4, 2, 1, 1], 2) == pytest.approx(1.25)
    # a copy of the first makes 2, 2, 2, 1, 1: four tokens on each
    assert imbalance([4, 2, 1, 1], 2, copies=1) == pytest.approx(1.0)
    assert imbalance([1] * 8, 4) == pytest.approx(1.0)


def test_the_exchange_within_a_node_is_bytes_over_its_links():
    """Two GPUs, one pick: half of 5 tokens each go over, 3 bytes a number there and back."""
    shape = msgspec.structs.replace(DEEPSEEK, layers=4, dense_layers=3, hidden=1000, experts=2, experts_per_token=1)
    use = Deployment(gpus=2, attention_dp=2, experts=ExpertLoad(apart=True))
    gpu = msgspec.structs.replace(H200, node_bytes_per_s=7500.0)
    assert all_to_all_ms(shape, gpu, use, 10) == pytest.approx(1000.0)


def test_between_nodes_the_cards_set_the_time():
    """16 GPUs on two nodes: a token crosses to the other node with 1 - 0.5^8, half of that is abroad, once per node."""
    use = Deployment(gpus=16, attention_dp=16, experts=ExpertLoad(apart=True))
    abroad = 2 * (1 - 0.5**8) * 0.5
    expected = 16 / 16 * abroad * DEEPSEEK.moe_layers * DEEPSEEK.hidden * 3 / H200.network_bytes_per_s * 1000
    assert all_to_all_ms(DEEPSEEK, H200, use, 16) == pytest.approx(expected)
    near = msgspec.structs.replace(H200, gpus_per_node=16)
    assert all_to_all_ms(DEEPSEEK, near, use, 16) < expected


def test_a_few_hot_experts_are_read_by_any_step_and_the_others_by_none():
    shape = msgspec.structs.replace(DEEPSEEK, experts=4, experts_per_token=2)
    assert touched_experts(shape, 100, (1.0, 1.0, 0.0, 0.0)) == pytest.approx(2.0)
    assert touched_experts(shape, 1) == pytest.approx(2.0)
    assert touched_experts(shape, 1e6) == pytest.approx(4.0)


def test_uneven_hits_cost_each_phase_by_its_own_recording():
    """Prefill hits all experts alike, decode only eight of them: one GPU of 32 has a quarter of decode's work."""
    hot = [1.0] * 8 + [1e-9] * 248
    hits = Hits(prefill=[[1.0] * 256], decode=[hot])
    load = expert_load(hits, DEEPSEEK, 32)
    assert load.prefill_imbalance == pytest.approx(1.0)
    assert load.decode_imbalance == pytest.approx(4.0)  # eight equal ones on 8 of 32 GPUs
    use = Deployment(gpus=32, attention_dp=32, weights="fp8", experts=load)
    even = Deployment(gpus=32, attention_dp=32, weights="fp8", experts=ExpertLoad(apart=True))
    one, two = (prefill_terms(DEEPSEEK, H200, u, uncached_tokens=100) for u in (use, even))
    assert one.moe_compute_ms == two.moe_compute_ms
    one, two = (decode_terms(DEEPSEEK, H200, u, requests=512, kv_tokens=0) for u in (use, even))
    # eight experts instead of all 256, on eight GPUs instead of 32
    assert one.experts_ms / two.experts_ms == pytest.approx(8 / 256 * 4, rel=1e-3)


def test_a_recording_of_another_model_is_refused(tmp_path):
    file = tmp_path / "hits.json"
    file.write_text(json.dumps({"decode": [[1, 2, 3]]}))
    with pytest.raises(WorkloadError, match="decode layer 0 has 3 counts; deepseek-v3 has 256 experts"):
        read_hits(file, DEEPSEEK)


ASKED = ["plan", "--rate", "2", "--prompt-tokens", "3000", "--output-tokens", "500", "--model", "deepseek-v3"]
ASKED += ["--gpus", "16xH200", "--slo", "ttft=3s,tpot=40ms", "--no-simulation", "--local-model", "none", "--json"]


def ask(*arguments):
    result = CliRunner().invoke(app, [*ASKED, *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_with_expert_parallelism_roles_do_not_flip_and_the_plan_says_what_replaces_it(tmp_path):
    plan = ask("--write", str(tmp_path / "scheduler.toml"))
    mixture = plan["mixture"]
    assert not mixture["flips"]
    assert "whole groups per phase" in mixture["instead"]
    degrees = {r["role"]: r["degree"] for r in mixture["roles"]}
    assert max(degrees.values()) > 1
    assert all(r["exchange_ms"] > 0 for r in mixture["roles"] if r["degree"] > 1)
    assert "SCHEDULER_RATIO_MODE=manual" in (tmp_path / "scheduler.toml").read_text()


def test_without_it_experts_are_cut_and_roles_may_flip():
    plan = ask("--no-expert-parallel")
    assert plan["mixture"]["flips"]
    assert {r["degree"] for r in plan["mixture"]["roles"]} == {1}
