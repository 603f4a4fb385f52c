"""The catalogue of models, `models.toml`, and shapes from any Hugging Face `config.json`."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from contracts.roofline import ModelShape
from pdgate.plan.workload import WorkloadError

CATALOGUE = Path(__file__).with_name("models.toml")


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model and the format its weights are usually served in."""

    shape: ModelShape
    weights: str
    source: str


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    config: Mapping[str, Any]
    aliases: tuple[str, ...] = ()
    weights: str = "bf16"
    source: str = ""


def known_models() -> dict[str, KnownModel]:
    """Return the catalogue by every name and alias, in lower case."""
    rows = msgspec.convert(tomllib.loads(CATALOGUE.read_text()), dict[str, _Row])
    found: dict[str, KnownModel] = {}
    for name, row in rows.items():
        model = KnownModel(shape=shape_of(name, row.config), weights=row.weights, source=row.source)
        for alias in (name, *row.aliases):
            found[alias.lower()] = model
            found[alias.lower().rpartition("/")[2]] = model
    return found


def find_model(name: str) -> KnownModel:
    """Return a model by catalogue name, Hugging Face id, or path of a config.json (or the folder holding it).

    Raises:
        WorkloadError: not known and no such file, or a config without the needed sizes.
    """
    known = known_models()
    if name.lower() in known:
        return known[name.lower()]
    file = Path(name)
    if file.is_dir():
        file /= "config.json"
    if not file.is_file():
        names = ", ".join(sorted({model.shape.name for model in known.values()}))
        raise WorkloadError(f"model {name!r} is neither one of {names} nor a config.json")
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise WorkloadError(f"{file}: {error}") from None
    shape = shape_of(file.parent.name or file.stem, config)
    return KnownModel(shape=shape, weights=_weights_of(config), source=str(file))


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a Hugging Face config describes.

    Raises:
        WorkloadError: a needed size is missing.
    """
    config = config.get("text_config") or config

    def size(field: str, *others: str, default: int | None = None) -> int:
        for key in (field, *others):
            if isinstance(config.get(key), int):
                return int(config[key])
        if default is None:
            raise WorkloadError(f"config of {name}: {field} is missing")
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


def _weights_of(config: Mapping[str, Any]) -> str:
    quantized = config.get("quantization_config") or {}
    method = str(quantized.get("quant_method", "")).lower()
    if method in ("mxfp4", "nvfp4", "modelopt_fp4"):
        return "fp4"
    if "fp8" in method:
        return "fp8"
    return "int4" if method in ("awq", "gptq") else "bf16"
