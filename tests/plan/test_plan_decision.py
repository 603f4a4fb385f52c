"""The decision, its money and its reasons."""

import msgspec
import pytest

from contracts.slo import SloTarget
from pdgate.plan.decide import WORTH
from pdgate.plan.described import Description, preset_workload, sample
from pdgate.plan.fit import fitted
from pdgate.plan.hardware import accelerators, parse_gpus
from pdgate.plan.models import find_model
from pdgate.plan.money import Prices
from pdgate.plan.plan import make_plan
from pdgate.plan.question import Question
from pdgate.plan.workload import WorkloadError

GPUS = accelerators()
CHAT = Description(rate_rps=10, prompt_tokens=1155, output_tokens=211, sample=1000)


def plan_of(
    load=CHAT,
    *,
    model="llama-3-70b",
    gpus="8xH100",
    ttft_ms=1000.0,
    tpot_ms=30.0,
    surface=False,
    simulation=False,
    **asked,
):
    question = Question(
        workload=sample(load) if isinstance(load, Description) else load,
        shape=find_model(model).shape,
        weights="fp8",
        fit=fitted(),
        fleet=tuple(parse_gpus(gpus, GPUS)),
        target=SloTarget(ttft_ms=ttft_ms, tpot_ms=tpot_ms),
        **asked,
    )
    return make_plan(question, with_simulation=simulation, with_surface=surface)


@pytest.fixture(scope="module")
def tight():
    return plan_of(prices=Prices(prefill_computed=1.0, prefill_cached=0.2, decode=4.0), network_per_hour=2.0)


def test_a_tight_tpot_and_a_roomy_ttft_are_worth_a_split(tight):
    assert tight.verdict == "split"
    assert tight.goodput_gain >= WORTH
    assert tight.prefill >= 1
    assert tight.decode >= 1
    assert tight.unified == 0
    assert tight.hand_off == "direct"
    assert tight.rule.pays
    assert tight.prefill * tight.parallelism.prefill + tight.decode * tight.parallelism.decode <= 8


def test_machines_that_no_engine_hands_kv_between_are_not_split():
    answer = plan_of(
        gpus="8xM3-Ultra", ttft_ms=20_000.0, tpot_ms=500.0, load=msgspec.structs.replace(CHAT, rate_rps=0.1)
    )
    assert answer.verdict == "unified"
    assert answer.reason.startswith("no engine hands KV over on these machines")
    assert {o.note for o in answer.options if o.name.startswith("split")} == {
        "no engine hands KV over on these machines"
    }
    assert any("no run on M3-Ultra" in text for text in answer.assumptions)


def test_nor_are_they_offered_for_decode_beside_other_gpus():
    answer = plan_of(alternatives=(GPUS["M3-Ultra"], GPUS["MI355X"]))
    beside = [o for o in answer.options if o.name.startswith("decode on")]
    assert [o.name for o in beside] == ["decode on MI355X"]
    assert "does your engine hand KV over from NVIDIA to AMD?" in beside[0].note


def test_tensorrt_llm_runs_on_nvidia_only():
    with pytest.raises(WorkloadError, match="trtllm does not run on MI300X"):
        plan_of(gpus="8xMI300X", engine="trtllm")


def test_a_loose_tpot_is_not(tight):
    loose = plan_of(tpot_ms=200.0)
    assert loose.verdict == "unified"
    assert loose.goodput_gain < WORTH
    assert (loose.prefill, loose.decode) == (0, 0)
    assert loose.unified >= 1
    assert loose.hand_off is None


def test_offline_work_is_never_split():
    _, batch = preset_workload("batch")
    answer = plan_of(batch, ttft_ms=None, tpot_ms=None)
    assert answer.verdict == "unified"
    assert answer.rule is None


def test_a_model_that_does_not_fit_names_memory_and_the_smallest_fleet():
    answer = plan_of(gpus="1xH100")
    assert answer.verdict == "infeasible"
    assert "memory" in answer.binding
    assert answer.unified + answer.prefill > 0
    assert answer.expected.attainment >= 0.9


def test_a_target_that_one_step_breaks_names_bandwidth_and_no_fleet():
    answer = plan_of(tpot_ms=3.0)
    assert answer.verdict == "infeasible"
    assert "memory bandwidth" in answer.binding
    assert (answer.prefill, answer.decode, answer.unified) == (0, 0, 0)
    assert answer.cost_per_million is None


def test_prompts_that_take_longer_than_ttft_alone_name_prefill_compute():
    answer = plan_of(Description(rate_rps=1, prompt_tokens=50_000, output_tokens=100, sample=500), ttft_ms=500.0)
    assert answer.verdict == "infeasible"
    assert "prefill compute" in answer.binding
    assert "idle worker" in answer.binding


def test_too_high_a_rate_names_what_runs_out_and_a_fleet_that_serves_it():
    answer = plan_of(msgspec.structs.replace(CHAT, rate_rps=60))
    assert answer.verdict == "infeasible"
    assert answer.capacity_rps >= 60
    used = answer.prefill * answer.parallelism.prefill + answer.decode * answer.parallelism.decode
    assert used + answer.unified * answer.parallelism.unified > 8


