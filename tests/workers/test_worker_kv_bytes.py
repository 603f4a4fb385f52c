"""The KV cache of a token, by hand, and in the records that billing's cost rows come from."""

import enum
from types import SimpleNamespace

import pytest

from workers.engines.kv_bytes import kv_bytes_per_token


class Arch(enum.Enum):
    """SGLang's names."""

    MLA = 1
    MHA = 2


def config(arch=Arch.MHA, *, kv_heads=8, itemsize=2, **fields):
    known = {
        "attention_arch": arch, "full_attention_layer_ids": None, "hf_text_config": SimpleNamespace(),
        "num_attention_layers": 80, "head_dim": 128, "v_head_dim": 128, "dtype": SimpleNamespace(itemsize=itemsize),
        "get_total_num_kv_heads": lambda: kv_heads,
    }  # fmt: skip
    return SimpleNamespace(**(known | fields))


@pytest.mark.parametrize(
    ("model", "kv_dtype", "right"),
    [
        (config(), "auto", 327_680),  # Llama-3-70B: 2 x 8 heads x 128 x 80 layers x 2 bytes
        (config(), "fp8_e4m3", 163_840),
        (config(itemsize=4), "auto", 655_360),
        (config(itemsize=4), "bf16", 327_680),
        (config(kv_heads=3, num_attention_layers=30, head_dim=64, v_head_dim=64), "auto", 23_040),  # SmolLM2-135M
        # DeepSeek-V3: one latent of 512 and 64 rotary numbers in each of 61 layers
        (config(Arch.MLA, num_attention_layers=61, kv_lora_rank=512, qk_rope_head_dim=64), "auto", 70_272),
        (config(num_attention_layers=48, full_attention_layer_ids=list(range(12))), "auto", 12 * 2 * 8 * 128 * 2),
    ],
)
def test_a_tokens_kv_cache_is_what_the_model_and_its_type_say(model, kv_dtype, right):
    assert kv_bytes_per_token(model, kv_dtype=kv_dtype) == right
