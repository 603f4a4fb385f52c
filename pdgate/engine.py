"""The engine's virtual environment: SGLang, torch and what the worker process itself needs.

1. `requirements/engine-cpu.txt` is installed with its dependencies, then the packages of
   `engine-cpu-nodeps.txt` without theirs (they would bring CUDA).
2. The marker `.complete` names the lists it was made from. A finished environment is reused, one made
   from older lists is updated, an interrupted one (marker `.building`) is built anew. One without any
   marker was made by hand, for a GPU say, and is used as it is.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Final

from pdgate.commands import Commands, bytes_under
from pdgate.layout import checkout
from pdgate.preflight import ENGINE_DISK_BYTES, CannotStart, check_disk
from pdgate.screen import Progress

_LISTS: Final = ("engine-cpu.txt", "engine-cpu-nodeps.txt")
# For the ETA only, measured with a CPU build of torch on two cores.
_INSTALLED_BYTES: Final = 2_500_000_000
_COMPILED_BYTES: Final = 230_000_000
_WORK_BYTES: Final = _INSTALLED_BYTES + _COMPILED_BYTES + 420_000_000  # pip's downloads
_FETCH_SHARE: Final = 0.45
_INSTALL_SHARE: Final = 0.35
COMPILING: Final = "engine 4/4: compiling"
_MARKER, _BUILDING = ".complete", ".building"
_NEVER_IMPORTED: Final = r"/(tests?|testing|jedi|IPython|multimodal_gen)/|/transformers/models/"
_FETCHING: Final = re.compile(
    r"\s*(?:Downloading|Using cached|Processing)\s+(?P<file>\S+)(?:\s+\((?P<size>[\d.]+ [kMG]B)\))?"
)


def requirement_list(name: str) -> Path:
    """Return one of the requirement lists of the checkout or of the installed wheel."""
    own = checkout() / "requirements" / name
    return own if own.exists() else Path(__file__).parent / "requirements" / name


def engine_python(engine: Path) -> Path:
    """Return the interpreter of the environment."""
    return engine / "bin" / "python"


def engine_ready(engine: Path) -> bool:
    """Return whether the environment is complete and made from the current lists, or made by hand."""
    if (engine / _BUILDING).exists():
        return False
    try:
        return (engine / _MARKER).read_text() == _fingerprint()
    except OSError:
        return engine_python(engine).exists()


def _fingerprint() -> str:
    digest = hashlib.sha256(platform.python_version().encode())
    digest.update("\n".join(_packages()).encode())
    return digest.hexdigest()


def _packages() -> Sequence[str]:
    """Return the lines of the lists that name packages."""
    lines = [line.strip() for name in _LISTS for line in requirement_list(name).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


class _Building:
    """How far a build is, from pip's words and from the disk."""

    def __init__(self, engine: Path, downloads: Path) -> None:
        self._engine = engine
        self._downloads = downloads
        self._started = time.monotonic()
        self._fetched_bytes = 0
        self._fetched = 0
        self._listed = len(_packages())
        self.step = "engine 1/4: making its environment"

    def hear(self, line: str) -> None:
        """Take one line of pip's output."""
        if line.startswith("Installing collected packages"):
            self.step = "engine 3/4: installing"
        elif found := _FETCHING.match(line):
            self._fetched += 1
            package = Path(found["file"]).name.partition("-")[0]
            self.step = f"engine 2/4: fetching {package}" + (f" ({found['size']})" if found["size"] else "")

    def look(self) -> Progress:
        """Return how far it is; reads the disk."""
        installed_bytes = bytes_under(self._engine)
        # pip removes its downloads in the end: what was fetched once counts as done.
        self._fetched_bytes = max(self._fetched_bytes, bytes_under(self._downloads))
        return Progress(
            step=self.step,
            done_bytes=installed_bytes + self._fetched_bytes,
            total_bytes=_WORK_BYTES,
            elapsed_s=time.monotonic() - self._started,
            share=self._share(installed_bytes),
        )

    def _share(self, installed_bytes: int) -> float:
        fetched = min(1.0, self._fetched / self._listed)
        installed = min(1.0, installed_bytes / _INSTALLED_BYTES)
        if self.step == COMPILING:
            written = max(0, installed_bytes - _INSTALLED_BYTES) / _COMPILED_BYTES
            return _FETCH_SHARE + _INSTALL_SHARE + (1 - _FETCH_SHARE - _INSTALL_SHARE) * min(0.99, written)
        return _FETCH_SHARE * fetched + _INSTALL_SHARE * installed


def _begin(engine: Path, downloads: Path) -> None:
    """Make room: remove what an interrupted build left, keep an environment that is only out of date."""
    if (engine / _BUILDING).exists():
        shutil.rmtree(engine)
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir()
    if not engine.exists():
        engine.mkdir()
        (engine / _BUILDING).touch()


def _end(engine: Path) -> None:
    draft = engine / f"{_MARKER}.{os.getpid()}"
    draft.write_text(_fingerprint())
    draft.replace(engine / _MARKER)
    (engine / _BUILDING).unlink(missing_ok=True)


async def ensure_engine(engine: Path, commands: Commands) -> None:
    """Build the environment unless it is complete.

    Raises:
        CannotStart: no room, or pip failed; the message is one line.
    """
    if engine_ready(engine):
        return
    async with exclusive(engine.with_name(f"{engine.name}.lock"), "the engine is built", commands):
        if not engine_ready(engine):  # else another process built it while we waited
            await _build(engine, commands)


async def _build(engine: Path, commands: Commands) -> None:
    check_disk(engine.parent, ENGINE_DISK_BYTES, "the engine")
    commands.report(Progress(step="engine 1/4: making its environment"))
    downloads = engine.with_name(f"{engine.name}.downloads")
    await asyncio.to_thread(_begin, engine, downloads)
    building = _Building(engine, downloads)
    python = str(engine_python(engine))
    options = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--no-compile")
    pip = (python, "-m", "pip", "install", *options)
    plan: Sequence[Sequence[str]] = (
        (sys.executable, "-m", "venv", str(engine)),
        (*pip, "-r", str(requirement_list(_LISTS[0]))),
        (*pip, "--no-deps", "-r", str(requirement_list(_LISTS[1]))),
    )
    try:
        for command in plan:
            await commands.run(command, hear=building.hear, look=building.look, env={"TMPDIR": str(downloads)})
        building.step = COMPILING
        # pip would compile all 19,000 files, one after the other; these are the ones that are imported.
        compile_ = (python, "-m", "compileall", "-qq", "-j", "0", "-x", _NEVER_IMPORTED, str(engine / "lib"))
        with contextlib.suppress(CannotStart):  # templates that are no Python; what was not compiled loads slower
            await commands.run(compile_, look=building.look)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)
    _end(engine)


def _open_lock(file: Path) -> IO[str]:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.open("a")


@contextlib.asynccontextmanager
async def exclusive(file: Path, purpose: str, commands: Commands) -> AsyncIterator[None]:
    """Hold a lock file while the block runs, waiting for another process if need be."""
    with _open_lock(file) as lock:
        started = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                elapsed_s = time.monotonic() - started
                commands.report(Progress(step=f"waiting: {purpose} by another process", elapsed_s=elapsed_s))
                await asyncio.sleep(0.5)
        yield
