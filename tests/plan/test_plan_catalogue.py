"""The catalogue of models and accelerators states published facts."""

import json

import pytest

from contracts.perf import TransferCost
from contracts.roofline import Deployment, decode_terms, kv_bytes_per_gpu_token, kv_capacity_tokens, prefill_terms
from pdgate.plan.hardware import accelerators, find_accelerator, parse_gpus
from pdgate.plan.models import find_model
from pdgate.plan.workload import WorkloadError

LLAMA = find_model("llama-3-70b").shape
DEEPSEEK = find_model("deepseek-ai/DeepSeek-V3").shape
GPUS = accelerators()


def test_llama_3_70b_takes_327680_bytes_a_token_in_16_bits():
    assert LLAMA.kv_bytes_per_token() == 327_680
    assert LLAMA.kv_bytes_per_token("fp8") == 163_840
    assert 4096 * LLAMA.kv_bytes_per_token() == pytest.approx(1.342e9, rel=1e-3)


@pytest.mark.parametrize(
    ("bytes_per_s", "ms"),
    [
        (GPUS["H100"].node_bytes_per_s, 2.98),  # NVLink in one direction, not its advertised 900 GB/s of both
        (25e9, 53.7),  # one 200 Gb/s network card at line rate
        (137e9, 9.8),  # what measured systems of several cards reach
    ],
)
def test_4096_tokens_of_llama_3_70b_take_this_long_over_each_link(bytes_per_s, ms):
    link = TransferCost(fixed_ms=0, bytes_per_ms=bytes_per_s / 1000, kv_bytes_per_token=LLAMA.kv_bytes_per_token())
    assert link.ms(4096) == pytest.approx(ms, rel=0.005)


def test_deepseek_v3_has_671_billion_weights_37_active_and_8_of_256_experts_plus_one():
    assert DEEPSEEK.total_weights == pytest.approx(671e9, rel=0.001)
    assert DEEPSEEK.active_weights == pytest.approx(37e9, rel=0.02)
    assert (DEEPSEEK.experts_per_token, DEEPSEEK.experts) == (8, 256)
    assert DEEPSEEK.shared_ffn == DEEPSEEK.expert_ffn


def test_the_latent_cache_of_deepseek_v3_is_one_57th_of_plain_attention():
    plain = 2 * DEEPSEEK.heads * 128 * DEEPSEEK.layers
    assert plain / DEEPSEEK.kv_elements == pytest.approx(57, abs=0.2)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3-8b", 8.03e9, None),
        ("llama-3-70b", 70.55e9, None),
        ("qwen3-32b", 32.8e9, None),
        ("Qwen/Qwen3-235B-A22B", 235e9, 22e9),
        ("gpt-oss-120b", 116.8e9, 5.1e9),
        ("kimi-k2", 1.03e12, 32e9),
    ],
)
def test_weights_add_up_to_the_published_counts(name, total, active):
    shape = find_model(name).shape
    assert shape.total_weights == pytest.approx(total, rel=0.01)
    if active:
        assert shape.active_weights == pytest.approx(active, rel=0.025)


def test_any_hugging_face_config_works(tmp_path):
    config = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 100, "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = find_model(str(tmp_path))
    # by hand: attention 64*16*2*(4+2), feed-forward 3*64*128, two layers, one embedding of 100*64
    assert found.shape.total_weights == 2 * (12_288 + 24_576) + 6_400
    assert found.weights == "fp8"
    assert found.shape.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 2


