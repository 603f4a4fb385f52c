"""How a pool's workers are started: what an adapter is given for each pool."""

import hashlib
from collections.abc import Mapping

import msgspec

from contracts.units import Nano
from scheduler.fleet.protocol import WorkerSpec

WORKER_ID_MARK = "{worker_id}"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The command of one pool's workers, its room and its price."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Everything but what tells one worker from another; `{worker_id}` in a value is replaced."""
    max_workers: int
    """Of this pool on this fleet, per zone."""
    zones: tuple[str, ...] = ("",)
    """Where they may run; one without a name = there are no zones."""
    resources: Mapping[str, float] = {}
    """What one worker takes of a machine, by the fleet's own names (Ray: CPU, GPU, memory in bytes, …)."""
    per_hour: Nano = Nano(0)
    spot_per_hour: Nano | None = None


def digest_of(launch: Launch) -> str:
    """Return what is equal for launches that start a worker in the same way; room and prices are not in it."""
    said = msgspec.json.encode((launch.argv, launch.env, launch.resources), order="sorted")
    return hashlib.sha256(said).hexdigest()[:12]


def environment_of(launch: Launch, spec: WorkerSpec, *, zone: str, node: str) -> Mapping[str, str]:
    """Return the environment of one worker's process."""
    shared = {name: value.replace(WORKER_ID_MARK, spec.worker_id) for name, value in launch.env.items()}
    return {
        **shared,
        "WORKER_ID": spec.worker_id,
        "WORKER_POOL": spec.pool,
        "WORKER_ROLE": spec.role.value,
        "WORKER_ZONE": zone,
        "WORKER_NODE": node,
    }
