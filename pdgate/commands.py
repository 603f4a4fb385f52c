"""Runs the long commands of an installation (pip, venv, conversions) with their progress shown."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pdgate.children import Reaper, die_with_parent
from pdgate.preflight import CannotStart
from pdgate.screen import Progress, Report

_LOOK_EVERY_S: Final = 1.0
_WORDS_KEPT: Final = 20


class Commands:
    """Runs commands that end with their caller, whether it is cancelled or killed."""

    def __init__(self, report: Report, reaper: Reaper | None = None) -> None:
        self.report = report
        self._reaper = reaper

    async def run(
        self,
        command: Sequence[str],
        *,
        look: Callable[[], Progress],
        hear: Callable[[str], None] = lambda _: None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Run a command and report once a second.

        Args:
            command: program and arguments.
            look: says how far it is; reads the disk, so it runs in a thread.
            hear: gets each line of output.
            env: variables added to our own.
            cwd: folder to run it in.

        Raises:
            CannotStart: it failed; the message holds its last words.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        if self._reaper:
            self._reaper.watch(process.pid)
        words: list[str] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                showing = tasks.create_task(self._show(look))
                assert process.stdout is not None
                async for raw in process.stdout:
                    line = raw.decode(errors="replace").rstrip()
                    if line and not line.startswith("WARNING"):
                        words.append(line)
                        del words[:-_WORDS_KEPT]
                    hear(line)
                code = await process.wait()
                showing.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if self._reaper:
                self._reaper.forget(process.pid)
        if code != 0:
            errors = [line for line in words if "error" in line.lower()] or words[-1:] or [f"exit code {code}"]
            name = " ".join(Path(word).name for word in command[:4])
            raise CannotStart(f"`{name} …` failed: {errors[-1].strip()}")

    async def _show(self, look: Callable[[], Progress]) -> None:
        while True:
            self.report(await asyncio.to_thread(look))
            await asyncio.sleep(_LOOK_EVERY_S)

    async def succeeds(self, command: Sequence[str], *, cwd: Path, timeout_s: float) -> bool:
        """Run a command without showing it; return whether it ended with 0 in time."""
        with contextlib.suppress(CannotStart, TimeoutError):
            async with asyncio.timeout(timeout_s):
                step = Progress(step=" ".join(command[:2]))
                await self.run(command, look=lambda: step, cwd=cwd)
                return True
        return False


def bytes_under(folder: Path) -> int:
    """Return the bytes of all files below a folder that may change meanwhile."""
    total = 0
    pending = [os.fspath(folder)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total
