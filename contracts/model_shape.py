"""The sizes of a model, read from its Hugging Face `config.json`. Pure."""

from collections.abc import Mapping
from typing import Any

from contracts.roofline import ModelShape


class ShapeError(ValueError):
    """A config does not say what is needed; the message names the model and the size."""


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a Hugging Face config describes.

    Raises:
        ShapeError: a needed size is missing.
    """
    config = config.get("text_config") or config

    def size(field: str, *others: str, default: int | None = None) -> int:
        for key in (field, *others):
            if isinstance(config.get(key), int):
                return int(config[key])
        if default is None:
            raise ShapeError(f"config of {name}: {field} is missing")
        return default

    layers, hidden, heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
    experts = size("n_routed_experts", "num_experts", "num_local_experts", default=0)
    ffn = size("intermediate_size", default=0)
    expert_ffn = size("moe_intermediate_size", default=ffn) if experts else 0
    shared = size("n_shared_experts", default=0) * expert_ffn or size("shared_expert_intermediate_size", default=0)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        vocab=size("vocab_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        ffn=ffn,
        dense_layers=size("first_k_dense_replace", default=0) if experts else layers,
        experts=experts,
        experts_per_token=size("num_experts_per_tok", "experts_per_token", default=0),
        expert_ffn=expert_ffn,
        shared_ffn=shared if experts else 0,
        latent_rank=size("kv_lora_rank", default=0),
        rope_dim=size("qk_rope_head_dim", default=0),
        nope_dim=size("qk_nope_head_dim", default=0),
        value_dim=size("v_head_dim", default=0),
        query_rank=size("q_lora_rank", default=0),
        full_attention_layers=_growing_layers(config, layers),
        linear_layer_weights=_linear_layer_weights(config, hidden),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _growing_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers whose KV grows with the context; 0 = all. Windows are a small constant per request and left out."""
    if isinstance(config.get("full_attention_layers"), int):
        return int(config["full_attention_layers"])
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        return kinds.count("full_attention")
    interval = config.get("full_attention_interval")
    return layers // interval if isinstance(interval, int) and interval > 1 else 0


def _linear_layer_weights(config: Mapping[str, Any], hidden: int) -> int:
    """Weights of one gated linear-attention layer: its query, key, value, gate and output projections."""
    keys = config.get("linear_num_key_heads", 0) * config.get("linear_key_head_dim", 0)
    values = config.get("linear_num_value_heads", 0) * config.get("linear_value_head_dim", 0)
    return int(hidden * (2 * keys + 2 * values) + values * hidden) if keys and values else 0
