"""Keeps the stack's processes running, and stops them in order.

A child that dies is started again after a pause that grows from half a second to ten; a run of half
a minute resets the pause. Each death is said in one line that names the log.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

from pdgate.children import Children, ChildSpec, last_line

_PAUSE_FIRST_S: Final = 0.5
_PAUSE_MAX_S: Final = 10.0
_STEADY_AFTER_S: Final = 30.0
STAGE_GATEWAY, STAGE_BEHIND = 0, 1
STOPPED_AFTER_S: Final[Sequence[float]] = (1.8, 2.8)
"""Seconds after which each stage is killed: the gateway, which settles what runs; all behind it."""


def describe_exit(code: int) -> str:
    """Return how a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


class Supervisor:
    """Runs children in the caller's TaskGroup until `stop`."""

    def __init__(self, tasks: asyncio.TaskGroup, children: Children, say: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._children = children
        self._say = say
        self._running: dict[str, tuple[ChildSpec, asyncio.subprocess.Process]] = {}
        self._gone: dict[str, asyncio.Event] = {}
        self._stopping = asyncio.Event()
        self._dropped: set[str] = set()

    def keep(self, spec: ChildSpec) -> None:
        """Start a process and keep it running."""
        self._dropped.discard(spec.name)
        self._gone[spec.name] = asyncio.Event()
        self._tasks.create_task(self._keep(spec), name=spec.name)

    def drop(self, name: str) -> None:
        """Stop a process and start it no more; one that does not heed SIGTERM is killed with the stack."""
        self._dropped.add(name)
        self._signal(name, signal.SIGTERM)

    def pid(self, name: str) -> int | None:
        """Return the process id of a child, None while it is down."""
        entry = self._running.get(name)
        return entry[1].pid if entry else None

    async def _keep(self, spec: ChildSpec) -> None:
        pause_s = _PAUSE_FIRST_S
        log = self._children.logs / f"{spec.name}.log"
        try:
            while not self._stopping.is_set() and spec.name not in self._dropped:
                started = time.monotonic()
                how = await self._run(spec)
                if self._stopping.is_set() or spec.name in self._dropped:
                    return
                if time.monotonic() - started > _STEADY_AFTER_S:
                    pause_s = _PAUSE_FIRST_S
                self._say(
                    f"{spec.name} ended ({how}); starting it again in {pause_s:.1f} s."
                    f" Last line of {log}: {last_line(log)[:200]}"
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()
                pause_s = min(_PAUSE_MAX_S, pause_s * 2)
        finally:
            self._gone[spec.name].set()

    async def _run(self, spec: ChildSpec) -> str:
        """Run a child once and return how it ended."""
        try:
            process = await self._children.spawn(spec)
        except OSError as error:
            return f"could not start: {error}"
        self._running[spec.name] = (spec, process)
        if self._stopping.is_set() or spec.name in self._dropped:  # asked for while it was being started
            self._signal(spec.name, signal.SIGKILL)
        code = await self._children.finish(process)
        del self._running[spec.name]
        return describe_exit(code)

    async def stop(self) -> None:
        """Stop every child, stage by stage; what outlasts its stage is killed."""
        self._stopping.set()
        began = asyncio.get_running_loop().time()
        for stage, after_s in enumerate(STOPPED_AFTER_S):
            await self._stop_stage(stage, began + after_s)

    def kill(self) -> None:
        """Kill every child and its children at once."""
        self._stopping.set()
        for name in list(self._running):
            self._signal(name, signal.SIGKILL)

    async def _stop_stage(self, stage: int, deadline: float) -> None:
        names = [name for name, (spec, _) in self._running.items() if spec.stage == stage]
        for name in names:
            self._signal(name, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                for name in names:
                    await self._gone[name].wait()
        for name in names:
            self._signal(name, signal.SIGKILL)

    def _signal(self, name: str, number: int) -> None:
        entry = self._running.get(name)
        if entry is None:
            return
        pid = entry[1].pid
        with contextlib.suppress(ProcessLookupError):
            # SIGTERM to the process alone, for it stops its own children; SIGKILL to all of them.
            os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)
