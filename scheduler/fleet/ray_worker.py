"""What runs on Ray's machines: one Keeper beside each worker process, and one Shelf for the fleet.

Both are plain classes, made actors by scheduler.fleet.ray. A Keeper has a fleet of one (scheduler.fleet.local) in a
thread of its own, so a process that dies is started again there and then. When Ray starts a Keeper again, since its
machine or its process was lost, the constructor starts the worker again.
"""

import asyncio
import ctypes
import os
import signal
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from scheduler.fleet.launch import Launch
from scheduler.fleet.local import LocalFleet, SessionSpawner
from scheduler.fleet.protocol import Instance, WorkerSpec

HOST_MARK: Final = "{host}"
SHELF_BYTES: Final = 64 * 1024
_SHELF_WORKERS: Final = 500
_SECOND: Final = 5.0
_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_PR_SET_PDEATHSIG: Final = 1
_prctl: Callable[..., int] = ctypes.CDLL(None).prctl if os.name == "posix" else lambda *_: 0


def _die_with_parent() -> None:
    """Have a new process killed when this one dies, as it does with its machine's raylet.

    Runs between fork and exec: takes no lock, imports nothing.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def launch_here(launch: Launch, *, zone: str, host: str, environ: Mapping[str, str]) -> Launch:
    """Return the launch on this machine: its address in place of `{host}`, and the accelerators that Ray chose."""
    given = {name: value.replace(HOST_MARK, host) for name, value in launch.env.items()}
    if launch.resources.get("GPU"):
        given |= {name: environ[name] for name in _DEVICES if environ.get(name)}
    return msgspec.structs.replace(launch, env=given, max_workers=1, zones=(zone,))


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """Where a Keeper finds itself."""

    host: str
    """The machine's address, for peers."""
    again: bool
    """Whether the same Keeper ran elsewhere before."""


class Keeper:
    """Keeps one worker process running until it is asked to stop."""

    def __init__(self, spec: WorkerSpec, launch: Launch, *, zone: str, logs: str, here: Callable[[], Here]) -> None:
        """Start the worker. `here` is asked on the machine where this runs."""
        place = here()
        self._spec = spec
        self._launch = launch_here(launch, zone=zone, host=place.host, environ=os.environ)
        self._logs = Path(logs)
        self._again = place.again
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._fleet: LocalFleet | None = None
        threading.Thread(target=self._run, name="keeper", daemon=True).start()
        self._started.wait()

    def tell(self) -> Instance | None:
        """Return how the worker is; None = it was asked to stop, and has."""

        async def look() -> Sequence[Instance]:
            assert self._fleet is not None
            return await self._fleet.list(self._spec.pool)

        for instance in asyncio.run_coroutine_threadsafe(look(), self._loop).result(_SECOND):
            return msgspec.structs.replace(instance, spec=self._spec, restarts=instance.restarts + int(self._again))
        return None

    def stop(self, grace_s: float) -> None:
        """Ask it to end. Returns at once."""
        assert self._fleet is not None
        stopping = self._fleet.stop(self._spec.worker_id, grace_s=grace_s)
        asyncio.run_coroutine_threadsafe(stopping, self._loop).result(_SECOND)

    def tail(self, max_bytes: int) -> str:
        """Return the end of its output on this machine."""
        file = self._logs / f"{self._spec.worker_id}.log"
        if not file.exists():
            return ""
        with file.open("rb") as output:
            output.seek(max(0, file.stat().st_size - max_bytes))
            return output.read().decode(errors="replace")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._keep())

    async def _keep(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            fleet = LocalFleet(
                tasks,
                {self._spec.pool: self._launch},
                logs=self._logs,
                spawner=SessionSpawner(_die_with_parent),
                node=socket.gethostname(),
            )
            await fleet.start(self._spec)
            self._fleet = fleet
            self._started.set()
            await asyncio.Event().wait()  # as long as the actor lives, for `tell` and `tail`


class Shelf:
    """The last words of workers that have ended, the newest few hundred."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()

    def put(self, worker_id: str, text: str) -> None:
        """Keep a text in place of an older one."""
        self._texts[worker_id] = text
        self._texts.move_to_end(worker_id)
        while len(self._texts) > _SHELF_WORKERS:
            self._texts.popitem(last=False)

    def get(self, worker_id: str) -> str | None:
        """Return what is kept."""
        return self._texts.get(worker_id)
