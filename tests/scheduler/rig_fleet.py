"""A fleet whose workers are the rig's: for tests of what the scheduler makes of a fleet, not of a fleet."""

import asyncio
import time

import msgspec
from rig import Rig
from rig_gateway import POOL

from contracts import keys
from scheduler.fleet.protocol import Capacity, Instance, InstanceState, NoRoom, Price, WorkerSpec


class RigFleet:
    """Starts and stops workers of a rig, in one room or in zones of as much room each.

    `facts` is what workers that are started from now on are given; it may be changed. `tells_late`: that one runs is
    not in the answer to its start, as with fleets that place first.
    """

    def __init__(
        self, rig: Rig, *, room: int = 3, zones: tuple[str, ...] = ("",), tells_late: bool = False, **facts
    ) -> None:
        self.started: list[WorkerSpec] = []
        self.stopped: list[str] = []
        self.may_boot = asyncio.Event()
        self.may_boot.set()
        self.facts = facts
        self.most = 0
        """Workers that were there at once."""
        self.lost_zones: set[str] = set()
        self.workers = {}
        self._rig, self._room, self._zones, self._tells_late = rig, room, zones, tells_late
        self._instances: dict[str, Instance] = {}
        self._boots: list[asyncio.Task] = []
        rig._stack.push_async_callback(self._end)

    async def start(self, spec: WorkerSpec) -> Instance:
        if spec.worker_id in self._instances:
            return self._instances[spec.worker_id]
        free = (await self.capacity(spec.pool)).free
        zone = spec.zone or max(free, key=lambda name: free[name])
        if free[zone] < 1:
            raise NoRoom(f"no room for {spec.worker_id}")
        now_ms = int(time.time() * 1000)
        self.started.append(spec)
        self._instances[spec.worker_id] = instance = Instance(
            spec=spec, state=InstanceState.RUNNING, zone=zone, node="here", asked_unix_ms=now_ms, running_unix_ms=now_ms
        )
        self.most = max(self.most, len(self._instances))
        self._boots.append(self._rig._tasks.create_task(self._boot(spec)))
        if self._tells_late:
            return msgspec.structs.replace(instance, state=InstanceState.PLACING, running_unix_ms=None)
        return instance

    async def _boot(self, spec: WorkerSpec) -> None:
        await self.may_boot.wait()
        if spec.worker_id in self._instances:
            self.workers[spec.worker_id] = await self._rig.worker(
                spec.role, worker_id=spec.worker_id, zone=self._instances[spec.worker_id].zone, **self.facts
            )

    async def _end(self) -> None:
        for boot in self._boots:
            boot.cancel()

    async def stop(self, worker_id: str, *, grace_s: float) -> None:
        if self._instances.pop(worker_id, None) is None:
            return
        self.stopped.append(worker_id)
        worker = self.workers.pop(worker_id, None)
        if worker is not None:  # by a task of the rig's: a scheduler that ends must not leave it half dead
            self._rig._tasks.create_task(self._take_away(worker))

    async def _take_away(self, worker) -> None:
        for beating in worker.tasks[1:]:
            beating.cancel()
        await worker.kill()
        await self._rig.redis.zrem(keys.pool_workers(POOL), worker.worker_id)
        await self._rig.redis.delete(keys.worker_lease(POOL, worker.worker_id))

    async def list(self, pool: str):
        return list(self._instances.values())

    async def capacity(self, pool: str) -> Capacity:
        there = [instance.zone for instance in self._instances.values()]
        return Capacity(
            free={zone: 0 if zone in self.lost_zones else self._room - there.count(zone) for zone in self._zones}
        )

    async def price(self, pool: str) -> Price:
        return Price(per_hour=0)

    async def logs(self, worker_id: str, *, max_bytes: int) -> str:
        return ""

    def fail(self, worker_id: str) -> None:
        """Let a worker be one that does not stay up."""
        failed = msgspec.structs.replace(
            self._instances[worker_id], state=InstanceState.FAILED, message="exit code 3", running_unix_ms=None
        )
        self._instances[worker_id] = failed

    async def lose_zone(self, zone: str) -> None:
        """Let every worker of a zone vanish, and no other find a place there."""
        self.lost_zones.add(zone)
        for worker_id, instance in list(self._instances.items()):
            if instance.zone == zone:
                self._instances[worker_id] = msgspec.structs.replace(
                    instance, state=InstanceState.PLACING, zone="", running_unix_ms=None, message="no machine"
                )
                worker = self.workers.pop(worker_id, None)
                if worker is not None:
                    await self._take_away(worker)
