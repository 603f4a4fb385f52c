"""The fleet of one machine: worker processes, kept running.

Each worker has a loop of its own: spawn, wait, and after an end that nobody asked for a pause that grows from half a
second to ten; a run of half a minute resets it. Output goes to `LOGS/WORKER_ID.log`, which outlives the worker.

This is the side that owns the processes; `pdgate up` runs it. The scheduler reaches it through scheduler.fleet.agent,
so that a scheduler that dies takes no worker with it.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog

from scheduler.fleet.launch import Launch, digest_of, environment_of
from scheduler.fleet.protocol import (
    Capacity,
    FleetError,
    Instance,
    InstanceState,
    NoRoom,
    Price,
    WorkerSpec,
)

log = structlog.get_logger()

PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 10.0
STEADY_AFTER_S: Final = 30.0
FAILED_AFTER: Final = 3
"""Short runs in a row after which a worker counts as FAILED."""


class Spawner(Protocol):
    """Starts processes in sessions of their own."""

    async def spawn(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], output: Path
    ) -> asyncio.subprocess.Process:
        """Start one; its output is appended to a file. Raises OSError."""

    async def finish(self, process: asyncio.subprocess.Process) -> int:
        """Wait for a process, kill what it leaves in its group, and return its exit code."""


class SessionSpawner:
    """Starts processes with nothing but a session of their own.

    Args:
        before_exec: called in the new process before its program begins.
    """

    def __init__(self, before_exec: Callable[[], None] | None = None) -> None:
        self._before_exec = before_exec

    async def spawn(
        self,
        name: str,  # noqa: ARG002
        argv: Sequence[str],
        env: Mapping[str, str],
        output: Path,
    ) -> asyncio.subprocess.Process:
        """Start one; its output is appended to a file. Raises OSError."""
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as log_file:
            return await asyncio.create_subprocess_exec(
                *argv,
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                preexec_fn=self._before_exec,
            )

    async def finish(self, process: asyncio.subprocess.Process) -> int:
        """Wait for a process, kill what it leaves in its group, and return its exit code."""
        code = await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        return code


class LocalFleet:
    """Keeps the workers of this machine running in the caller's TaskGroup, until `close`."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        launches: Mapping[str, Launch],
        *,
        logs: Path,
        max_workers: int = 0,
        spawner: Spawner | None = None,
        node: str = "",
        now_unix_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        """`max_workers` of all pools together; 0 = as many as the pools may have.

        `launches` is read at each start. Workers that run keep what they were started with.
        """
        self._tasks = tasks
        self._launches = launches
        self._logs = logs
        self._max_workers = max_workers
        self._spawner = spawner or SessionSpawner()
        self._node = node or socket.gethostname()
        self._now_unix_ms = now_unix_ms
        self._kept: dict[str, _Kept] = {}
        self._closed = False

    async def start(self, spec: WorkerSpec) -> Instance:
        """See Fleet."""
        kept = self._kept.get(spec.worker_id)
        if kept is not None:
            if kept.stop.is_set():
                raise FleetError(f"worker {spec.worker_id!r} is still stopping")
            return self._instance(kept)
        if self._closed:
            raise FleetError("the fleet is shutting down")
        launch = self._launch(spec.pool)
        zone = self._zone(spec, launch)
        kept = _Kept(spec, zone, self._now_unix_ms(), digest_of(launch))
        self._kept[spec.worker_id] = kept
        self._tasks.create_task(self._keep(kept, launch), name=spec.worker_id)
        return self._instance(kept)

    async def stop(self, worker_id: str, *, grace_s: float) -> None:
        """See Fleet."""
        kept = self._kept.get(worker_id)
        if kept is None:
            return
        kept.kill_after_s = min(grace_s, kept.kill_after_s)
        kept.hurry.set()
        if not kept.stop.is_set():
            kept.stop.set()
            log.info("worker_asked_to_stop", worker_id=worker_id, pool=kept.spec.pool, grace_s=grace_s)

    async def list(self, pool: str) -> Sequence[Instance]:
        """See Fleet."""
        return [self._instance(kept) for kept in self._kept.values() if kept.spec.pool == pool]

    async def capacity(self, pool: str) -> Capacity:
        """See Fleet."""
        launch = self._launch(pool)
        free = {zone: self._free(pool, zone, launch) for zone in launch.zones}
        spot = launch.spot_per_hour is not None
        mine = sum(1 for kept in self._kept.values() if kept.spec.pool == pool)
        full = not any(free.values()) and mine < launch.max_workers * len(launch.zones)
        return Capacity(free=free, free_spot=free if spot else {}, crowded=full and len(self._kept) > mine)

    async def price(self, pool: str) -> Price:
        """See Fleet."""
        launch = self._launch(pool)
        return Price(per_hour=launch.per_hour, spot_per_hour=launch.spot_per_hour)

    async def logs(self, worker_id: str, *, max_bytes: int) -> str:
        """See Fleet."""
        file = self._log_file(worker_id)
        if not file.exists():
            if worker_id in self._kept:
                return ""
            raise FleetError(f"nothing is known of worker {worker_id!r}")
        with file.open("rb") as output:
            output.seek(max(0, file.stat().st_size - max_bytes))
            return output.read().decode(errors="replace")

    async def close(self, *, grace_s: float) -> None:
        """Stop every worker and wait until all are gone."""
        self._closed = True
        for worker_id in list(self._kept):
            await self.stop(worker_id, grace_s=grace_s)
        async with asyncio.timeout(grace_s + 10):
            for kept in list(self._kept.values()):
                await kept.gone.wait()

    def kill(self) -> None:
        """Stop every worker, and kill its process at once."""
        self._closed = True
        for kept in self._kept.values():
            kept.stop.set()
            kept.kill_after_s = 0.0
            kept.hurry.set()

    def pid(self, worker_id: str) -> int | None:
        """Return the process of a worker; None = it has none, or is not here."""
        kept = self._kept.get(worker_id)
        return kept.process.pid if kept is not None and kept.process is not None else None

    # -- inside ------------------------------------------------------------------------------------

    def _instance(self, kept: "_Kept") -> Instance:
        launch = self._launches.get(kept.spec.pool)
        return kept.instance(self._node, outdated=launch is not None and digest_of(launch) != kept.launch)

    def _launch(self, pool: str) -> Launch:
        launch = self._launches.get(pool)
        if launch is None:
            raise FleetError(f"no pool {pool!r} here; there are {', '.join(self._launches) or 'none'}")
        return launch

    def _zone(self, spec: WorkerSpec, launch: Launch) -> str:
        """Return where a worker goes: as asked, or where most room is."""
        if spec.zone and spec.zone not in launch.zones:
            raise FleetError(f"no zone {spec.zone!r} for pool {spec.pool!r}; there are {', '.join(launch.zones)}")
        zones = (spec.zone,) if spec.zone else launch.zones
        best = max(zones, key=lambda zone: self._free(spec.pool, zone, launch))
        if self._free(spec.pool, best, launch) < 1:
            raise NoRoom(f"no room for worker {spec.worker_id!r} of pool {spec.pool!r} in {spec.zone or 'any zone'}")
        return best

    def _free(self, pool: str, zone: str, launch: Launch) -> int:
        used = sum(1 for kept in self._kept.values() if kept.spec.pool == pool and kept.zone == zone)
        free = launch.max_workers - used
        if self._max_workers:
            free = min(free, self._max_workers - len(self._kept))
        return max(0, free)

    def _log_file(self, worker_id: str) -> Path:
        if "/" in worker_id or worker_id.startswith("."):
            raise FleetError(f"{worker_id!r} is no worker's name")
        return self._logs / f"{worker_id}.log"

    async def _keep(self, kept: "_Kept", launch: Launch) -> None:
        """Run a worker until it is asked to stop."""
        worker_id = kept.spec.worker_id
        env = environment_of(launch, kept.spec, zone=kept.zone, node=self._node)
        pause_s = PAUSE_FIRST_S
        try:
            while not kept.stop.is_set():
                kept.began_s = time.monotonic()
                how = await self._run(kept, launch.argv, env)
                if kept.stop.is_set():
                    return
                if kept.steady:
                    pause_s, kept.short_runs = PAUSE_FIRST_S, 0
                else:
                    kept.short_runs += 1
                kept.message = f"{how}; started again in {pause_s:.1f} s"
                kept.restarts += 1
                log.warning("worker_ended", worker_id=worker_id, how=how, again_in_s=pause_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await kept.stop.wait()
                pause_s = min(PAUSE_MAX_S, pause_s * 2)
        finally:
            del self._kept[worker_id]
            kept.gone.set()

    async def _run(self, kept: "_Kept", argv: Sequence[str], env: Mapping[str, str]) -> str:
        """Run a process once and return how it ended."""
        try:
            kept.process = process = await self._spawner.spawn(
                kept.spec.worker_id, argv, env, self._log_file(kept.spec.worker_id)
            )
        except OSError as error:
            return f"could not start: {error}"
        kept.running_unix_ms = self._now_unix_ms()
        try:
            async with asyncio.TaskGroup() as tasks:
                stopping = tasks.create_task(_end_when_asked(kept, process))
                code = await self._spawner.finish(process)
                stopping.cancel()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        kept.process, kept.running_unix_ms = None, None
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


class _Kept:
    """One worker that is kept running."""

    def __init__(self, spec: WorkerSpec, zone: str, asked_unix_ms: int, launch: str) -> None:
        """`launch`: the digest of how it is started."""
        self.spec = spec
        self.zone = zone
        self.asked_unix_ms = asked_unix_ms
        self.launch = launch
        self.began_s = time.monotonic()
        """When its last process was started."""
        self.short_runs = 0
        self.running_unix_ms: int | None = None
        self.restarts = 0
        self.message = ""
        self.process: asyncio.subprocess.Process | None = None
        self.kill_after_s = float("inf")
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.gone = asyncio.Event()

    @property
    def steady(self) -> bool:
        """Whether the last process ran for long, or has been running for long."""
        return time.monotonic() - self.began_s > STEADY_AFTER_S

    @property
    def state(self) -> InstanceState:
        """How far it is."""
        if self.stop.is_set():
            return InstanceState.STOPPING
        if self.short_runs >= FAILED_AFTER and not (self.process is not None and self.steady):
            return InstanceState.FAILED
        return InstanceState.RUNNING if self.process is not None else InstanceState.PLACING

    def instance(self, node: str, *, outdated: bool) -> Instance:
        """Return the worker as the fleet tells of it."""
        return Instance(
            spec=self.spec,
            state=self.state,
            zone=self.zone,
            node=node,
            asked_unix_ms=self.asked_unix_ms,
            running_unix_ms=self.running_unix_ms,
            restarts=self.restarts,
            message="" if self.state is InstanceState.RUNNING else self.message,
            outdated=outdated,
        )


async def _end_when_asked(kept: _Kept, process: asyncio.subprocess.Process) -> None:
    """Signal a process once its worker is asked to stop: SIGTERM to it alone, later SIGKILL to its whole group."""
    await kept.stop.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    began_s = time.monotonic()
    while (left_s := kept.kill_after_s - (time.monotonic() - began_s)) > 0:
        kept.hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await kept.hurry.wait()  # a second `stop` may shorten it
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
