"""The file `.pdgate/env`: how scripts and the command line find a running stack."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ADMIN_TOKEN: Final = "PDGATE_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
"""For writes of money, in billing."""

PEER_TOKEN: Final = "PDGATE_PEER_TOKEN"  # noqa: S105 - the same
"""What gateways, schedulers and workers show each other."""

_HEADER = "# Written by `pdgate up`. Holds keys: keep it private. Use: set -a; . {file}; set +a\n"


def read_env(file: Path) -> dict[str, str]:
    """Return the variables in `file`; none when it does not exist or may not be read."""
    try:
        text = file.read_text()
    except OSError:
        return {}
    values = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and not name.startswith("#"):
            values[name] = "".join(shlex.split(value))
    return values


def write_env(file: Path, values: Mapping[str, str]) -> None:
    """Replace `file` in one step, readable by its owner only."""
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(_HEADER.format(file=file))
        for name, value in values.items():
            out.write(f"{name}={shlex.quote(value)}\n")
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)


def setting(name: str, env_file: Path) -> str | None:
    """Return a variable from the environment or else from the stack's file."""
    return os.environ.get(name) or read_env(env_file).get(name)
