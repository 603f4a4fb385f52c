"""A worker's sleep: its weights and its KV memory leave the device, its process stays.

1. Asked to sleep, it must run nothing: READY or DRAINING, and empty. Otherwise the order is ignored, and given again.
2. DRAINING while the engine lets its memory go, then SLEEPING. Submits are refused.
3. Asked to wake, the engine takes its memory back, with an empty prefix cache, and the worker is READY.

The orders are idempotent; the last one counts, also while the one before is being carried out.
"""

import asyncio
from typing import Final, Protocol

import structlog

from contracts.lifecycle import WorkerState
from workers.assignments import Assignments
from workers.condition import Condition
from workers.roles import RestartNeeded

log = structlog.get_logger()

CAPABILITY: Final = "sleep"
CHANGE_S: Final = 120.0
"""Most that letting go or taking back may take; after it the process starts again."""


class Sleeper(Protocol):
    """An engine that can give its device's memory back. Called while no job is open."""

    async def sleep(self) -> None:
        """Let weights go to host memory, and the KV cache go altogether. Raises when it cannot."""

    async def wake(self) -> None:
        """Take the memory back; the prefix cache is empty. Raises when it cannot."""


class Sleep:
    """Sends one worker to sleep and wakes it. `run` until cancelled."""

    def __init__(self, condition: Condition, assignments: Assignments, sleeper: Sleeper | None) -> None:
        self._condition = condition
        self._assignments = assignments
        self._sleeper = sleeper
        self._wanted = False
        self._stir = asyncio.Event()

    def ask(self, *, on: bool) -> bool:
        """Take an order; False = it is ignored, since the worker cannot sleep or is busy."""
        state = self._condition.state
        if not on:
            self._wanted = False
            self._stir.set()
            return self._sleeper is not None
        if self._wanted:
            return True
        load = self._condition.load  # as of the last status: what the engine itself still has to clear away
        idle = state in (WorkerState.READY, WorkerState.DRAINING) and self._assignments.quiet
        idle = idle and not (load.num_running or load.num_waiting or load.num_transfers)
        if self._sleeper is None or not idle:
            return False
        self._wanted = True
        self._condition.move(WorkerState.DRAINING)
        self._stir.set()
        return True

    @property
    def wanted(self) -> bool:
        """Whether it sleeps, or is about to."""
        return self._wanted

    async def run(self) -> None:
        """Carry orders out.

        Raises:
            RestartNeeded: the engine has lost its memory on the way.
        """
        while True:
            await self._stir.wait()
            self._stir.clear()
            state = self._condition.state
            if self._sleeper is None:
                continue
            if self._wanted and state is WorkerState.DRAINING:
                await self._change(self._sleeper, WorkerState.SLEEPING)
                self._stir.set()  # it may have been called back meanwhile
            elif not self._wanted and state is WorkerState.SLEEPING:
                await self._change(self._sleeper, WorkerState.READY)
                self._stir.set()

    async def _change(self, sleeper: Sleeper, to: WorkerState) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(CHANGE_S):
                await (sleeper.sleep() if to is WorkerState.SLEEPING else sleeper.wake())
        except Exception as error:
            log.exception("sleep_failed", to=to)
            raise RestartNeeded(None, f"the engine did not become {to}: {error}") from error
        if self._condition.state in (WorkerState.DRAINING, WorkerState.SLEEPING):
            self._condition.move(to)
        log.info("sleep_changed", state=to, took_s=round(asyncio.get_running_loop().time() - began_s, 3))
