"""Traces in the format of Dynamo's mocker: for both environments."""

import json
from collections.abc import Iterable
from pathlib import Path

BLOCK_TOKENS = 512
"""Prompt tokens of a trace's block."""


def write_trace(file: Path, requests: Iterable[tuple[float, int, int]]) -> None:
    """Write requests (s, prompt tokens, answer tokens) in the mocker's own format, no block shared."""
    fresh = 0
    with file.open("w", encoding="utf-8") as lines:
        for at_s, prompt_tokens, output_tokens in requests:
            blocks = -(-prompt_tokens // BLOCK_TOKENS)
            row = {
                "timestamp": round(at_s * 1000, 3),
                "input_length": prompt_tokens,
                "output_length": output_tokens,
                "hash_ids": list(range(fresh, fresh + blocks)),
            }
            fresh += blocks
            lines.write(json.dumps(row) + "\n")
