"""The fleet of a Ray cluster: a placement group and a detached actor for each worker.

1. `start` makes a placement group of one bundle, what a worker takes of a machine, on machines of the zone; then a
   Keeper (scheduler.fleet.ray_worker) in it, under the worker's id. Both are detached: they outlive whoever asked for
   them. The group's name holds what was asked, so the cluster itself is the list of workers.
2. When a machine is lost, Ray places the group anew and starts the Keeper there, which starts the worker: PLACING, then
   RUNNING again. Ray notices a dead raylet after its own health checks (15 s unless its head is told otherwise); that
   the worker is gone the scheduler knows long before, and its requests go on elsewhere.
3. `stop` tells the Keeper. Whoever looks next takes the actor and its group away, once the worker has ended; its last
   words are kept by another detached actor, the Shelf.

Ray ends a process that uses it when the cluster's head is away for a minute. So this runs in a process of its own
(scheduler.fleet.ray_agent), and the scheduler is a client of that one.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Final, TypeVar

import msgspec
import structlog

from scheduler.fleet.launch import Launch, digest_of
from scheduler.fleet.protocol import (
    Capacity,
    FleetError,
    FleetUnreachable,
    Instance,
    InstanceState,
    NoRoom,
    Price,
    WorkerSpec,
)
from scheduler.fleet.ray_worker import SHELF_BYTES, Here, Keeper, Shelf

log = structlog.get_logger()

NAMESPACE: Final = "pdgate"
ZONE_LABEL: Final = "zone"
_NAME: Final = "pdgate-worker "
_SHELF: Final = "pdgate-shelf"
_CALL_S: Final = 4.5  # below the agent's, so that the caller hears why
_ANSWER_S: Final = 2.0  # of one Keeper
_ORPHAN_MS: Final = 10_000
_DEFAULT_RESOURCES: Final[Mapping[str, float]] = {"CPU": 1.0}
_GONE: Final = "REMOVED"
_PLACED: Final = "CREATED"
_NO_MACHINE: Final = {
    "PENDING": "no machine of the zone has room yet",
    "RESCHEDULING": "its machine was lost; no other one has room yet",
}

T = TypeVar("T")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a placement group is for: the rest of its name, as JSON."""

    spec: WorkerSpec
    zone: str
    asked_unix_ms: int
    launch: str = ""
    """Digest of how it is started."""


class _Found(msgspec.Struct, frozen=True):
    """A group of ours in the cluster's table, and the worker in it."""

    name: str
    asked: Asked
    placed: str
    """Ray's word for how far the group is."""
    keeper: Any
    instance: Instance


def here_on_ray() -> Here:
    """Return where the calling actor runs."""
    ray: Any = import_module("ray")  # in an actor; not in the base environment
    context = ray.get_runtime_context()
    return Here(host=ray.util.get_node_ip_address(), again=context.was_current_actor_reconstructed)


