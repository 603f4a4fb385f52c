"""Write a Llama-shaped checkpoint of Hugging Face's layout as GGUF, for llama.cpp: `python to_gguf.py FOLDER FILE`.

Runs in the engine's environment, which has gguf and numpy.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

WORDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return a projection (num_heads * head_dim, hidden) whose rotary pairs are neighbours instead of halves apart."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensors(file: Path) -> dict[str, np.ndarray]:
    """Return every tensor as float32. numpy has no bfloat16: its bits are the upper half of a float32's."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, info in header.items():
        begin, end = (start + offset for offset in info["data_offsets"])
        if info["dtype"] == "BF16":
            values = (np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw[begin:end], {"F16": np.float16, "F32": np.float32}[info["dtype"]])
        found[name] = values.astype(np.float32).reshape(info["shape"])
    return found


def add_shape(writer: gguf.GGUFWriter, config: dict) -> None:
    """Write what the model is."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def add_tokenizer(writer: gguf.GGUFWriter, config: dict, tokenizer: dict) -> None:
    """Write the vocabulary, merges and special tokens of a byte-level BPE."""
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    words |= {number: token["content"] for number, token in added.items()}
    kinds = {
        number: gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED for number in added
    }
    numbers = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([words.get(number, f"<unused {number}>") for number in numbers])
    normal, unused = gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    writer.add_token_types([kinds.get(number, normal if number in words else unused) for number in numbers])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main(folder: Path, file: Path) -> None:
    """Write it all."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    add_shape(writer, config)
    add_tokenizer(writer, config, json.loads((folder / "tokenizer.json").read_text()))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, weight in tensors(folder / "model.safetensors").items():
        of = name.removesuffix(".weight")
        if of in WORDS:
            writer.add_tensor(f"{WORDS[of]}.weight", weight)
            continue
        _, _, layer, part = of.split(".", 3)
        kind = LAYER[part]
        turned = interleaved(weight, heads[kind]) if kind in heads else weight
        writer.add_tensor(f"blk.{layer}.{kind}.weight", np.ascontiguousarray(turned))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
