"""The workers of one pool: found by their leases, followed over their Control streams.

Life of a worker here:

1. Its lease appears in Redis: a `Worker` is made and its Control stream opened. CONNECTING.
2. Inventory arrives: UP. Status follows every 100 ms.
3. Silence of `suspect_after_s`, or the stream ends: SUSPECT. It gets nothing new; its work goes on.
4. Silence of `dead_after_s`, or a stream that does not open again within `suspect_after_s`, or no stream
   and no lease: DEAD. Its work is lost. The stream is tried further while the lease lives, and an Inventory
   makes it UP again.
5. A lease or Inventory with another epoch is another life: the old one is DEAD, the new one starts at 1.

A lease that vanishes under a healthy stream only stops new work: Redis may be at fault.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import structlog
from redis.exceptions import RedisError

from contracts import keys
from contracts.beat import beat, until_beat_s
from contracts.credentials import NOBODY_ASKED, Credentials
from contracts.resp import RespConnection
from contracts.v1 import worker_pb2 as pb
from contracts.wire import Registration
from scheduler.control import ControlStream
from scheduler.pairs import PairKey, Pairs
from scheduler.policy.cluster import ClusterView, WorkerView
from scheduler.worker import Standing, Worker

log = structlog.get_logger()

_RETRY_S = 0.1
_REDIS_TIMEOUT_S = 2.0

_decode_registration = msgspec.msgpack.Decoder(Registration).decode


class WorkerListener(Protocol):
    """Who acts on what workers say: the dispatcher of the current term."""

    def worker_up(self, worker: Worker, inventory: pb.Inventory) -> None:
        """A stream opened; `inventory` is all the worker runs or holds finished."""

    def worker_reported(self, worker: Worker, kind: str | None, report: pb.ControlReport) -> None:
        """Anything but Status and Inventory; `kind` names the report's set field."""

    def worker_lost(self, worker: Worker) -> None:
        """The worker is dead; its charges are still there and are dropped afterwards."""

    def capacity_changed(self) -> None:
        """A worker may have room now that had none before."""


class WorkerObserver(Protocol):
    """Who learns from what workers say, whether we lead or stand by."""

    def registered(self, worker: Worker) -> None:
        """A lease of this life of a worker was read."""

    def reported(self, worker: Worker, kind: str | None, report: pb.ControlReport) -> None:
        """Any report but the Inventory."""

    def lost(self, worker: Worker) -> None:
        """This life of a worker is over, or dead for now."""


