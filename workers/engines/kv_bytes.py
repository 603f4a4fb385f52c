"""How large the KV cache of a token is, from SGLang's own reading of a model's configuration."""

from typing import Any, Final

_BYTES_OF: Final = {"fp8": 1.0, "int8": 1.0, "fp4": 0.5, "bf16": 2.0, "bfloat16": 2.0, "fp16": 2.0, "float16": 2.0}


def kv_bytes_per_token(config: Any, *, kv_dtype: str) -> int:
    """Return the bytes of one token's KV cache over all layers that keep the whole context, one copy.

    Tensor parallelism splits it or, with latent attention (MLA), repeats it: this is the token's own. Layers with a
    window or a state of fixed size are left out, since what they hold does not grow with the tokens.

    Args:
        config: SGLang's ModelConfig.
        kv_dtype: the server's `kv_cache_dtype`; `auto` is the model's own.
    """
    growing = config.full_attention_layer_ids or getattr(config.hf_text_config, "full_attention_layer_ids", None)
    num_layers = len(growing) if growing else int(config.num_attention_layers)
    if config.attention_arch.name == "MLA":
        elements = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        elements = config.get_total_num_kv_heads() * (config.head_dim + config.v_head_dim)
    return int(elements * num_layers * _bytes_of(kv_dtype, config))


def _bytes_of(kv_dtype: str, config: Any) -> float:
    if kv_dtype == "auto":
        return float(config.dtype.itemsize)
    return _BYTES_OF[kv_dtype.split("_", 1)[0]]
