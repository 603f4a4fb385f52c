"""One virtual environment per peer below .pdgate/peers, made from its pinned list of requirements."""

import hashlib
import subprocess
import sys
from pathlib import Path

from tests.processes import REPOSITORY

FOLDER = REPOSITORY / ".pdgate" / "peers"


class CannotInstall(RuntimeError):
    """The message holds the command and its last words."""


def environment(name: str) -> Path:
    """Return the `bin` folder of a peer's environment, made first if it is not what the list says."""
    listed = REPOSITORY / "requirements" / f"peers-{name}.txt"
    folder = FOLDER / name
    stamp = folder / ".made"
    wanted = hashlib.sha256(listed.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {name} into {folder.relative_to(REPOSITORY)} …", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "-r", str(listed)])
        stamp.write_text(wanted)
    return folder / "bin"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise CannotInstall(f"`{' '.join(command[-6:])}` failed: {done.stderr.strip()[-400:]}")
