"""The catalogue of models, `models.toml`, and shapes from any Hugging Face `config.json`."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from contracts.model_shape import ShapeError, shape_of
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
    try:
        shape = shape_of(file.parent.name or file.stem, config)
    except ShapeError as error:
        raise WorkloadError(str(error)) from None
    return KnownModel(shape=shape, weights=_weights_of(config), source=str(file))


def _weights_of(config: Mapping[str, Any]) -> str:
    quantized = config.get("quantization_config") or {}
    method = str(quantized.get("quant_method", "")).lower()
    if method in ("mxfp4", "nvfp4", "modelopt_fp4"):
        return "fp4"
    if "fp8" in method:
        return "fp8"
    return "int4" if method in ("awq", "gptq") else "bf16"
