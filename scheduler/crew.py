"""The workers that a fleet keeps for one pool, beside the registry's view of who serves.

* On the way: asked for, not serving yet. When one serves, the parts of its start are measured: place (asked for ->
  its process runs), load (-> it registers), warm (-> requests may be placed).
* Leaving: drained over its Control stream, and stopped once it is empty or the drain has lasted too long. Until it is
  stopped it can be called back, which is faster than a start; not so those that are replaced or given up.
* Stranded: placed nowhere, for which its zone has no room (any more) while another one has. It is given up.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import structlog

from contracts.lifecycle import Role
from contracts.v1 import worker_pb2 as pb
from scheduler.boot import Boot
from scheduler.fleet.protocol import Fleet, Instance, InstanceState, WorkerSpec
from scheduler.policy.headcount import Member
from scheduler.registry import WorkerRegistry
from scheduler.sleepers import CAPABILITY as SLEEP
from scheduler.sleepers import Sleepers
from scheduler.worker import Standing, Worker

log = structlog.get_logger()

DRAIN_CAP_S: Final = 60.0
STOP_GRACE_S: Final = 15.0
SHUNNED_S: Final = 600.0
LEAST_DRAIN_S: Final = 0.5
"""What was submitted just before may still be on its way to the worker."""


class Crew:
    """One pool's workers of a fleet, during one term."""

    def __init__(
        self,
        pool: str,
        *,
        fleet: Fleet,
        registry: WorkerRegistry,
        drain_s: Callable[[Worker], float],
        now_s: Callable[[], float] = time.monotonic,
        now_unix_ms: Callable[[], float] = lambda: time.time() * 1000,
    ) -> None:
        self._pool = pool
        self._fleet = fleet
        self._registry = registry
        self._drain_s = drain_s
        self._now_s = now_s
        self._now_unix_ms = now_unix_ms
        self._instances: dict[str, Instance] = {}
        self._registered_ms: dict[str, float] = {}
        self._booting: set[str] = set()
        self._unread: set[str] = set()  # asked for since the fleet was last asked who is there
        self._ready_ms: dict[str, float] = {}  # those whose start is over, of those that are booting
        self._leaving: dict[str, tuple[float, float]] = {}  # when asked, until when
        self._for_good: set[str] = set()  # of those who leave: they are not called back
        self._placing_since_s: dict[str, float] = {}
        self._ready_since_s: dict[str, float] = {}
        self._shunned: dict[str, float] = {}  # zones, until when
        self._stopped: set[str] = set()
        self._first_look = True
        self.sleepers = Sleepers(registry, now_unix_ms=now_unix_ms)
        self.renew_before_ms = 0
        """Workers that were asked for before are old, Unix ms."""

    # -- what is there -----------------------------------------------------------------------------

    async def read(self) -> None:
        """Ask the fleet who is there. Raises FleetError."""
        found = {instance.spec.worker_id: instance for instance in await self._fleet.list(self._pool)}
        if self._first_look:
            self._first_look = False
            serving = {worker.worker_id for worker in self._registry.workers()}
            self._booting |= found.keys() - serving
        self._instances = found
        self._stopped &= found.keys()
        for gone in self._leaving.keys() - found.keys():
            del self._leaving[gone]
        self._booting &= found.keys()
        self._unread.clear()
        self._ready_ms = {i: at_ms for i, at_ms in self._ready_ms.items() if i in self._booting}
        self._for_good &= self._leaving.keys()
        now_s = self._now_s()
        placing = {i: self._placing_since_s.get(i, now_s) for i, one in found.items() if not _is_placed(one)}
        self._placing_since_s = placing
        ready = {worker.worker_id for worker in self._registry.workers() if worker.ready}
        self._ready_since_s = {i: self._ready_since_s.get(i, now_s) for i in found.keys() & ready}

    @property
    def instances(self) -> Collection[Instance]:
        """Everybody that the fleet has."""
        return self._instances.values()

    @property
    def failed(self) -> Sequence[Instance]:
        """Those that do not stay up, and have not been given up."""
        return [
            one
            for one in self._instances.values()
            if one.state is InstanceState.FAILED and one.spec.worker_id not in self._leaving
        ]

    @property
    def booting(self) -> bool:
        """Whether somebody was asked for who does not serve yet."""
        return bool(self._booting or self.sleepers.waking)

    @property
    def loading(self) -> bool:
        """Whether a process runs that does not serve yet: roles are left alone until it does."""
        return any(
            self._instances[worker_id].state is InstanceState.RUNNING
            for worker_id in self._booting
            if worker_id in self._instances
        )

    @property
    def resident_s(self) -> float:
        """For how long the youngest of those who serve has served, in this term."""
        return self._now_s() - max(self._ready_since_s.values(), default=self._now_s())

    @property
    def num_leaving(self) -> int:
        """How many of those whom the fleet has were asked to stop."""
        return len(self._leaving)

    @property
    def giving(self) -> bool:
        """Whether somebody leaves who will not be called back."""
        return bool(self._for_good)

    @property
    def restless(self) -> bool:
        """Whether somebody comes or goes."""
        return bool(self._booting or self._leaving or self._stopped or self.sleepers.restless)

    @property
    def recallable(self) -> Mapping[str, int]:
        """How many of those who leave could still be called back, by zone."""
        leaving = self._leaving.keys() - self._stopped - self._for_good
        return Counter(self._instances[i].zone for i in leaving if i in self._instances)

    def is_old(self, instance: Instance) -> bool:
        """Return whether a worker is to be replaced."""
        return instance.outdated or instance.asked_unix_ms < self.renew_before_ms

    def bad_zones(self) -> Collection[str]:
        """Return the zones in which a worker does not stay up, or was given up lately."""
        shunned = {zone for zone, until_s in self._shunned.items() if self._now_s() < until_s}
        return {zone_of(instance) for instance in self.failed} | shunned

    def stranded(self, free: Mapping[str, int], *, after_s: float) -> Sequence[str]:
        """Return who should be given up, for another zone has room and theirs none.

        These are the ones that do not stay up, and those that have not been placed for `after_s`. Where they were is
        shunned for a while: what fails in every zone is not the zone's fault, and is given up nowhere.
        `free`: room by zone.
        """
        now_s, bad, found = self._now_s(), self.bad_zones(), []
        for worker_id, instance in self._instances.items():
            zone = zone_of(instance)
            if worker_id in self._leaving or not any(free[z] > 0 for z in free if z != zone and z not in bad):
                continue
            since_s = self._placing_since_s.get(worker_id, now_s)
            unplaced = free.get(zone, 0) < 1 and now_s - since_s >= after_s
            if instance.state is InstanceState.FAILED or unplaced:
                found.append(worker_id)
        return found

    def give_up(self, worker_id: str) -> None:
        """Stop a worker that is stranded."""
        self._shunned[zone_of(self._instances[worker_id])] = self._now_s() + SHUNNED_S
        self.let_go(worker_id, for_good=True)

    def asked_ago_s(self) -> float | None:
        """Return for how long the worker that was asked for first has been on its way; None = nobody is."""
        asked = [self._instances[i].asked_unix_ms for i in self._booting if i in self._instances]
        return (self._now_unix_ms() - min(asked)) / 1000 if asked else None

    def members(self, moving: Mapping[str, Role]) -> Sequence[Member]:
        """Return who serves or will, for the policy. `moving`: roles that workers are about to have."""
        found: list[Member] = []
        known = set()
        for worker in self._registry.workers():
            known.add(worker.worker_id)
            instance = self._instances.get(worker.worker_id)
            gone = not worker.leased or worker.standing is Standing.DEAD
            if worker.worker_id in self._leaving or (gone and instance is None) or self.sleepers.sleeps(worker):
                continue
            if instance is not None and instance.state in (InstanceState.STOPPING, InstanceState.FAILED):
                continue
            found.append(
                Member(
                    worker_id=worker.worker_id,
                    role=moving.get(worker.worker_id, worker.role),
                    ready=worker.ready or worker.worker_id in moving,
                    ours=instance is not None,
                    zone=worker.registration.zone,
                    spot=instance is not None and instance.spec.spot,
                    drain_s=self._drain_s(worker),
                    reclaimed=instance is not None and instance.reclaimed_unix_ms is not None,
                    old=instance is not None and self.is_old(instance),
                    sleeps=SLEEP in worker.registration.capabilities,
                )
            )
        for worker_id, instance in self._instances.items():
            on_the_way = instance.state in (InstanceState.PLACING, InstanceState.RUNNING)
            if worker_id not in known and on_the_way and worker_id not in self._leaving:
                found.append(
                    Member(
                        worker_id=worker_id,
                        role=instance.spec.role,
                        ready=False,
                        zone=instance.zone,
                        spot=instance.spec.spot,
                        reclaimed=instance.reclaimed_unix_ms is not None,
                        old=self.is_old(instance),
                    )
                )
        return found

    def asleep(self) -> Sequence[Member]:
        """Return who could be woken."""
        return [
            Member(
                worker_id=worker.worker_id,
                role=worker.role,
                ready=False,
                zone=worker.registration.zone,
                spot=instance.spec.spot,
                old=self.is_old(instance),
                sleeps=True,
            )
            for worker in self._registry.workers()
            if (instance := self._instances.get(worker.worker_id)) is not None
            and worker.worker_id not in self._leaving
            and self.sleepers.sleeps(worker)
        ]

    @property
    def wakeable(self) -> bool:
        """Whether those who sleep, or wake, can serve by themselves."""
        roles = {member.role for member in self.asleep()}
        roles |= {w.role for w in self._registry.workers() if w.worker_id in self.sleepers.waking}
        return Role.UNIFIED in roles or {Role.PREFILL, Role.DECODE} <= roles

    @property
    def wake_s(self) -> float | None:
        """Seconds that waking takes by what the workers say of themselves; None = they do not."""
        costs = [w.registration.latency.weights for w in self._registry.workers() if w.registration.latency is not None]
        return max((cost.ms / 1000 for cost in costs if cost is not None), default=None)

    def look(self) -> Iterable[Boot]:
        """Return the starts, and the awakenings, that have come to their end since the last look."""
        now_ms, ended = self._now_unix_ms(), list(self.sleepers.look())
        workers = {worker.worker_id: worker for worker in self._registry.workers() if worker.leased}
        for worker_id in list(self._booting):
            worker, instance = workers.get(worker_id), self._instances.get(worker_id)
            if worker is None:
                self._registered_ms.pop(worker_id, None)
                continue
            registered_ms = self._registered_ms.setdefault(worker_id, now_ms)
            if not worker.ready:
                continue
            ready_ms = self._ready_ms.setdefault(worker_id, now_ms)
            if worker_id in self._unread:  # it was quicker than we: the fleet has not said yet since when it runs
                continue
            self._booting.discard(worker_id)
            del self._registered_ms[worker_id], self._ready_ms[worker_id]
            if instance is not None and instance.running_unix_ms is not None and instance.restarts == 0:
                ended.append(
                    Boot(
                        worker_id=worker_id,
                        asked_unix_ms=instance.asked_unix_ms,
                        running_unix_ms=instance.running_unix_ms,
                        registered_unix_ms=max(registered_ms, instance.running_unix_ms),
                        ready_unix_ms=max(ready_ms, registered_ms, instance.running_unix_ms),
                    )
                )
        return ended

    # -- coming ------------------------------------------------------------------------------------

    async def start(self, role: Role, *, zone: str, spot: bool) -> str:
        """Ask for one more worker, or call one back that is about to leave; return its id. Raises FleetError."""
        for worker_id in self._leaving:
            worker = self._worker(worker_id)
            gone = worker_id in self._stopped or worker_id in self._for_good
            if not gone and worker is not None and worker.role is role:
                self._call_back(worker)
                return worker_id
        worker_id = self._free_id(role)
        spec = WorkerSpec(worker_id=worker_id, pool=self._pool, role=role, zone=zone, spot=spot)
        self._instances[worker_id] = await self._fleet.start(spec)
        self._booting.add(worker_id)
        self._unread.add(worker_id)
        return worker_id

    def wake(self, worker_id: str) -> None:
        """Have a worker that sleeps serve again."""
        worker = self._worker(worker_id)
        if worker is not None:
            self.sleepers.wake(worker)

    def _free_id(self, role: Role) -> str:
        taken = {worker.worker_id for worker in self._registry.workers()} | self._instances.keys()
        number = 1
        while (worker_id := f"{self._pool}-auto-{role}-{number}") in taken:
            number += 1
        return worker_id

    def _call_back(self, worker: Worker) -> None:
        del self._leaving[worker.worker_id]
        worker.leaving = worker.departing = False
        worker.touch()
        self._tell(worker, drain=False)

    # -- going -------------------------------------------------------------------------------------

    def let_go(self, worker_id: str, *, for_good: bool = False) -> None:
        """Drain a worker; it is stopped by `see_off`, and never called back where it goes `for_good`."""
        now_s = self._now_s()
        self.sleepers.forget(worker_id)
        if for_good:
            self._for_good.add(worker_id)
        self._leaving[worker_id] = (now_s, now_s + DRAIN_CAP_S)
        worker = self._worker(worker_id)
        if worker is not None:
            self._tell(worker, drain=True)

    def lull(self, worker_id: str) -> None:
        """Let a worker sleep."""
        worker = self._worker(worker_id)
        if worker is not None:
            self.sleepers.lull(worker)

    async def see_off(self) -> None:
        """Stop those who have drained, or should have. Raises FleetError."""
        now_s = self._now_s()
        for worker_id, (asked_s, until_s) in list(self._leaving.items()):
            if worker_id in self._stopped:
                continue
            worker = self._worker(worker_id)
            if worker is not None:
                worker.leaving = worker.departing = True  # also of a life that began meanwhile
                worker.touch()
                empty = worker.num_requests == 0 and now_s - asked_s >= LEAST_DRAIN_S
                if not empty and now_s < until_s:
                    continue
            await self._fleet.stop(worker_id, grace_s=STOP_GRACE_S)
            self._stopped.add(worker_id)

    def _worker(self, worker_id: str) -> Worker | None:
        for worker in self._registry.workers():
            if worker.worker_id == worker_id and worker.standing is Standing.UP:
                return worker
        return None

    def _tell(self, worker: Worker, *, drain: bool) -> None:
        if drain:
            worker.leaving = worker.departing = True
            worker.touch()
        command = pb.Drain(on=drain, leader_epoch=self._registry.leader_epoch)
        self._registry.send(worker, pb.ControlCommand(drain=command))


def zone_of(instance: Instance) -> str:
    """Return where a worker is, or was asked to be."""
    return instance.zone or instance.spec.zone


def _is_placed(instance: Instance) -> bool:
    return instance.state is not InstanceState.PLACING
