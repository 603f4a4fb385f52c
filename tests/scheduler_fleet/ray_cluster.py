"""A Ray cluster of several machines on this one, each with a raylet of its own, and agents of it."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from scheduler.fleet.agent import AgentFleet
from scheduler.fleet.launch import Launch
from tests.processes import REPOSITORY

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Nothing is reported, and the cluster is on loopback, as Ray has it where clusters are of one machine."""
STORE_BYTES = 80 * 2**20
NOTICED_FAST = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""Of raylets that died: seconds instead of a quarter of a minute."""


class RayMachines:
    """The cluster. Its head takes no workers."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self, name: str, *, zone: str, cpus: int = 4, gpus: int = 0) -> None:
        self.nodes[name] = self._cluster.add_node(
            num_cpus=cpus, num_gpus=gpus, labels={"zone": zone}, object_store_memory=STORE_BYTES, wait=False
        )

    def raylet(self, name: str) -> int:
        """Return the process of a machine's raylet."""
        return self.nodes[name].all_processes["raylet"][0].process.pid

    def name_of(self, process: psutil.Process) -> str:
        """Return the machine on which a process runs."""
        parents = {parent.pid for parent in process.parents()}
        (name,) = [name for name in self.nodes if self.raylet(name) in parents]
        return name

    def lose(self, name: str) -> None:
        """Kill a machine's raylet and let all that ran below it go, as when its power fails."""
        node = self.nodes.pop(name)
        self._cluster.remove_node(node, allow_graceful=False)


@contextmanager
def ray_machines(machines: dict[str, str], **more: int) -> Iterator[RayMachines]:
    """Start a head and one machine per entry (name -> zone)."""
    os.environ |= QUIET
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "temp_dir": folder,
            "node_ip_address": "127.0.0.1",
            "_system_config": NOTICED_FAST,
        },
    )
    try:
        there = RayMachines(cluster)
        for name, zone in machines.items():
            there.add(name, zone=zone, **more)
        cluster.wait_for_nodes(60)
        yield there
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def process_of(worker_id: str) -> psutil.Process | None:
    """Return the newest process that was started as this worker."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("WORKER_ID") == worker_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return max(found, key=lambda process: process.create_time(), default=None)


@asynccontextmanager
async def agent_of(machines: RayMachines, launches: dict[str, Launch], folder: Path) -> AsyncIterator[AgentFleet]:
    """Run an agent as a process and give what a scheduler has of it."""
    socket, output = folder / "s" / "socket", folder / "agent.log"
    process = _agent(machines, launches, folder, socket, output)
    try:
        async with asyncio.timeout(90):
            while not socket.exists():
                assert process.poll() is None, output.read_text()
                await asyncio.sleep(0.05)
        yield AgentFleet(socket)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)


def _agent(
    machines: RayMachines, launches: dict[str, Launch], folder: Path, socket: Path, output: Path
) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "launches.json"
    file.write_bytes(msgspec.json.encode(launches))
    with output.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "scheduler.fleet.ray_agent"],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "RAYFLEET_ADDRESS": machines.address,
                "RAYFLEET_SOCKET": str(socket),
                "RAYFLEET_LAUNCHES": str(file),
                "RAYFLEET_LOGS": str(folder / "output"),
            },
            stdout=log,
            stderr=log,
        )
