"""Folders that hold a whole, tiny model: real files in Hugging Face's form, without an engine that could load them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 2000,
    "max_position_embeddings": 1024,
}
KV_BYTES_PER_TOKEN = 2 * 2 * 16 * 2 * 2  # keys and values, two heads of 16, two layers, two bytes each


def write_model(folder: Path, tokenizer: Path, *, config: Mapping[str, Any] = CONFIG, weight_bytes: int = 4096) -> Path:
    """Write a model with one file of weights and the tokenizer of another folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    write_weights(folder / "model.safetensors", weight_bytes)
    return folder


def write_weights(file: Path, weight_bytes: int) -> None:
    """Write a safetensors file with one tensor of so many bytes."""
    tensor = {"dtype": "U8", "shape": [weight_bytes], "data_offsets": [0, weight_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(weight_bytes))
