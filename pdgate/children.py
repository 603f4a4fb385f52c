"""Child processes of the stack: each in its own session, none able to outlive it.

Two nets: the kernel kills a child when the thread that started it ends (PR_SET_PDEATHSIG), and the
reaper kills whole process groups, which also catches the children's own children.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from pdgate import reaper, services

_PR_SET_PDEATHSIG: Final = 1
_LOG_MAX_BYTES: Final = 8 << 20
_LOGS_KEPT: Final = 3


def die_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return what a child runs between fork and exec so that it gets `number` when its parent ends.

    The uid has changed by then, which matters: a change of credentials clears the setting.
    """
    parent = os.getpid()
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return arm


def end_with_caller() -> None:
    """Ask the kernel for SIGTERM when the process that started this one ends (`make up`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Reaper:
    """The stack's side of the reaper process. See pdgate.reaper for the protocol."""

    def __init__(self, lock: IO[str]) -> None:
        self._lock = lock
        self._groups: dict[int, int] = {}
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        descriptor = self._lock.fileno()
        return subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__],
            bufsize=0,  # a line is one write, whichever thread writes it
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            cwd="/",
            start_new_session=True,
        )

    def watch(self, group: int, first: int = signal.SIGKILL) -> None:
        """Kill this process group should the stack die, beginning with the signal `first`."""
        self._groups[group] = first
        self._write(f"+ {group} {first}\n")

    def forget(self, group: int) -> None:
        """The group is gone."""
        self._groups.pop(group, None)
        self._write(f"- {group}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            self.revive()

    def revive(self) -> None:
        """Start it again if it was killed, and tell it what runs."""
        if self._process.poll() is None:
            return
        self._process = self._start()
        for group, first in self._groups.items():
            self._write(f"+ {group} {first}\n")

    def close(self) -> None:
        """Let it end: it kills what is still listed, normally nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(6)


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to keep running."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stage: int  # children of a lower stage are stopped first


def open_log(folder: Path, name: str) -> IO[bytes]:
    """Open a process's log to append to, putting an overgrown one aside first."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.log"
    if file.exists() and file.stat().st_size > _LOG_MAX_BYTES:
        for number in range(_LOGS_KEPT - 1, 0, -1):
            older = file.with_name(f"{name}.log.{number}")
            if older.exists():
                older.replace(file.with_name(f"{name}.log.{number + 1}"))
        file.replace(file.with_name(f"{name}.log.1"))
    return file.open("ab")


def last_line(file: Path) -> str:
    """Return the last line of a log that is not blank; empty when there is none."""
    if not file.exists():
        return ""
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - 4096))
        lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


class Children:
    """Starts processes under both nets."""

    def __init__(self, logs: Path, reaper_: Reaper) -> None:
        self.logs = logs
        self.reaper = reaper_

    async def spawn(self, spec: ChildSpec) -> asyncio.subprocess.Process:
        """Start one process; its output goes to its log."""
        with open_log(self.logs, spec.name) as log:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                env=dict(spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self.reaper.watch(process.pid)
        return process

    async def finish(self, process: asyncio.subprocess.Process) -> int:
        """Wait for a process, kill what it leaves in its group, and return its exit code."""
        code = await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self.reaper.forget(process.pid)
        return code

    def spawn_server(self, command: services.Command) -> "subprocess.Popen[bytes]":
        """Start an embedded server (pdgate.services.Spawn)."""
        # PostgreSQL's backends lead sessions of their own: on SIGQUIT the postmaster ends them at once.
        last_word = signal.SIGQUIT if Path(command.argv[0]).name == "postgres" else signal.SIGKILL
        process = services.spawn(command, before_exec=die_with_parent(last_word))
        self.reaper.watch(process.pid, last_word)
        return process
