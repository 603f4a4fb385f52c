"""What the scheduler needs from whatever places worker processes: this machine, Ray, Kubernetes.

The scheduler decides how many workers of which role there should be, and when; a fleet only carries it out.

1. `start` asks for one worker. PLACING until a machine has been found, then RUNNING: its process exists. Whether it
   serves is not the fleet's to say: a worker registers itself in Redis once its engine is warm, as workers do that
   were started by hand.
2. A process that ends unasked is started again under the same id (`restarts` counts). One that does not stay up is
   FAILED: the fleet goes on trying, ever more slowly, and nobody should count on it.
3. `stop` ends a worker for good: STOPPING, then it is listed no more. The scheduler drains a worker before it asks.
4. A machine that is lost takes its workers with it: each is PLACING or RUNNING again elsewhere, FAILED, or not listed.

A fleet outlives the scheduler: who leads next finds, through an adapter of its own, all that an earlier leader started.
What the adapter was told (worker id, pool, role, zone) is kept with the process, not in the scheduler.

Worker ids are unique within an installation, and a stopped id may be used again.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from contracts.lifecycle import Role
from contracts.units import Nano


class FleetError(Exception):
    """The fleet cannot do what was asked. The message says what was asked and what stands in the way."""


class NoRoom(FleetError):
    """No machine of the zone has room for the worker, and none will without somebody's doing."""


class FleetUnreachable(FleetError):
    """Whoever places the processes does not answer; what was asked may have happened or not."""


class InstanceState(StrEnum):
    """How far a worker's process is."""

    PLACING = "placing"  # asked for, not on a machine yet
    RUNNING = "running"  # its process exists; it may still be loading
    STOPPING = "stopping"
    FAILED = "failed"  # does not stay up


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A worker to start."""

    worker_id: str
    pool: str
    role: Role
    """The role it starts in; it may change without the fleet."""
    zone: str = ""
    """Where it must be placed: prefill and decode of one group share a zone. Empty = anywhere."""
    spot: bool = False
    """On capacity that may be taken away."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that the fleet has started and not yet taken away."""

    spec: WorkerSpec
    state: InstanceState
    zone: str = ""
    """Where it is; as asked, or as chosen. Empty while it is placed nowhere, or where there are no zones."""
    node: str = ""
    """Name of the machine; empty while PLACING."""
    asked_unix_ms: int = 0
    running_unix_ms: int | None = None
    """When its present process began; None = it has none. From `asked_unix_ms` to here is the placing."""
    restarts: int = 0
    """How often it was started again after it had ended unasked."""
    reclaimed_unix_ms: int | None = None
    """When its spot capacity will be taken away, once that was announced."""
    message: str = ""
    """Why it is not RUNNING, in words for operators."""
    outdated: bool = False
    """A worker of the pool that is started now would be started otherwise: another image, command or environment."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """How many more workers of a pool could be placed now, without anybody's doing."""

    free: Mapping[str, int]
    """By zone; `{"": n}` where there are none."""
    free_spot: Mapping[str, int] = {}
    crowded: bool = False
    """There is none because of what other pools have taken: what one of them gives up, this one could have."""

    @property
    def total(self) -> int:
        """In all zones, spot capacity not counted."""
        return sum(self.free.values())


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker of a pool costs while it is there, whatever it does."""

    per_hour: Nano
    spot_per_hour: Nano | None = None
    """None = there is no spot capacity."""


class Fleet(Protocol):
    """Places and keeps worker processes. Every call has its own deadline inside and raises FleetUnreachable after it.

    Calls for one worker id come one after the other; calls for different ones may overlap.
    """

    async def start(self, spec: WorkerSpec) -> Instance:
        """Ask for a worker and return it, PLACING or RUNNING. An id that is there already is returned as it is.

        Raises:
            NoRoom: it cannot be placed.
            FleetError: the pool or the zone is unknown, or the id is still STOPPING.
        """

    async def stop(self, worker_id: str, *, grace_s: float) -> None:
        """Ask a worker to end; it is killed after `grace_s`. Returns at once. An unknown id is no error."""

    async def list(self, pool: str) -> Sequence[Instance]:
        """Return every worker of a pool that was started here and is not gone, STOPPING ones included."""

    async def capacity(self, pool: str) -> Capacity:
        """Return the room for further workers of a pool. Pools may share it: what one takes the others lose."""

    async def price(self, pool: str) -> Price:
        """Return what a worker of the pool costs."""

    async def logs(self, worker_id: str, *, max_bytes: int) -> str:
        """Return the end of a worker's output; empty when there is none. A worker that has ended can still be asked.

        Raises:
            FleetError: nothing is known of the worker.
        """