def test_the_meters_together_cost_what_the_fleet_costs(tight):
    seconds = 3600 * tight.planned_rps
    load = tight.workload
    million = tight.money.per_million
    hit = tight.expected.prefix_hit
    prompt = load.prompt.mean * seconds / 1e6
    total = (
        million.prefill_computed * prompt * (1 - hit)
        + million.prefill_cached * prompt * hit
        + million.decode * load.output.mean * seconds / 1e6
    )
    assert total == pytest.approx(tight.money.per_hour.total, rel=0.01)
    assert tight.money.per_hour.total == pytest.approx(8 * GPUS["H100"].price_per_hour + 2.0, rel=1e-6)
    assert tight.money.per_hour.transfer == 2.0


def test_the_margin_is_what_tenants_pay_less_the_cost(tight):
    seconds = 3600 * tight.planned_rps / 1e6
    revenue = (tight.workload.prompt.mean * 1.0 + tight.workload.output.mean * 4.0) * seconds
    assert tight.money.revenue_per_hour == pytest.approx(revenue, rel=0.01)
    assert tight.money.margin == pytest.approx(1 - tight.money.per_hour.total / revenue, abs=0.01)


def test_cached_tokens_are_cheaper_than_computed_ones():
    answer = plan_of(msgspec.structs.replace(CHAT, prefix_reuse=0.5, prompt_tokens=4000, rate_rps=3), ttft_ms=3000.0)
    million = answer.cost_per_million
    assert 0 < million.prefill_cached < million.prefill_computed


def test_prefix_hits_raise_what_a_split_serves():
    reused = plan_of(msgspec.structs.replace(CHAT, prefix_reuse=0.5, prompt_tokens=4000, rate_rps=3), ttft_ms=3000.0)
    rows = {o.name: o.capacity_rps for o in reused.options}
    assert rows["split with prefix reuse"] > rows["split without prefix reuse"]


def test_the_report_says_what_the_answer_depends_on(tight):
    found = tight.sensitivity
    assert tight.goodput_gain_low <= tight.goodput_gain <= tight.goodput_gain_high
    assert len(found.cases) >= 15
    assert set(found.would_change) == {c.change for c in found.cases if c.flips}
    assert found.network_needed_gb is not None
    by_network = [p.capacity_rps for p in found.network]
    assert by_network == sorted(by_network)


def test_a_peak_sizes_the_fleet_and_money_stays_at_the_mean_rate():
    flat = plan_of(msgspec.structs.replace(CHAT, rate_rps=5))
    peaky = plan_of(msgspec.structs.replace(CHAT, rate_rps=5), peak=2.0)
    assert peaky.planned_rps == pytest.approx(2 * flat.planned_rps)
    assert peaky.expected.decode_busy > flat.expected.decode_busy
    assert peaky.money.per_hour.total == pytest.approx(flat.money.per_hour.total)
    assert peaky.money.per_million.decode == pytest.approx(flat.money.per_million.decode, rel=0.2)


def test_two_kinds_of_gpu_are_tried_both_ways_round():
    answer = plan_of(gpus="8xH100,8xL40S")
    names = [o.name for o in answer.options]
    assert "split over two kinds of GPU" in names
    assert any("leaves 8xL40S without work" in o.note for o in answer.options)


def test_other_hardware_for_decode_is_offered_as_such():
    answer = plan_of(alternatives=(GPUS["H20"], GPUS["H100"], GPUS["H200"]))
    others = [o for o in answer.options if o.name.startswith("decode on")]
    assert {o.name for o in others} <= {"decode on H20", "decode on H200"}
    assert others
    assert all("not your fleet" in o.note for o in others)
    assert all(o.price_per_hour <= 8 * GPUS["H100"].price_per_hour + 1e-6 for o in others)


def test_from_eight_workers_on_a_split_keeps_a_unified_one_and_two_of_each_role():
    answer = plan_of(msgspec.structs.replace(CHAT, rate_rps=60), gpus="32xH100")
    assert answer.verdict in ("split", "mixed")
    if answer.prefill + answer.decode + answer.unified >= 8:
        assert answer.unified >= 1
    assert answer.prefill >= 2
    assert answer.decode >= 2


def test_the_surface_covers_prompt_lengths_and_fleets():
    answer = plan_of(msgspec.structs.replace(CHAT, sample=300), surface=True)
    assert len({p.gpus for p in answer.surface}) == 4
    assert len({p.prompt_tokens for p in answer.surface}) == 5


def test_the_same_question_gets_the_same_answer(tight):
    again = plan_of(prices=Prices(prefill_computed=1.0, prefill_cached=0.2, decode=4.0), network_per_hour=2.0)
    assert again == tight


def test_simulation_and_closed_form_agree_where_neither_is_near_its_limit():
    found = plan_of(msgspec.structs.replace(CHAT, rate_rps=9, sample=600), simulation=True).simulation
    assert found.agree
    assert not found.why
    assert found.requests == 600
    for fleet in found.fleets:
        assert fleet.simulated == pytest.approx(fleet.closed_form, abs=0.05)
    assert found.gain_simulated >= WORTH
    assert found.gain_closed_form >= WORTH


def test_the_report_says_why_it_did_not_simulate():
    offline = plan_of(ttft_ms=None, tpot_ms=None, simulation=True).simulation
    assert not offline.agree
    assert "without targets" in offline.why


def test_simulated_blocks_hold_the_prefixes_of_the_traffic():
    """Prefix hits must count alike in both, whatever the traffic's block size."""
    load = msgspec.structs.replace(CHAT, prefix_reuse=0.5, prompt_tokens=4000, rate_rps=3, sample=600)
    found = plan_of(load, ttft_ms=3000.0, simulation=True).simulation
    assert found.agree, found.why