def test_a_config_without_a_needed_size_says_which(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(WorkloadError, match="num_hidden_layers is missing"):
        find_model(str(tmp_path / "config.json"))


def test_an_unknown_model_or_accelerator_names_the_known_ones():
    with pytest.raises(WorkloadError, match="llama-3-70b"):
        find_model("gpt-9")
    with pytest.raises(WorkloadError, match="H100"):
        find_accelerator("H999", GPUS)


def test_fleets_are_written_as_count_x_kind():
    (eight, h100), (four, card) = parse_gpus("8xH100, 4 x rtx pro 5000", GPUS)
    assert (eight, h100.name, four, card.name) == (8, "H100", 4, "RTX-PRO-5000")
    for wrong in ("H100", "0xH100", "8 H100", ""):
        with pytest.raises(WorkloadError, match="8xH100"):
            parse_gpus(wrong, GPUS)


def test_every_accelerator_states_its_source_and_a_dated_price():
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.price_dated
        assert gpu.price_note
        assert gpu.price_per_hour > 0


def test_amd_accelerators_have_the_data_sheets_figures():
    mi300x, mi325x, mi350x, mi355x = (GPUS[name] for name in ("MI300X", "MI325X", "MI350X", "MI355X"))
    assert {gpu.maker for gpu in (mi300x, mi325x, mi350x, mi355x)} == {"AMD"}
    assert (mi325x.memory_bytes, mi325x.bytes_per_s, mi325x.flops) == (256e9, 6.0e12, mi300x.flops)
    for gpu, hertz in ((mi350x, 2.2e9), (mi355x, 2.4e9)):
        # 256 compute units of 8,192 FP8 operations a clock; half of that in 16 bits, twice in four
        assert gpu.peak("fp8") == pytest.approx(256 * 8192 * hertz, rel=1e-3)
        assert gpu.peak("bf16") == pytest.approx(gpu.peak("fp8") / 2, rel=1e-3)
        assert gpu.peak("fp4") == pytest.approx(gpu.peak("fp8") * 2, rel=1e-3)
    # seven links a GPU, their advertised figure counts both directions
    assert mi300x.node_bytes_per_s == 7 * 128e9 / 2
    assert mi355x.node_bytes_per_s == pytest.approx(7 * 153.6e9 / 2, rel=2e-3)


def test_an_apple_gpu_has_three_quarters_of_the_machines_memory_and_computes_every_format_in_16_bits():
    ultra = GPUS["M3-Ultra"]
    assert ultra.memory_bytes == 0.75 * 512e9
    assert ultra.peak("bf16") == pytest.approx(80 * 128 * 2 * 1.38e9, rel=0.02)
    assert ultra.peak("fp8") == ultra.peak("int4") == ultra.peak("fp4") == ultra.peak("bf16")
    assert not ultra.hands_off


def test_the_users_own_accelerators_come_on_top(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("[Lab]\nmemory = 1e9\nbandwidth = 1e11\nflops = { bf16 = 1e12 }\nnode = 1e9\nnetwork = 1e9\n")
    assert accelerators(file)["Lab"].peak("fp8") == 1e12
    assert "H100" in accelerators(file)
    file.write_text("[Lab]\nspeed = 3\n")
    with pytest.raises(WorkloadError, match=r"own\.toml"):
        accelerators(file)


def test_decode_at_best_reads_the_weights_and_the_cache_once():
    terms = decode_terms(LLAMA, GPUS["H100"], Deployment(gpus=4, weights="fp8"), requests=1, kv_tokens=100_000)
    # 69.5e9 bytes over 4 x 3.35e12 B/s; 100,000 tokens x 327,680 bytes over the same
    assert terms.weights_ms == pytest.approx(5.187, rel=1e-3)
    assert terms.kv_ms == pytest.approx(2.445, rel=1e-3)


def test_a_prompt_at_best_takes_two_flops_a_weight_and_token():
    terms = prefill_terms(LLAMA, GPUS["H100"], Deployment(gpus=8, weights="bf16"), uncached_tokens=8192)
    assert terms.compute_ms == pytest.approx(2 * 69.5e9 * 8192 / (8 * 989e12) * 1000, rel=1e-3)
    # attention: 4 * 64 heads * 128 * 80 layers * n^2/2
    assert terms.attention_ms == pytest.approx(4 * 64 * 128 * 80 * 8192**2 / 2 / (8 * 989e12) * 1000, rel=1e-6)


def test_plain_attention_is_sharded_over_its_kv_heads_and_the_latent_is_copied():
    assert kv_bytes_per_gpu_token(LLAMA, Deployment(gpus=4)) == 327_680 / 4
    assert kv_bytes_per_gpu_token(LLAMA, Deployment(gpus=16)) == 327_680 / 8
    assert kv_bytes_per_gpu_token(DEEPSEEK, Deployment(gpus=8)) == 70_272
    assert kv_bytes_per_gpu_token(DEEPSEEK, Deployment(gpus=8, attention_dp=8)) == 70_272 / 8


def test_a_model_that_does_not_fit_has_no_room_for_kv():
    assert kv_capacity_tokens(LLAMA, GPUS["H100"], Deployment(gpus=1)) < 0
    assert kv_capacity_tokens(LLAMA, GPUS["H100"], Deployment(gpus=4)) > 400_000
