"""The engine's virtual environment: SGLang, torch and what the worker process itself needs.

1. `requirements/engine-cpu.txt` is installed with its dependencies, then the packages of
   `engine-cpu-nodeps.txt` without theirs (they would bring CUDA).
2. The marker `.complete` names the lists it was made from. A finished environment is reused, one made
   from older lists is updated, an interrupted one is built anew.
3. Mooncake loads libibverbs.so.1; where it is missing, the distribution's package is unpacked beside
   the environment, without root.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
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
_MARKER: Final = ".complete"
LIBRARY: Final = "libibverbs.so.1"
_LIBRARY_PACKAGES: Final = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
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
    """Return whether the environment is complete and made from the current lists."""
    try:
        return (engine / _MARKER).read_text() == _fingerprint()
    except OSError:
        return False


def _fingerprint() -> str:
    digest = hashlib.sha256(platform.python_version().encode())
    for name in _LISTS:
        digest.update(requirement_list(name).read_bytes())
    return digest.hexdigest()


class _Building:
    """How far a build is, from pip's words and from the disk."""

    def __init__(self, engine: Path, downloads: Path) -> None:
        self._engine = engine
        self._downloads = downloads
        self._started = time.monotonic()
        self._fetched_bytes = 0
        self._fetched = 0
        self._listed = sum(
            bool(line.strip()) and not line.startswith("#")
            for name in _LISTS
            for line in requirement_list(name).read_text().splitlines()
        )
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


def _unfinished(engine: Path) -> bool:
    return engine.exists() and not (engine / _MARKER).exists()


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
    if _unfinished(engine):
        commands.report(Progress(step="removing an engine environment that was never finished"))
        await asyncio.to_thread(shutil.rmtree, engine)
    downloads = engine.with_name(f"{engine.name}.downloads")
    await asyncio.to_thread(shutil.rmtree, downloads, ignore_errors=True)
    downloads.mkdir()
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
    draft = engine / f"{_MARKER}.{os.getpid()}"
    draft.write_text(_fingerprint())
    draft.replace(engine / _MARKER)


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


async def ensure_libibverbs(folder: Path, commands: Commands) -> Mapping[str, str]:
    """Return the variables with which the worker finds libibverbs, unpacking it below `folder` if missing.

    Raises:
        CannotStart: it is missing and cannot be had without the user's help.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY)
        return {}
    found = find_library(folder)
    if found is None:
        await _unpack_libibverbs(folder, commands)
        found = find_library(folder)
    if found is None:
        raise CannotStart(_library_message("the package did not hold it"))
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{found.parent}:{inherited}" if inherited else str(found.parent)}


def find_library(folder: Path) -> Path | None:
    """Return the libibverbs that was unpacked below `folder`."""
    return next(folder.rglob(LIBRARY), None)


def _library_message(why: str) -> str:
    return (
        f"the engine needs {LIBRARY} ({why}): install it (Debian, Ubuntu: `apt-get install libibverbs1`;"
        " Fedora: `dnf install libibverbs`), or use --engine timed"
    )


async def _unpack_libibverbs(folder: Path, commands: Commands) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise CannotStart(_library_message("it is not on this machine"))
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    download = ("apt-get", "download", *_LIBRARY_PACKAGES)
    fetched = await commands.succeeds(download, cwd=packages, timeout_s=120)
    if not fetched and os.geteuid() == 0:  # a fresh image has no package lists
        await commands.succeeds(("apt-get", "update"), cwd=packages, timeout_s=120)
        fetched = await commands.succeeds(download, cwd=packages, timeout_s=120)
    if not fetched:
        raise CannotStart(_library_message("`apt-get download` failed"))
    for package in packages.glob("*.deb"):
        await commands.succeeds(("dpkg", "-x", str(package), str(folder)), cwd=packages, timeout_s=60)
