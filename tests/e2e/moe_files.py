"""Makes a tiny Qwen3-MoE with random weights; run by the engine's Python.

Arguments: a folder with a tokenizer, and the folder to write.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

CONFIG = Qwen3MoeConfig(
    vocab_size=49152,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
    tie_word_embeddings=False,
)


def main(tokenizer: Path, out: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(CONFIG).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.0 if "embed" in name else 0.2 if "lm_head" in name else 0.3)
    model.save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, out)


main(Path(sys.argv[1]), Path(sys.argv[2]))
