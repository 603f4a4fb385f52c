"""The workers this gateway knows: their leases, polled, and one Attach stream to each.

A worker becomes known by its lease in Redis, or earlier by a `Placed` notice that names it. It is given
up when it cannot be reached and its lease is gone, or after `LOST_AFTER_S` whatever its lease says. One that is out of
reach for `UNREACHABLE_S` gets nothing new from here: each submit names it to the scheduler.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contracts import keys
from contracts.beat import beat
from contracts.catalog import Catalog
from contracts.credentials import NOBODY_ASKED, Credentials
from contracts.lifecycle import HandOff, Role, WorkerState
from contracts.resp import RespConnection
from contracts.scaling import ScaleNote, decode_note
from contracts.series import read_series
from contracts.v1 import worker_pb2 as pb
from contracts.wire import Registration, WorkerRef
from gateway.attach import LINK_CHECK_S, WorkerLink
from gateway.table import LiveTable

log = structlog.get_logger()

LOST_AFTER_S: Final = 3.0
UNREACHABLE_S: Final = 1.0
_MEMORY_SAMPLES: Final = 5
_LOOK_TIMEOUT_S: Final = 2.0
_RUNG_HOLDS_MS: Final = 20_000
_SOON_S: Final = 1.0
_DEGRADED: Final = frozenset({"local", "unavailable"})

_decoder = msgspec.msgpack.Decoder(Registration)


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """What the last look at a pool showed."""

    workers: Sequence[Registration] = ()
    inbox_entries: int = 0
    inbox_bytes: int = 0
    note: ScaleNote | None = None  # of its autoscaler; None = it has none, or nobody leads it
    rung: str = "normal"  # of the degrade ladder; only of pools that have a local model beside them


class Fleet:
    """Polls leases and owns the links. `run` until cancelled."""

    def __init__(
        self,
        redis: Redis,
        connection: RespConnection,
        catalog: Catalog,
        table: LiveTable,
        *,
        gateway_id: str,
        period_s: float,
        link_check_s: float = LINK_CHECK_S,
        credentials: Credentials = NOBODY_ASKED,
    ) -> None:
        self._redis = redis
        self._connection = connection
        self._catalog = catalog
        self._table = table
        self._gateway_id = gateway_id
        self._period_s = period_s
        self._link_check_s = link_check_s
        self._credentials = credentials
        self._pools: Mapping[str, PoolView] = {pool: PoolView() for pool in catalog.pools}
        self._primaries = {catalog.pool_of(route.primary) for route in catalog.routes.values()}
        self._links: dict[str, WorkerLink] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._out_of_reach: frozenset[str] = frozenset()
        self._tasks: asyncio.TaskGroup | None = None
        self.redis_up = False

    # -- what others ask ----------------------------------------------------------------------------

    def pool(self, pool: str) -> PoolView:
        """Return the last look at a pool."""
        return self._pools.get(pool, PoolView())

    def missing_path(self, pool: str, hand_off: HandOff) -> str | None:
        """Return what a pool lacks to serve a request, or None when it has a whole path."""
        ready = [w for w in self.pool(pool).workers if w.state is WorkerState.READY]
        if any(w.role is Role.UNIFIED for w in ready):
            return None
        if hand_off is HandOff.STORE and any(hand_off in w.hand_offs for w in ready):
            return None  # with the store a role is a label: one worker alone does both phases
        able = {w.role for w in ready if hand_off in w.hand_offs}
        lacking = [role.value for role in (Role.PREFILL, Role.DECODE) if role not in able]
        return f"no ready {' and no ready '.join(lacking)} worker" if lacking else None

    def degraded(self, pool: str) -> bool:
        """Return whether a pool is so short of capacity that a local model should serve instead."""
        return self.pool(pool).rung in _DEGRADED

    def wakes_in_s(self, pool: str) -> float | None:
        """Return when a pool that serves nobody at the moment is expected to; None = nothing can be expected."""
        note = self.pool(pool).note
        if note is None or note.cold_s is None or not note.wakes:
            return None
        return max(_SOON_S, note.cold_s - max(0.0, time.time() - note.at_unix_ms / 1000))

    def simulated(self, pool: str) -> bool:
        """Return whether a timed engine makes the pool's text, or will once workers are there."""
        view = self.pool(pool)
        if view.workers:
            return any(w.simulated for w in view.workers)
        return view.note is not None and view.note.simulated

    def attached(self, worker_id: str) -> bool:
        """Return whether the token stream of a worker stands."""
        return self.silent_s(worker_id) < math.inf

    def silent_s(self, worker_id: str) -> float:
        """Return for how long a worker's token stream has sent nothing, seconds; infinite when there is none."""
        link = self._links.get(worker_id)
        return link.silent_s if link is not None else math.inf

    def reachable(self, worker_id: str) -> bool:
        """Return whether the token stream of a worker stands, or may soon stand again."""
        link = self._links.get(worker_id)
        return link is not None and link.detached_for_s < UNREACHABLE_S

    def unreachable(self, pool: str) -> tuple[str, ...]:
        """Return the workers of a pool that have a lease and could not be reached at the last look."""
        if not self._out_of_reach:
            return ()
        return tuple(w.worker_id for w in self.pool(pool).workers if w.worker_id in self._out_of_reach)

    @property
    def num_attached(self) -> int:
        """Workers whose token stream stands."""
        return sum(link.attached for link in self._links.values())

    # -- what others want done -----------------------------------------------------------------------

    def abort_on_worker(self, worker_id: str, attempt: pb.AttemptId, reason: str) -> None:
        """Stop all samples of an attempt on one worker, if we know it."""
        link = self._links.get(worker_id)
        if link is not None:
            link.abort(attempt, reason)

    def doubt(self, worker_id: str) -> None:
        """Have the link to a worker show that it still carries anything."""
        link = self._links.get(worker_id)
        if link is not None:
            link.doubt()

    def know(self, ref: WorkerRef) -> None:
        """Connect to a worker that a notice named, if it is new."""
        link = self._links.get(ref.worker_id)
        if link is not None:
            link.seen(ref)
        elif self._tasks is not None:
            link = WorkerLink(
                ref,
                gateway_id=self._gateway_id,
                table=self._table,
                check_s=self._link_check_s,
                credentials=self._credentials,
            )
            self._links[ref.worker_id] = link
            self._running[ref.worker_id] = self._tasks.create_task(link.run())

    async def run(self) -> None:
        """Look at the leases again and again."""
        self._links.clear()  # those of an earlier run ended with its tasks
        self._running.clear()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                try:
                    async with asyncio.timeout(_LOOK_TIMEOUT_S):
                        await self.look()
                    self.redis_up = True
                except (RedisError, OSError) as error:
                    if self.redis_up:
                        log.warning("redis_unavailable", error=str(error))
                    self.redis_up = False  # the last view stays; running streams go on
                self._give_up_lost()
                await beat(self._period_s)

    async def look(self) -> None:
        """Read all leases once. Raises RedisError."""
        pools: dict[str, PoolView] = {}
        for pool in self._catalog.pools:
            pools[pool] = await self._look_at(pool)
        self._pools = pools
        for view in pools.values():
            for worker in view.workers:
                self.know(WorkerRef(worker_id=worker.worker_id, epoch=worker.epoch, address=worker.address))

    async def _look_at(self, pool: str) -> PoolView:
        inbox = keys.inbox(pool)
        since_ms = int(time.time() * 1000) - keys.CLOCKS_APART_MS
        replies = await self._connection.call_all(
            (
                ("ZRANGEBYSCORE", keys.pool_workers(pool), since_ms, "+inf"),
                ("XLEN", inbox),
                ("MEMORY", "USAGE", inbox, "SAMPLES", _MEMORY_SAMPLES),
                ("GET", keys.scaling(pool)),
            )
        )
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        worker_ids, num_entries, num_bytes, note = replies
        leases: list[bytes | None] = []
        if worker_ids:
            names = [keys.worker_lease(pool, worker_id.decode()) for worker_id in worker_ids]
            leases = await self._connection.call("MGET", *names)
        workers = [worker for raw in leases if raw is not None and (worker := _registration(raw)) is not None]
        rung = await self._rung_of(pool) if pool in self._primaries else "normal"
        return PoolView(
            workers=workers, inbox_entries=num_entries, inbox_bytes=num_bytes or 0, rung=rung, note=_note(note)
        )

    async def _rung_of(self, pool: str) -> str:
        """Return what the pool's scheduler said last, if that is not old."""
        since_ms = int(time.time() * 1000) - _RUNG_HOLDS_MS
        points = await read_series(self._redis, pool, since_unix_ms=since_ms, count=1)
        return points[-1].rung if points else "normal"

    def _give_up_lost(self) -> None:
        leased = {worker.worker_id for view in self._pools.values() for worker in view.workers}
        self._out_of_reach = frozenset(worker_id for worker_id in self._links if not self.reachable(worker_id))
        for worker_id, link in list(self._links.items()):
            if link.attached:
                continue
            gone = worker_id not in leased and self.redis_up and link.detached_for_s > self._period_s
            if gone or link.detached_for_s > LOST_AFTER_S:
                link.lose("worker_lost")
            if gone:
                log.info("worker_gone", worker_id=worker_id)
                del self._links[worker_id]
                self._running.pop(worker_id).cancel()


def _note(raw: bytes | None) -> ScaleNote | None:
    """Return what a pool's autoscaler says; None also for what another version wrote."""
    try:
        return decode_note(raw) if raw else None
    except msgspec.MsgspecError as error:
        log.warning("bad_scale_note", error=str(error))
        return None


def _registration(raw: bytes) -> Registration | None:
    """Return a lease's value, or None when a worker of another version wrote what we cannot read."""
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError as error:
        log.warning("bad_registration", error=str(error))
        return None
