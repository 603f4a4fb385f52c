"""The files of one model: whether they are whole, and what they take in memory.

A folder in Hugging Face's form: `config.json`, `tokenizer.json`, and weights as `*.safetensors`. A safetensors file
begins with the length of its header (8 bytes, little endian) and the header itself, JSON that says where each
tensor's bytes are; so a download that broke off is seen without reading the weights.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from contracts.model_shape import ShapeError, shape_of
from contracts.roofline import ModelShape

_LENGTH_BYTES: Final = 8
_LONGEST_HEADER: Final = 100_000_000  # as the format allows


class ModelFilesError(ValueError):
    """A folder does not hold a whole model; the message says what is missing."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole folder holds."""

    shape: ModelShape
    context_tokens: int  # the longest that the model was made for; 0 = it does not say
    weight_bytes: int
    weight_files: int


def read_model_files(folder: Path) -> ModelFiles:
    """Return what a model's folder holds.

    Raises:
        ModelFilesError: no such folder, a file is missing or not whole, or the config does not say the sizes.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelFilesError(f"{folder} has no {name}")
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
        shape = shape_of(folder.name, config)
    except (OSError, msgspec.DecodeError, ShapeError) as error:
        raise ModelFilesError(f"{folder / 'config.json'}: {error}") from None
    files = _weight_files(folder)
    longest = (config.get("text_config") or config).get("max_position_embeddings", 0)
    return ModelFiles(
        shape=shape,
        context_tokens=longest if isinstance(longest, int) else 0,
        weight_bytes=sum(_whole(file) for file in files),
        weight_files=len(files),
    )


def _weight_files(folder: Path) -> Sequence[Path]:
    """Return the files that the index names, or all there are."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ModelFilesError(f"{folder} has no weights (*.safetensors)")
        return found
    try:
        named = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"].values()
        files = [folder / name for name in sorted(set(named)) if Path(name).name == name]
    except (OSError, msgspec.DecodeError, KeyError, AttributeError, TypeError) as error:
        raise ModelFilesError(f"{index}: {error!r}") from None
    lacking = [file.name for file in files if not file.is_file()]
    if lacking or not files:
        raise ModelFilesError(f"{folder} lacks weights that its index names: {', '.join(lacking[:3]) or 'all'}")
    return files


def _whole(file: Path) -> int:
    """Return the bytes of a file of weights. Raises ModelFilesError when it is shorter than its header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - _LENGTH_BYTES):
                raise ModelFilesError(f"{file} is not whole: its header is cut off")
            header = msgspec.json.decode(opened.read(length), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelFilesError(f"{file}: {error}") from None
    needed = _LENGTH_BYTES + length + max(_ends(header), default=0)
    if size < needed:
        raise ModelFilesError(f"{file} is not whole: {size} of {needed} bytes")
    return size


def _ends(header: dict[str, Any]) -> Iterator[int]:
    for name, tensor in header.items():
        offsets = tensor.get("data_offsets") if name != "__metadata__" and isinstance(tensor, dict) else None
        if isinstance(offsets, list) and len(offsets) == 2 and isinstance(offsets[1], int):
            yield offsets[1]
