"""Workers of a pool that sleep: their processes stay, their weights are in host memory, and they serve nobody.

1. `lull`: it is drained, and sent to sleep once it is empty. A worker that is not empty ignores the order, so it is
   repeated until its Status says SLEEPING.
2. `wake`: it takes its memory back and is READY; how long that took is a Boot with one part.

A later leader sees by their Status who sleeps.
"""

import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from contracts.lifecycle import WorkerState
from contracts.v1 import worker_pb2 as pb
from scheduler.boot import Boot
from scheduler.registry import WorkerRegistry
from scheduler.worker import Standing, Worker

CAPABILITY: Final = "sleep"
"""Of registrations: the worker knows the order."""
_REPEAT_MS: Final = 500


class Sleepers:
    """Who sleeps, is about to, or wakes."""

    def __init__(
        self, registry: WorkerRegistry, *, now_unix_ms: Callable[[], float] = lambda: time.time() * 1000
    ) -> None:
        self._registry = registry
        self._now_unix_ms = now_unix_ms
        self._lulled: dict[str, float] = {}  # when it was told last
        self._waking: dict[str, float] = {}  # when it was asked to
        self._told_to_wake: dict[str, float] = {}

    @property
    def waking(self) -> Collection[str]:
        """Those who were asked to wake and do not serve yet."""
        return self._waking.keys()

    def asked_ago_s(self) -> float:
        """Return for how long the one has been waking that was asked first; 0 = nobody wakes."""
        return (self._now_unix_ms() - min(self._waking.values())) / 1000 if self._waking else 0.0

    @property
    def restless(self) -> bool:
        """Whether somebody falls asleep or wakes."""
        return bool(self._lulled or self._waking)

    def sleeps(self, worker: Worker) -> bool:
        """Return whether it must be woken before it can serve."""
        if worker.worker_id in self._waking or worker.standing is not Standing.UP or not worker.leased:
            return False
        return worker.state is WorkerState.SLEEPING or worker.worker_id in self._lulled

    def lull(self, worker: Worker) -> None:
        """Let a worker fall asleep once it runs nothing any more."""
        self._waking.pop(worker.worker_id, None)
        self._lulled[worker.worker_id] = self._now_unix_ms()  # told by `look`, once nothing can be on its way to it
        worker.leaving = worker.departing = True
        worker.touch()
        self._send(worker, pb.ControlCommand(drain=pb.Drain(on=True, leader_epoch=self._registry.leader_epoch)))

    def wake(self, worker: Worker) -> None:
        """Let a worker serve again."""
        self._lulled.pop(worker.worker_id, None)
        self._waking[worker.worker_id] = self._now_unix_ms()
        worker.leaving = worker.departing = False
        worker.touch()
        self._tell_to_wake(worker)

    def forget(self, worker_id: str) -> None:
        """Leave a worker to others: it is stopped."""
        self._lulled.pop(worker_id, None)
        self._waking.pop(worker_id, None)

    def look(self) -> Iterable[Boot]:
        """Repeat what was not heard, and return those who have woken."""
        now_ms, woken = self._now_unix_ms(), []
        workers = {worker.worker_id: worker for worker in self._registry.workers()}
        for worker_id, told_ms in list(self._lulled.items()):
            worker = workers.get(worker_id)
            if worker is None or worker.state is WorkerState.SLEEPING:
                del self._lulled[worker_id]
            elif worker.num_requests == 0 and now_ms - told_ms >= _REPEAT_MS:
                self._lulled[worker_id] = now_ms
                command = pb.Sleep(on=True, leader_epoch=self._registry.leader_epoch)
                self._send(worker, pb.ControlCommand(sleep=command))
        for worker_id, asked_ms in list(self._waking.items()):
            worker = workers.get(worker_id)
            if worker is None or not worker.leased or worker.ready:
                del self._waking[worker_id]
            elif now_ms - self._told_to_wake.get(worker_id, asked_ms) >= _REPEAT_MS:
                self._tell_to_wake(worker)
            if worker is not None and worker.ready:
                self._told_to_wake.pop(worker_id, None)
                woken.append(
                    Boot(
                        worker_id=worker_id,
                        asked_unix_ms=asked_ms,
                        running_unix_ms=asked_ms,
                        registered_unix_ms=asked_ms,
                        ready_unix_ms=now_ms,
                        woken=True,
                    )
                )
        return woken

    def _tell_to_wake(self, worker: Worker) -> None:
        self._told_to_wake[worker.worker_id] = self._now_unix_ms()
        epoch = self._registry.leader_epoch
        self._send(worker, pb.ControlCommand(sleep=pb.Sleep(on=False, leader_epoch=epoch)))
        self._send(worker, pb.ControlCommand(drain=pb.Drain(on=False, leader_epoch=epoch)))  # it may not sleep yet

    def _send(self, worker: Worker, command: pb.ControlCommand) -> None:
        self._registry.send(worker, command)