class WorkerRegistry:
    """All workers of one pool."""

    def __init__(
        self,
        connection: RespConnection,
        pool: str,
        *,
        scheduler_id: str,
        suspect_after_s: float,
        dead_after_s: float,
        discover_s: float = 0.5,
        observer: WorkerObserver | None = None,
        heard_role: Callable[[Worker, pb.RoleResult], None] = lambda _, __: None,
        credentials: Credentials = NOBODY_ASKED,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._pool = pool
        self._scheduler_id = scheduler_id
        self._suspect_after_s = suspect_after_s
        self._dead_after_s = dead_after_s
        self._discover_s = discover_s
        self._observer = observer
        self._heard_role = heard_role
        self._credentials = credentials
        self.pairs = Pairs(self.workers, self.send, now_s=now_s)
        self._now_s = now_s
        self._leader_epoch = 0
        self.discovered = asyncio.Event()
        """Set once the leases have been read for the first time."""
        self._links: dict[str, _Link] = {}
        self._listener: WorkerListener | None = None
        self._cluster = ClusterView()
        self._cluster_of: tuple[tuple[WorkerView, ...], frozenset[PairKey], frozenset[PairKey]] = (
            (),
            frozenset(),
            frozenset(),
        )
        self._look = asyncio.Event()  # leases have changed, somebody says

    # -- what others ask ---------------------------------------------------------------------------

    def get(self, worker_id: str, epoch: int) -> Worker | None:
        """Return this life of a worker, or None when it is not known or over."""
        link = self._links.get(worker_id)
        return link.worker if link is not None and link.worker.epoch == epoch else None

    def workers(self) -> Iterator[Worker]:
        """Yield every known worker."""
        return (link.worker for link in self._links.values())

    def cluster(self) -> ClusterView:
        """Return all workers as policy sees them."""
        views = tuple(link.worker.view() for link in self._links.values())
        seen = views, self.pairs.barred, self.pairs.over_budget
        if seen != self._cluster_of:
            self._cluster, self._cluster_of = ClusterView.of(views, barred=seen[1], over_budget=seen[2]), seen
        return self._cluster

    @property
    def leader_epoch(self) -> int:
        """The epoch that our commands carry; 0 = we stand by."""
        return self._leader_epoch

    def look_soon(self) -> None:
        """Read the leases now instead of at the next turn."""
        self._look.set()

    @property
    def highest_epoch(self) -> int:
        """The highest leader epoch any worker has told us of."""
        return max((link.leader_epoch_seen for link in self._links.values()), default=0)

    def send(self, worker: Worker, command: pb.ControlCommand) -> bool:
        """Queue a command for this life of a worker; False = its stream is not up, nothing was sent."""
        link = self._links.get(worker.worker_id)
        return link is not None and link.worker is worker and link.stream.send(command)

    # -- terms ---------------------------------------------------------------------------------------

    def lead(self, epoch: int, listener: WorkerListener) -> None:
        """Open every stream afresh with the epoch of a new term; reports go to `listener`."""
        self._listener = listener
        self._set_epoch(epoch)

    def follow(self) -> None:
        """Go back to read-only streams; local accounting starts from nothing in the next term."""
        self._listener = None
        self._set_epoch(0)

    def _set_epoch(self, epoch: int) -> None:
        self._leader_epoch = epoch
        self.pairs.stop()
        for link in self._links.values():
            link.worker.release_all()
            if link.worker.standing is not Standing.DEAD:
                link.worker.stand(Standing.CONNECTING)
            link.last_heard_s = self._now_s()
            link.stream.reopen(epoch)

    # -- loops ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Discover and follow workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            away = False
            while True:
                try:
                    async with asyncio.timeout(_REDIS_TIMEOUT_S):
                        found = await self._read_leases()
                    self._follow_leases(found, tasks)
                    self.discovered.set()
                    away = False
                except (RedisError, TimeoutError) as error:
                    if not away:  # once per outage
                        log.warning("worker_discovery_failed", pool=self._pool, error=str(error))
                    away = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_beat_s(self._discover_s)):
                        await self._look.wait()
                self._look.clear()

    async def _read_leases(self) -> dict[str, Registration]:
        since_ms = int(time.time() * 1000) - keys.CLOCKS_APART_MS
        members: Any = await self._connection.call("ZRANGEBYSCORE", keys.pool_workers(self._pool), since_ms, "+inf")
        ids = [raw.decode() for raw in members]
        if not ids:
            return {}
        found: dict[str, Registration] = {}
        leases: Any = await self._connection.call("MGET", *(keys.worker_lease(self._pool, i) for i in ids))
        for worker_id, raw in zip(ids, leases, strict=True):
            if raw is None:
                continue
            try:
                registration = _decode_registration(raw)
            except msgspec.MsgspecError as error:
                log.warning("bad_registration", pool=self._pool, worker_id=worker_id, error=str(error))
                continue
            if registration.pool == self._pool and registration.worker_id == worker_id:
                found[worker_id] = registration
        return found

    def _follow_leases(self, found: dict[str, Registration], tasks: asyncio.TaskGroup) -> None:
        for worker_id, registration in found.items():
            link = self._links.get(worker_id)
            if link is not None and registration.epoch < link.worker.epoch:
                continue  # of a process that another has taken over from
            if link is not None and _another_life(link.worker, registration):
                self._end(link, "another_life")
                link = None
            if link is None:
                stream = ControlStream(
                    registration.address, self._scheduler_id, retry_s=_RETRY_S, credentials=self._credentials
                )
                self._links[worker_id] = link = _Link(self, Worker(registration), stream, self._now_s())
                link.stream.reopen(self._leader_epoch)
                link.task = tasks.create_task(link.stream.run(link))
                log.info(
                    "worker_found",
                    pool=self._pool,
                    worker_id=worker_id,
                    role=registration.role,
                    epoch=registration.epoch,
                    address=registration.address,
                )
            link.worker.leased = True
            link.worker.register(registration)
            if self._observer is not None:
                self._observer.registered(link.worker)
        for link in list(self._links.values()):
            worker = link.worker
            if worker.worker_id not in found:
                worker.leased = False
                worker.touch()
                if worker.standing is not Standing.UP:
                    self._end(link, "lease_gone")

    async def _watch(self) -> None:
        """Judge silence."""
        period_s = min(self._suspect_after_s / 3, 0.1)
        while True:
            before_s = self._now_s()
            await beat(period_s)
            # A loop that was itself held up has not heard anybody: that is not their silence.
            held_up_s = max(0.0, self._now_s() - before_s - 2 * period_s)
            for link in list(self._links.values()):
                link.last_heard_s += held_up_s
                if link.stream_lost_s is not None:
                    link.stream_lost_s += held_up_s
                self._judge(link)

    def _judge(self, link: "_Link") -> None:
        silent_s = self._now_s() - link.last_heard_s
        worker = link.worker
        lost_s = link.stream_lost_s
        if silent_s >= self._dead_after_s and worker.standing is not Standing.DEAD:
            self._bury(link, "silent")
            link.stream.reopen()
        elif lost_s is not None and self._now_s() - lost_s >= self._suspect_after_s:
            link.stream_lost_s = None
            self._bury(link, "no_stream")
        elif silent_s >= self._suspect_after_s and worker.standing is Standing.UP:
            self._suspect(link, "silent")

    # -- moves -----------------------------------------------------------------------------------------

    def _suspect(self, link: "_Link", why: str) -> None:
        link.worker.stand(Standing.SUSPECT)
        log.warning("worker_suspect", pool=self._pool, worker_id=link.worker.worker_id, why=why)

    def _bury(self, link: "_Link", why: str) -> None:
        worker = link.worker
        worker.stand(Standing.DEAD)
        link.stream_lost_s = None
        log.warning(
            "worker_dead", pool=self._pool, worker_id=worker.worker_id, why=why, num_requests=len(worker.charges)
        )
        if self._listener is not None:
            self._listener.worker_lost(worker)
        if self._observer is not None:
            self._observer.lost(worker)
        worker.release_all()
        self.pairs.look()

    def _end(self, link: "_Link", why: str) -> None:
        """Forget this life of a worker."""
        del self._links[link.worker.worker_id]
        if link.worker.standing is not Standing.DEAD:
            self._bury(link, why)
        if link.task is not None:
            link.task.cancel()
        self.pairs.look()
        log.info("worker_gone", pool=self._pool, worker_id=link.worker.worker_id, why=why)

    # -- called by links ---------------------------------------------------------------------------------

    def heard_inventory(self, link: "_Link", inventory: pb.Inventory) -> None:
        """Take a stream's first report."""
        worker = link.worker
        link.last_heard_s = self._now_s()
        worker.inventoried_s = link.last_heard_s
        link.leader_epoch_seen = max(link.leader_epoch_seen, inventory.leader_epoch)
        if inventory.worker_epoch != worker.epoch:
            # The process restarted or switched role before its lease says so; discovery brings the new life.
            log.info("worker_changed_life", pool=self._pool, worker_id=worker.worker_id, epoch=inventory.worker_epoch)
            if worker.standing is not Standing.DEAD:
                self._bury(link, "another_life")
            link.stream.reopen()
            return
        worker.stand(Standing.UP)
        link.stream_lost_s = None
        if inventory.HasField("status"):
            worker.report(inventory.status)
        self.pairs.look()
        if self._listener is not None:
            self._listener.worker_up(worker, inventory)
            self._listener.capacity_changed()

    def heard_report(self, link: "_Link", report: pb.ControlReport) -> None:
        """Take any later report."""
        worker = link.worker
        link.last_heard_s = self._now_s()
        if worker.standing is Standing.SUSPECT:
            worker.stand(Standing.UP)
        kind = report.WhichOneof("report")
        if self._observer is not None:
            self._observer.reported(worker, kind, report)
        match kind:
            case "status":
                self._heard_status(worker, report.status)
            case "probe_result":
                if self.pairs.heard(worker, report.probe_result) and self._listener is not None:
                    self._listener.capacity_changed()
            case "role_result":
                self._heard_role(worker, report.role_result)
                if report.role_result.worker_epoch != worker.epoch:
                    self.look_soon()
            case _ if self._listener is not None:
                try:
                    self._listener.worker_reported(worker, kind, report)
                except Exception:
                    log.exception("report_failed", pool=self._pool, worker_id=worker.worker_id, kind=kind)
            case _:
                pass  # nobody leads

    def _heard_status(self, worker: Worker, status: pb.Status) -> None:
        if status.worker_epoch != worker.epoch:
            return
        role = worker.role
        worker.report(status)
        if worker.role is not role:  # a label: the life goes on
            self.pairs.look()
        if self._listener is not None and worker.ready:
            self._listener.capacity_changed()

    def lost_stream(self, link: "_Link") -> None:
        """Take the end of a stream that was up, or a failed try."""
        worker = link.worker
        if worker.standing is Standing.UP:
            self._suspect(link, "stream_ended")
        if worker.standing is Standing.SUSPECT and link.stream_lost_s is None:
            link.stream_lost_s = self._now_s()
        if not worker.leased and worker.standing is not Standing.DEAD:
            self._bury(link, "lease_gone")


class _Link:
    """Ties one worker's stream to the registry."""

    def __init__(self, registry: WorkerRegistry, worker: Worker, stream: ControlStream, now_s: float) -> None:
        self._registry = registry
        self.worker = worker
        self.stream = stream
        self.task: asyncio.Task[None] | None = None
        self.last_heard_s = now_s
        self.stream_lost_s: float | None = None  # since when the stream is being opened again
        self.leader_epoch_seen = 0

    def inventory_received(self, inventory: pb.Inventory) -> None:
        self._registry.heard_inventory(self, inventory)

    def report_received(self, report: pb.ControlReport) -> None:
        self._registry.heard_report(self, report)

    def stream_lost(self) -> None:
        self._registry.lost_stream(self)


def _another_life(worker: Worker, registration: Registration) -> bool:
    return registration.epoch != worker.epoch or registration.address != worker.registration.address
