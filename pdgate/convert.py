"""Makes model folders in Hugging Face's layout. Runs in the engine's environment, which has torch and gguf.

`python -m pdgate.convert smollm2 --gguf FILE --out FOLDER` dequantises SmolLM2 from GGUF;
`python -m pdgate.convert tiny --tokenizer FOLDER --out FOLDER` makes a random Llama of 6 MB for tests.
The output folder is written as it goes: the caller gives a temporary one and renames it.
"""

# ruff: noqa: PLC0415 - torch, gguf and numpy exist only in the engine's environment
import argparse
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")
_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4


class GgufModel:
    """A Llama-family model in one GGUF file."""

    def __init__(self, file: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(str(file))

    def field(self, name: str, default: Any = None) -> Any:
        """Return a metadata value."""
        field = self._reader.fields.get(name)
        return default if field is None else field.contents()

    def config(self) -> Mapping[str, Any]:
        """Return `config.json`."""
        hidden, heads = self.field("llama.embedding_length"), self.field("llama.attention.head_count")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": self.field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.field("llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "intermediate_size": self.field("llama.feed_forward_length"),
            "max_position_embeddings": self.field("llama.context_length"),
            "rope_theta": self.field("llama.rope.freq_base", 10000.0),
            "rms_norm_eps": self.field("llama.attention.layer_norm_rms_epsilon"),
            "vocab_size": len(self.field("tokenizer.ggml.tokens")),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": all(t.name != "output.weight" for t in self._reader.tensors),
            "torch_dtype": "bfloat16",
            "use_cache": True,
            **self.special_ids(),
        }

    def special_ids(self) -> Mapping[str, int]:
        """Return `generation_config.json`."""
        return {
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
        }

    def weights(self) -> dict[str, Any]:
        """Return all weights in bfloat16 under Hugging Face's names."""
        import numpy as np
        import torch
        from gguf import dequantize

        heads = {
            "attn_q": self.field("llama.attention.head_count"),
            "attn_k": self.field("llama.attention.head_count_kv"),
        }
        weights = {}
        for tensor in self._reader.tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
            name = _TOP.get(tensor.name)
            if name is None:
                found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
                if found is None or found[2] not in _IN_LAYER:
                    raise SystemExit(f"unknown tensor {tensor.name}: this is no plain Llama")
                name = f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.weight"
                if found[2] in heads:
                    values = _halves_of_heads(values, heads[found[2]])
            weights[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
        return weights

    def write_tokenizer(self, out: Path) -> None:
        """Write the byte-level BPE tokenizer and its chat template."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens: Sequence[str] = self.field("tokenizer.ggml.tokens")
        kinds: Sequence[int] = self.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, fuse_unk=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED)]
        tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
        tokenizer.save(str(out / "tokenizer.json"))

        def named(key: str) -> str | None:
            number = self.field(f"tokenizer.ggml.{key}_token_id")
            return None if number is None else tokens[number]

        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": named("bos"),
            "eos_token": named("eos"),
            "unk_token": named("unknown"),
            "pad_token": named("padding"),
            "chat_template": self.field("tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.field("llama.context_length"),
        }
        _write_json(out / "tokenizer_config.json", config)


def _halves_of_heads(weight: Any, num_heads: int) -> Any:
    """Return a query or key projection in Hugging Face's order of rotary halves.

    GGUF interleaves the two halves of each head. weight: (num_heads * head_dim, hidden).
    """
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def convert_gguf(file: Path, out: Path) -> None:
    """Write the model in `file` to the folder `out`."""
    from safetensors.torch import save_file

    model = GgufModel(file)
    model.write_tokenizer(out)
    _write_json(out / "config.json", model.config())
    _write_json(out / "generation_config.json", model.special_ids())
    save_file(model.weights(), out / "model.safetensors", metadata={"format": "pt"})


def make_tiny(tokenizer: Path, out: Path) -> None:
    """Write a random Llama: hidden 64, 2 layers, 4 heads, 2 KV heads, seed 0, the tokenizer of another model."""
    import torch
    from safetensors.torch import save_file

    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, out / name)
    shutil.copy(tokenizer / "generation_config.json", out / "generation_config.json")
    hidden, layers, heads, kv_heads, inner = 64, 2, 4, 2, 128
    head_dim = hidden // heads
    config = json.loads((tokenizer / "config.json").read_text()) | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    _write_json(out / "config.json", config)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 0.3) -> Any:
        return (torch.randn(*shape, generator=random) * scale).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=1.0),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        weights |= {f"{prefix}.{name}.weight": ones.clone() for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m pdgate.convert")
    kinds = parser.add_subparsers(dest="kind", required=True)
    smollm2 = kinds.add_parser("smollm2", help="dequantise a GGUF file")
    smollm2.add_argument("--gguf", type=Path, required=True)
    tiny = kinds.add_parser("tiny", help="make a small random model")
    tiny.add_argument("--tokenizer", type=Path, required=True)
    for kind in (smollm2, tiny):
        kind.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.kind == "smollm2":
        convert_gguf(given.gguf, given.out)
    else:
        make_tiny(given.tokenizer, given.out)


if __name__ == "__main__":
    main()
