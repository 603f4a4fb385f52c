"""A worker's change of role: ready -> draining -> switching -> ready, in another epoch.

1. The command is checked: the leader's epoch, and whether the engine can take the role at all. The role in force is
   confirmed at once; asked for while another change drains, it calls that one off.
2. DRAINING: the lease and the next Status say so, submits are refused. What runs ends by itself, and every gateway
   confirms the ends. After `drain_cap_s` the change is called off and the worker is READY in its old role.
3. SWITCHING: the engine's own call. Busy: DRAINING again, until the cap; SGLang holds the KV of a hand-off that was
   aborted in mid-transfer for as long as its peer may still write there. Refused: READY in the old role. Failed: the
   process ends, and its supervisor starts it again in the role it was made for.
4. A tiny generation without a peer shows that the engine computes; if it does not, the process ends as well.
5. READY with a new epoch: gateways attach again, late messages of the old epoch are dropped.

Where a role is only a label (hand-off store), steps 2 to 5 fall away: what runs goes on under the new label.
To or from a role that the engine cannot switch to, the process ends after step 2 and starts again in the new role.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from contracts.lifecycle import Role, WorkerState
from contracts.v1 import worker_pb2 as pb
from contracts.wire import ROLE_TO_PB
from workers.assignments import Assignments
from workers.condition import Condition
from workers.engine import Engine, SwitchFailed, SwitchRefused
from workers.trials import Trial, lone_job

log = structlog.get_logger()

DRAIN_CAP_S: Final = 60.0
VERIFY_S: Final = 30.0
POLL_S: Final = 0.01
BUSY_POLL_S: Final = 0.1
"""How long an engine is left alone that says it is busy."""
LAST_WORD_S: Final = 0.2
"""How long a process that must end waits, so that its answer leaves it."""

Report = Callable[[pb.RoleResult], None]


class RestartNeeded(Exception):
    """The process must start again, in `role`; None = in the role it was made for."""

    def __init__(self, role: Role | None, why: str) -> None:
        super().__init__(why)
        self.role = role


class _Wish(msgspec.Struct, frozen=True):
    role: Role
    asked_s: float
    report: Report


class RoleSwitch:
    """Changes roles one at a time. `run` until cancelled; it raises RestartNeeded when the process must end."""

    def __init__(
        self,
        condition: Condition,
        assignments: Assignments,
        engine: Engine,
        *,
        now_s: Callable[[], float],
        now_unix_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        drain_cap_s: float = DRAIN_CAP_S,
        may_restart: bool = False,
    ) -> None:
        self._condition = condition
        self._assignments = assignments
        self._engine = engine
        self._now_s = now_s
        self._now_unix_ms = now_unix_ms
        self._drain_cap_s = drain_cap_s
        self._may_restart = may_restart
        self._wishes: asyncio.Queue[_Wish] = asyncio.Queue(maxsize=1)
        self._current: _Wish | None = None
        self._called_off = ""

    def ask(self, role: Role, report: Report) -> None:
        """Begin a change of role, or say at once why not. `report` gets exactly one result, unless the process ends."""
        condition = self._condition
        wish = _Wish(role, self._now_s(), report)
        if self._current is not None:
            if role is condition.role:
                self.call_off("called off")
                self._answer(wish, ok=True)
            else:
                self._answer(wish, ok=False, message=f"a change to {self._current.role} is under way")
            return
        if role is condition.role:
            self._answer(wish, ok=True)
            return
        facts = condition.facts
        if facts is None or condition.state is not WorkerState.READY:
            self._answer(wish, ok=False, message=f"the worker is {condition.state}")
        elif facts.role_is_label:
            condition.label(role)
            self._assignments.role = role
            self._answer(wish, ok=True)
        elif role not in facts.switch_roles and not self._may_restart:
            self._answer(wish, ok=False, message=f"this engine cannot change from {condition.role} to {role}")
        else:
            self._current = wish
            self._called_off = ""
            condition.move(WorkerState.DRAINING)
            self._wishes.put_nowait(wish)

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._current is not None

    def call_off(self, why: str) -> None:
        """End a change that still drains; one that switches goes through."""
        if self._current is not None and self._condition.state is WorkerState.DRAINING:
            self._called_off = why

    async def run(self) -> None:
        """Carry out what is asked for."""
        while True:
            wish = await self._wishes.get()
            try:
                await self._carry_out(wish)
            finally:
                self._current = None

    async def _carry_out(self, wish: _Wish) -> None:
        condition = self._condition
        while True:
            why_not = await self._drained(wish)
            drain_ms = (self._now_s() - wish.asked_s) * 1000
            if why_not:
                if condition.state is WorkerState.DRAINING:
                    condition.move(WorkerState.READY)
                self._answer(wish, ok=False, message=why_not, drain_ms=drain_ms)
                return
            condition.move(WorkerState.SWITCHING)
            assert condition.facts is not None
            if wish.role not in condition.facts.switch_roles:
                raise RestartNeeded(wish.role, f"the engine starts again as {wish.role}")
            began_s = self._now_s()
            try:
                facts = await self._engine.switch(wish.role)
                break
            except SwitchRefused as refused:
                if not refused.busy:
                    condition.move(WorkerState.READY)
                    self._answer(wish, ok=False, message=str(refused), drain_ms=drain_ms)
                    return
                log.info("engine_still_busy", role=wish.role, why=str(refused))
                condition.move(WorkerState.DRAINING)
                await asyncio.sleep(BUSY_POLL_S)
            except SwitchFailed as failed:
                await self._give_up(wish, f"the engine lost its role: {failed}", drain_ms)
        verified = await self._verify(wish.role)
        if verified:
            await self._give_up(wish, f"the engine does not compute as {wish.role}: {verified}", drain_ms)
        switch_ms = (self._now_s() - began_s) * 1000
        epoch = max(self._now_unix_ms(), condition.identity.epoch + 1)
        self._assignments.begin_epoch(epoch, wish.role)
        condition.switched(facts, self._assignments.identity)
        self._answer(wish, ok=True, drain_ms=drain_ms, switch_ms=switch_ms)
        log.info("role_changed", role=wish.role, epoch=epoch, drain_ms=round(drain_ms), switch_ms=round(switch_ms))

    async def _drained(self, wish: _Wish) -> str:
        """Wait until nothing runs and return "", or why the change is off."""
        while True:
            if self._called_off:
                return self._called_off
            if self._condition.state is not WorkerState.DRAINING:
                return f"the worker became {self._condition.state}"
            if self._now_s() - wish.asked_s > self._drain_cap_s:
                return f"not drained in {self._drain_cap_s:g} s"
            if self._assignments.quiet and not self._engine.load().num_running:
                return ""
            await asyncio.sleep(POLL_S)

    async def _verify(self, role: Role) -> str:
        """Run a tiny generation without a peer; return "" or what went wrong."""
        job = lone_job(role, range(1, 9), max_tokens=2, within_s=VERIFY_S)
        return await Trial(job).run(self._engine, within_s=VERIFY_S)

    async def _give_up(self, wish: _Wish, why: str, drain_ms: float) -> None:
        """Raise RestartNeeded after telling everybody."""
        log.error("role_change_failed", role=wish.role, why=why)
        self._condition.move(WorkerState.UNHEALTHY)
        self._answer(wish, ok=False, message=why, drain_ms=drain_ms)
        await asyncio.sleep(LAST_WORD_S)
        raise RestartNeeded(None, why)

    def _answer(
        self, wish: _Wish, *, ok: bool, message: str = "", drain_ms: float = 0.0, switch_ms: float = 0.0
    ) -> None:
        condition = self._condition
        wish.report(
            pb.RoleResult(
                ok=ok,
                role=ROLE_TO_PB[condition.role],
                worker_epoch=condition.identity.epoch,
                drain_ms=drain_ms,
                switch_ms=switch_ms,
                message=message,
            )
        )