class RayFleet:
    """Places workers on a Ray cluster that this process is connected to."""

    def __init__(
        self,
        ray: Any,
        launches: Mapping[str, Launch],
        *,
        logs: str,
        zone_label: str = ZONE_LABEL,
        now_unix_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        """`ray`: the module, after `ray.init` in NAMESPACE. `logs`: a folder on every machine."""
        self._ray = ray
        self._launches = launches
        self._logs = logs
        self._zone_label = zone_label
        self._now_unix_ms = now_unix_ms
        self._keeper = ray.remote(Keeper)
        self._starting: set[str] = set()
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="ray")

    async def start(self, spec: WorkerSpec) -> Instance:
        """See Fleet."""
        if not spec.worker_id or "/" in spec.worker_id or spec.worker_id.startswith("."):
            raise FleetError(f"{spec.worker_id!r} is no worker's name")
        self._starting.add(spec.worker_id)
        try:
            return await self._call(lambda: self._start(spec), f"start {spec.worker_id!r}")
        finally:
            self._starting.discard(spec.worker_id)

    async def stop(self, worker_id: str, *, grace_s: float) -> None:
        """See Fleet."""
        await self._call(lambda: self._stop(worker_id, grace_s), f"stop {worker_id!r}")

    async def list(self, pool: str) -> Sequence[Instance]:
        """See Fleet."""
        found = await self._call(self._look, f"list {pool!r}")
        return [one.instance for one in found.values() if one.asked.spec.pool == pool]

    async def capacity(self, pool: str) -> Capacity:
        """See Fleet."""
        launch = self._launch(pool)
        free, crowded = await self._call(lambda: self._room(pool, launch), f"tell the room of {pool!r}")
        return Capacity(free=free, free_spot=free if launch.spot_per_hour is not None else {}, crowded=crowded)

    async def price(self, pool: str) -> Price:
        """See Fleet."""
        launch = self._launch(pool)
        return Price(per_hour=launch.per_hour, spot_per_hour=launch.spot_per_hour)

    async def logs(self, worker_id: str, *, max_bytes: int) -> str:
        """See Fleet."""
        return await self._call(lambda: self._tail(worker_id, max_bytes), f"tell the output of {worker_id!r}")

    async def _call(self, blocking: Callable[[], T], what: str) -> T:
        try:
            async with asyncio.timeout(_CALL_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, blocking)
        except TimeoutError:
            raise FleetUnreachable(f"Ray did not {what} within {_CALL_S} s") from None
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise FleetUnreachable(f"Ray could not {what}: {error}") from error

    # -- in a thread -------------------------------------------------------------------------------

    def _launch(self, pool: str) -> Launch:
        launch = self._launches.get(pool)
        if launch is None:
            raise FleetError(f"no pool {pool!r} here; there are {', '.join(self._launches) or 'none'}")
        return launch

    def _start(self, spec: WorkerSpec) -> Instance:
        launch = self._launch(spec.pool)
        if spec.zone and spec.zone not in launch.zones:
            raise FleetError(f"no zone {spec.zone!r} for pool {spec.pool!r}; there are {', '.join(launch.zones)}")
        found = self._look()
        there = found.get(spec.worker_id)
        if there is not None:
            if there.instance.state is InstanceState.STOPPING:
                raise FleetError(f"worker {spec.worker_id!r} is still stopping")
            return there.instance
        free = self._free(spec.pool, launch, found)
        zone = spec.zone or max(launch.zones, key=lambda name: free[name])
        if free[zone] < 1:
            raise NoRoom(f"no room for worker {spec.worker_id!r} of pool {spec.pool!r} in {spec.zone or 'any zone'}")
        asked = Asked(spec=spec, zone=zone, asked_unix_ms=self._now_unix_ms(), launch=digest_of(launch))
        self._place(asked, launch)
        return _instance(asked, "being placed")

    def _place(self, asked: Asked, launch: Launch) -> None:
        util = self._ray.util
        bundle = _bundle(launch)
        group = util.placement_group(
            [bundle],
            strategy="STRICT_PACK",
            name=_NAME + msgspec.json.encode(asked).decode(),
            lifetime="detached",
            bundle_label_selector=[{self._zone_label: asked.zone}] if asked.zone else None,
        )
        strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
        try:
            self._keeper.options(
                name=asked.spec.worker_id,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory"),
                resources=others,
                scheduling_strategy=strategy,
            ).remote(asked.spec, launch, zone=asked.zone, logs=self._logs, here=here_on_ray)
        except BaseException:
            util.remove_placement_group(group)
            raise
        log.info("ray_worker_asked", worker_id=asked.spec.worker_id, pool=asked.spec.pool, zone=asked.zone)

    def _stop(self, worker_id: str, grace_s: float) -> None:
        one = self._look().get(worker_id)
        if one is None:
            return
        if one.placed == _PLACED and one.keeper is not None:
            try:
                self._ray.get(one.keeper.stop.remote(grace_s), timeout=_ANSWER_S)
            except self._ray.exceptions.GetTimeoutError:
                if one.instance.state is InstanceState.RUNNING:
                    raise FleetUnreachable(f"the keeper of worker {worker_id!r} does not answer") from None
            else:
                log.info("ray_worker_asked_to_stop", worker_id=worker_id, grace_s=grace_s)
                return
        self._take_away(one.name, one.keeper)  # it runs nowhere

    def _look(self) -> dict[str, _Found]:
        """Return every worker in the cluster, and take away what has ended."""
        groups = self._groups()
        keepers = {asked.spec.worker_id: self._find(asked.spec.worker_id) for _, asked, _ in groups}
        told = self._told(
            {
                asked.spec.worker_id: keeper
                for _, asked, placed in groups
                if placed == _PLACED and (keeper := keepers[asked.spec.worker_id]) is not None
            }
        )
        found: dict[str, _Found] = {}
        for name, asked, placed in groups:
            worker_id = asked.spec.worker_id
            keeper = keepers[worker_id]
            if keeper is None and self._is_orphan(asked):
                self._take_away(name, None)
                continue
            if worker_id in told:
                instance = told[worker_id]
                if instance is None:
                    self._shelve(worker_id, keeper)
                    self._take_away(name, keeper)
                    continue
                instance = msgspec.structs.replace(instance, zone=asked.zone, asked_unix_ms=asked.asked_unix_ms)
            else:
                instance = _instance(asked, _NO_MACHINE.get(placed, "its keeper is starting, or does not answer"))
            instance = msgspec.structs.replace(instance, outdated=self._is_outdated(asked))
            found[worker_id] = _Found(name, asked, placed, keeper, instance)
        return found

    def _groups(self) -> Sequence[tuple[str, Asked, str]]:
        """Return name, what was asked and Ray's state of each group of ours."""
        groups = []
        for row in self._ray.util.placement_group_table().values():
            name = row["name"]
            if name.startswith(_NAME) and row["state"] != _GONE:
                groups.append((name, _asked(name), row["state"]))
        return groups

    def _find(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # no actor of that name is alive
            return None

    def _told(self, keepers: Mapping[str, Any]) -> dict[str, Instance | None]:
        """Return what the keepers say that answer in time."""
        asked = {worker_id: keeper.tell.remote() for worker_id, keeper in keepers.items()}
        if asked:
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S, fetch_local=False)
        told: dict[str, Instance | None] = {}
        for worker_id, answer in asked.items():
            try:
                told[worker_id] = self._ray.get(answer, timeout=0.05)
            except self._ray.exceptions.RayError as error:  # GetTimeoutError, and actors that are being restarted
                log.debug("keeper_silent", worker_id=worker_id, error=type(error).__name__)
        return told

    def _is_outdated(self, asked: Asked) -> bool:
        launch = self._launches.get(asked.spec.pool)
        return launch is not None and asked.launch != "" and asked.launch != digest_of(launch)

    def _is_orphan(self, asked: Asked) -> bool:
        """Whether a group without an actor is left over, rather than about to get one."""
        age_ms = self._now_unix_ms() - asked.asked_unix_ms
        return asked.spec.worker_id not in self._starting and age_ms > _ORPHAN_MS

    def _take_away(self, name: str, keeper: Any) -> None:
        if keeper is not None:
            self._ray.kill(keeper, no_restart=True)
        try:
            self._ray.util.remove_placement_group(self._ray.util.get_placement_group(name))
        except ValueError:
            return  # gone already

    def _room(self, pool: str, launch: Launch) -> tuple[dict[str, int], bool]:
        """Return the room, and whether other pools' workers are why there is none."""
        found = self._look()
        free = self._free(pool, launch, found)
        own = sum(1 for one in found.values() if one.asked.spec.pool == pool)
        full = not any(free.values()) and own < launch.max_workers * len(launch.zones)
        return free, full and len(found) > own

    def _free(self, pool: str, launch: Launch, found: Mapping[str, _Found]) -> dict[str, int]:
        """Return by zone how many more workers fit, by the pool's bound and by the machines' resources."""
        bundle = _bundle(launch)
        taken: dict[str, dict[str, float]] = {}
        unplaced: dict[str, int] = {}
        for row in self._ray.util.placement_group_table().values():  # once: a group is on a machine, or waits for one
            if row["state"] == _GONE:
                continue
            nodes = {index: node_id for index, node_id in row["bundles_to_node_id"].items() if node_id}
            for index, node_id in nodes.items():
                on_node = taken.setdefault(node_id, {})
                for resource, amount in row["bundles"][index].items():
                    on_node[resource] = on_node.get(resource, 0.0) + amount
            if not nodes and row["name"].startswith(_NAME):
                zone = _asked(row["name"]).zone
                unplaced[zone] = unplaced.get(zone, 0) + 1
        free: dict[str, int] = {}
        for zone in launch.zones:
            fits = 0
            for node in self._ray.nodes():
                if node["Alive"] and (not zone or node.get("Labels", {}).get(self._zone_label) == zone):
                    fits += _fitting(node["Resources"], taken.get(node["NodeID"], {}), bundle)
            own = sum(1 for one in found.values() if one.asked.spec.pool == pool and one.asked.zone == zone)
            free[zone] = max(0, min(launch.max_workers - own, fits - unplaced.get(zone, 0)))
        return free

    # -- output ------------------------------------------------------------------------------------

    def _tail(self, worker_id: str, max_bytes: int) -> str:
        keeper = self._find(worker_id)
        if keeper is not None:
            try:
                text: str = self._ray.get(keeper.tail.remote(max_bytes), timeout=_ANSWER_S)
            except self._ray.exceptions.GetTimeoutError:
                raise FleetUnreachable(f"the keeper of worker {worker_id!r} does not answer") from None
            return text
        kept: str | None = self._ray.get(self._shelf().get.remote(worker_id), timeout=_ANSWER_S)
        if kept is None:
            raise FleetError(f"nothing is known of worker {worker_id!r}")
        return kept.encode()[-max_bytes:].decode(errors="replace")

    def _shelve(self, worker_id: str, keeper: Any) -> None:
        """Keep the last words of a worker that has ended; it goes without when that fails."""
        try:
            text = self._ray.get(keeper.tail.remote(SHELF_BYTES), timeout=_ANSWER_S)
            self._ray.get(self._shelf().put.remote(worker_id, text), timeout=_ANSWER_S)
        except self._ray.exceptions.RayError as error:
            log.warning("last_words_lost", worker_id=worker_id, error=type(error).__name__)

    def _shelf(self) -> Any:
        return (
            self._ray.remote(Shelf)
            .options(
                name=_SHELF, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1
            )
            .remote()
        )


def _asked(name: str) -> Asked:
    return msgspec.json.decode(name[len(_NAME) :], type=Asked)


def _bundle(launch: Launch) -> dict[str, float]:
    return dict(launch.resources or _DEFAULT_RESOURCES)


def _fitting(total: Mapping[str, float], taken: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many bundles a machine has room for."""
    rooms = [
        math.floor((total.get(name, 0.0) - taken.get(name, 0.0)) / amount + 1e-9)
        for name, amount in bundle.items()
        if amount > 0
    ]
    return max(0, min(rooms, default=0))


def _instance(asked: Asked, message: str) -> Instance:
    return Instance(
        spec=asked.spec,
        state=InstanceState.PLACING,
        zone="",
        asked_unix_ms=asked.asked_unix_ms,
        message=message,
    )
