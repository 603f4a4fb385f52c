"""Checks before anything starts. Each fault is one line that says what to do."""

import errno
import fcntl
import os
import platform
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import IO, Final

import psutil

from contracts.memory import free_memory_bytes

GB: Final = 1_000_000_000
ENGINE_MEMORY_BYTES: Final = 8 * GB
ENGINE_DISK_BYTES: Final = 6 * GB  # 2.9 GB installed, the downloads beside it, the model, some air
DATA_DISK_BYTES: Final = GB // 2
_LOCK_WAIT_S: Final = 8.0


class CannotStart(Exception):
    """The stack cannot run here as asked; the message is one line that says what to do."""


def check_port(host: str, port: int) -> None:
    """Raise CannotStart when the port cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise CannotStart(
                    f"port {port} is taken{_holder(port)}: stop that process, or choose another with --port"
                ) from None
            raise CannotStart(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from None


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            listens_on = getattr(connection.laddr, "port", None) if connection.status == psutil.CONN_LISTEN else None
            if listens_on == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):  # not ours to see
        pass
    return ""


def check_disk(folder: Path, need_bytes: int, purpose: str) -> None:
    """Raise CannotStart when the file system of `folder` has too little room."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < need_bytes:
        raise CannotStart(
            f"{purpose} needs {need_bytes / GB:.1f} GB free in {existing}, which has {free / GB:.1f} GB:"
            " free some, or choose another place with --data and PDGATE_ENGINE_DIR"
        )


def real_engine_obstacle() -> str | None:
    """Return why the real engine cannot run on this machine, None when it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"it needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "flags avx")
    if "avx" not in flags.split():
        return "it needs a processor with AVX"
    if (free := free_memory_bytes()) < ENGINE_MEMORY_BYTES:
        return f"it needs 8 GB of free memory, and there are {free / GB:.1f} GB"
    return None


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def take_lock(file: Path) -> IO[str]:
    """Return the stack's lock file, held. Raise CannotStart when another stack runs on this data.

    A stack that was just killed holds it until its reaper is done: that much we wait.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.open("a+")
    except OSError as error:
        raise CannotStart(
            f"cannot write to {file.parent}: {error.strerror}; choose another place with --data"
        ) from None
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            if time.monotonic() > deadline or _runs(holder):
                raise CannotStart(
                    f"a stack already runs on {file.parent} (process {holder or 'unknown'}):"
                    " stop it, or choose another place with --data"
                ) from None
            time.sleep(0.05)
        else:
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            return lock


def _runs(holder: str) -> bool:
    try:
        return holder.isdigit() and psutil.Process(int(holder)).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
