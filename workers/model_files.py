"""Which model a worker has: a revision that two workers of one pool must share to be paired."""

import hashlib
from pathlib import Path

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".gguf"})


def model_revision(folder: Path) -> str:
    """Return 12 hex digits over the bytes of config.json and the names and sizes of all weight files.

    Raises:
        FileNotFoundError: the folder has no config.json.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.iterdir()):
        if file.suffix in WEIGHT_SUFFIXES:
            digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]
