"""The catalogue of accelerators: `accelerators.toml`, and the user's own file in the same form."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from contracts.roofline import Accelerator
from pdgate.plan.workload import WorkloadError

CATALOGUE = Path(__file__).with_name("accelerators.toml")
GPUS = re.compile(r"\s*(\d+)\s*x\s*(\w[\w. -]*)")


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    node: float
    network: float
    gpus_per_node: int = 8
    maker: str = "NVIDIA"
    hands_off: bool = True
    price: float = 0.0
    price_dated: str = ""
    price_note: str = ""
    source: str = ""


def accelerators(own: Path | None = None) -> dict[str, Accelerator]:
    """Return all known accelerators by name; those of the user's file come on top.

    Raises:
        WorkloadError: the user's file is unreadable or has an unknown or missing field.
    """
    found = _read(CATALOGUE)
    if own is not None:
        found |= _read(own)
    return found


def parse_gpus(text: str, known: Mapping[str, Accelerator]) -> list[tuple[int, Accelerator]]:
    """Return count and kind of each part of "8xH100" or "4xH100,8xL40S".

    Raises:
        WorkloadError: not of that form, or an unknown kind (the known ones are named).
    """
    parts = []
    for part in text.split(","):
        match = GPUS.fullmatch(part)
        if match is None or int(match[1]) < 1:
            raise WorkloadError(f"--gpus: {part.strip()!r} is not like 8xH100")
        parts.append((int(match[1]), find_accelerator(match[2], known)))
    return parts


def find_accelerator(name: str, known: Mapping[str, Accelerator]) -> Accelerator:
    """Return an accelerator by its name; case, spaces, dashes and underscores do not matter."""
    wanted = _plain(name)
    for key, gpu in known.items():
        if _plain(key) == wanted:
            return gpu
    raise WorkloadError(f"accelerator {name!r} is not one of {', '.join(sorted(known))} (own ones: --hardware FILE)")


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _read(file: Path) -> dict[str, Accelerator]:
    try:
        rows = msgspec.convert(tomllib.loads(file.read_text()), dict[str, _Row], strict=False)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise WorkloadError(f"{file}: {error}") from None
    return {
        name: Accelerator(
            name=name,
            memory_bytes=int(row.memory),
            bytes_per_s=row.bandwidth,
            flops=row.flops,
            node_bytes_per_s=row.node,
            network_bytes_per_s=row.network,
            gpus_per_node=row.gpus_per_node,
            maker=row.maker,
            hands_off=row.hands_off,
            price_per_hour=row.price,
            price_dated=row.price_dated,
            price_note=row.price_note,
            source=row.source,
        )
        for name, row in rows.items()
    }
