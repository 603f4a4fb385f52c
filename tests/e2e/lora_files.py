"""Makes a random LoRA adapter for a model, and the model with the adapter merged in; run by the engine's Python."""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8


def main(model: Path, out: Path) -> None:
    weights = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    torch.manual_seed(1)
    adapter = {}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "v_proj.weight"))]:
        rows, columns = weights[name].shape
        a, b = torch.randn(RANK, columns) * 0.3, torch.randn(rows, RANK) * 0.3
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        weights[name] += ALPHA / RANK * b @ a
    shutil.copytree(model, out / "merged")
    save_file(weights, out / "merged" / "model.safetensors", metadata={"format": "pt"})
    (out / "adapter").mkdir()
    save_file(adapter, out / "adapter" / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj", "v_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (out / "adapter" / "adapter_config.json").write_text(json.dumps(config))


main(Path(sys.argv[1]), Path(sys.argv[2]))
