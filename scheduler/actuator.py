"""Carrying out a change of role: the command, the wait for the worker's word, the deadline. Mechanics, no policy.

1. SetRole goes to the worker; it answers with RoleResult, or comes back as another life in the new role (a restart).
2. Meanwhile the worker reports DRAINING and SWITCHING, so nothing is placed on it.
3. At the deadline the change is called off: SetRole with the role it has. One that switches already goes through.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import structlog

from contracts.lifecycle import Role
from contracts.v1 import worker_pb2 as pb
from contracts.wire import ROLE_FROM_PB, ROLE_TO_PB
from observability.metrics import Instruments
from scheduler.policy.ratio import Move
from scheduler.worker import Standing, Worker

log = structlog.get_logger()

DRAIN_CAP_S: Final = 60.0
SWITCH_CAP_S: Final = 150.0
"""Room for a rebuild, or for a process that starts again with its model."""
CALL_OFF_S: Final = 2.0
POLL_S: Final = 0.05

Send = Callable[[Worker, pb.ControlCommand], bool]


class FlipResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a change of role ended."""

    ok: bool
    role: Role  # in force
    drain_ms: float = 0.0
    switch_ms: float = 0.0
    message: str = ""


class Actuator:
    """Changes one role at a time."""

    def __init__(
        self,
        pool: str,
        *,
        workers: Callable[[], Iterable[Worker]],
        send: Send,
        leader_epoch: Callable[[], int],
        instruments: Instruments,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._workers = workers
        self._send = send
        self._leader_epoch = leader_epoch
        self._instruments = instruments
        self._now_s = now_s
        self.ended: Callable[[Move, str, FlipResult], None] = _ignore
        """Hears how each change ended."""
        self._wanted: asyncio.Queue[tuple[Move, str]] = asyncio.Queue(maxsize=1)
        self._moving: Move | None = None
        self._result: pb.RoleResult | None = None
        self._changed = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._moving is not None

    @property
    def moving(self) -> Move | None:
        """The change that is under way."""
        return self._moving

    def begin(self, move: Move, why: str) -> bool:
        """Start a change in the background; False = not now."""
        worker = self._find(move.worker_id)
        if self._moving is not None or worker is None:
            return False
        self._moving = move
        _leave(worker, leaving=True)
        self._wanted.put_nowait((move, why))
        return True

    async def flip(self, worker_id: str, role: Role, *, why: str) -> FlipResult:
        """Change a role and wait for the end. `run` need not run."""
        worker = self._find(worker_id)
        if worker is None:
            return FlipResult(ok=False, role=role, message=f"no worker {worker_id!r} is connected")
        if self._moving is not None:
            return FlipResult(ok=False, role=worker.role, message=f"{self._moving.worker_id} changes its role")
        self._moving = move = Move(worker_id=worker_id, from_role=worker.role, to_role=role)
        _leave(worker, leaving=True)
        return await self._carry_out(move, why)

    async def run(self) -> None:
        """Carry out what `begin` was given, until cancelled. What an earlier term began is dropped."""
        while not self._wanted.empty():
            self._wanted.get_nowait()
        self._moving = None
        while True:
            move, why = await self._wanted.get()
            await self._carry_out(move, why)

    # -- what the registry hears -------------------------------------------------------------------

    def heard(self, worker: Worker, result: pb.RoleResult) -> None:
        """Take a worker's word on its role."""
        if self._moving is not None and worker.worker_id == self._moving.worker_id:
            self._result = result
            self._changed.set()

    # -- inside ----------------------------------------------------------------------------------------

    async def _carry_out(self, move: Move, why: str) -> FlipResult:
        worker = self._find(move.worker_id)
        try:
            result = await self._change(move)
        finally:
            self._moving = None
            if worker is not None:
                _leave(worker, leaving=False)  # called off, or the label of a life that goes on
        direction = f"{move.from_role}_to_{move.to_role}"
        outcome = "done" if result.ok else "failed"
        self._instruments.flips.add(1, {"pool": self._pool, "direction": direction, "reason": why, "result": outcome})
        if result.ok:
            self._instruments.drain(result.drain_ms, pool=self._pool)
            self._instruments.switch(result.switch_ms, pool=self._pool)
        self.ended(move, why, result)
        log.info(
            "flip",
            pool=self._pool,
            worker_id=move.worker_id,
            direction=direction,
            why=why,
            ok=result.ok,
            drain_ms=round(result.drain_ms),
            switch_ms=round(result.switch_ms),
            message=result.message,
        )
        return result

    async def _change(self, move: Move) -> FlipResult:
        worker = self._find(move.worker_id)
        if worker is None or not self._ask(worker, move.to_role):
            return FlipResult(ok=False, role=move.from_role, message="its stream is down")
        began_s, epoch = self._now_s(), worker.epoch
        result = await self._ended(move, epoch, DRAIN_CAP_S + SWITCH_CAP_S)
        if result is not None:
            return result
        if (now := self._find(move.worker_id)) is not None and now.epoch == epoch:
            self._ask(now, move.from_role)
            result = await self._ended(move, epoch, CALL_OFF_S)
        waited_s = self._now_s() - began_s
        return result or FlipResult(ok=False, role=move.from_role, message=f"no answer in {waited_s:.0f} s")

    def _ask(self, worker: Worker, role: Role) -> bool:
        self._result = None
        self._changed.clear()
        command = pb.SetRole(role=ROLE_TO_PB[role], leader_epoch=self._leader_epoch())
        return self._send(worker, pb.ControlCommand(set_role=command))

    async def _ended(self, move: Move, epoch: int, within_s: float) -> FlipResult | None:
        """Wait for the worker's word or its next life; None when neither came in time."""
        began_s = self._now_s()
        drained_s: float | None = None
        try:
            async with asyncio.timeout(within_s):
                while True:
                    if self._result is not None:
                        return _result_of(self._result, move)
                    worker = self._find(move.worker_id)
                    if worker is None and drained_s is None:
                        drained_s = self._now_s()
                    if worker is not None and worker.epoch > epoch:
                        ended_s = self._now_s()
                        return FlipResult(
                            ok=worker.role is move.to_role,
                            role=worker.role,
                            drain_ms=((drained_s or ended_s) - began_s) * 1000,
                            switch_ms=(ended_s - (drained_s or ended_s)) * 1000,
                            message="" if worker.role is move.to_role else "the worker started again in its old role",
                        )
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):  # a new life announces itself to the registry only
                            await self._changed.wait()
        except TimeoutError:
            return None

    def _find(self, worker_id: str) -> Worker | None:
        for worker in self._workers():
            if worker.worker_id == worker_id and worker.standing is Standing.UP:
                return worker
        return None


def _leave(worker: Worker, *, leaving: bool) -> None:
    """Keep new work away from a worker before it says itself that it drains."""
    worker.leaving = leaving
    worker.touch()


def _ignore(_: Move, __: str, ___: FlipResult) -> None:
    """Nobody asked."""


def _result_of(result: pb.RoleResult, move: Move) -> FlipResult:
    return FlipResult(
        ok=result.ok and ROLE_FROM_PB.get(result.role) is move.to_role,
        role=ROLE_FROM_PB.get(result.role, move.from_role),
        drain_ms=result.drain_ms,
        switch_ms=result.switch_ms,
        message=result.message,
    )
