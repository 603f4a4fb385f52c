"""Importing any of our modules opens no socket, starts no thread and needs no environment."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("billing", "contracts", "gateway", "migrations", "observability", "pdgate", "scheduler", "workers")
# Loaded by SGLang and by alembic, inside their own processes.
NOT_IMPORTED = ("workers.engines.sglang", "migrations.env", "migrations.versions")

PROGRAM = """
import importlib, socket, sys, threading

class Blocked(socket.socket):
    def connect(self, *a): raise AssertionError("import opened a connection")
    def bind(self, *a): raise AssertionError("import bound a socket")

socket.socket = Blocked
for name in sys.argv[1:]:
    importlib.import_module(name)
assert threading.active_count() == 1, threading.enumerate()
assert not {"torch", "transformers", "sglang"} & set(sys.modules), "a base process must not load the engine"
print("imported", len(sys.argv) - 1)
"""


def modules():
    for package in PACKAGES:
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            parts = list(file.relative_to(REPOSITORY).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            name = ".".join(parts)
            if parts[-1] != "__main__" and not name.startswith(NOT_IMPORTED):
                yield name


def test_importing_everything_has_no_effect():
    names = list(modules())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env={"PATH": "/nowhere"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"imported {len(names)}\n"


def test_every_benchmark_can_be_started():
    """Their rigs are the tests' own: what moves there must not break them unseen."""
    names = [f"benches.{file.stem}" for file in sorted((REPOSITORY / "benches").glob("*.py")) if file.stem[0] != "_"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)",
            *names,
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
