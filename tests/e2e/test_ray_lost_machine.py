"""A Ray cluster loses a machine under streams: workers run again on another one of the zone, and no request is lost."""

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from contracts import keys
from contracts.lifecycle import Role
from contracts.resp import redis_client
from scheduler.fleet.launch import Launch
from scheduler.fleet.protocol import InstanceState, WorkerSpec
from tests.e2e.stream_load import all_streams
from tests.processes import PEER_TOKEN, REPOSITORY, Stack, until
from tests.scheduler_fleet.ray_cluster import RayMachines, agent_of, process_of, ray_machines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

GROUP = (Role.PREFILL, Role.DECODE)
Environ = Mapping[str, str] | None
SCALING = """
[models.tiny.scaling]
max_workers = 3
idle_s = 600
min_unified = 2
zones = ["a", "b"]
"""


@pytest.fixture(scope="module")
def machines():
    with ray_machines({"a-1": "a", "b-1": "b"}, cpus=2) as machines:
        yield machines


def timed_workers(stack: Stack) -> Launch:
    return Launch(
        argv=(sys.executable, "-m", "workers"),
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "WORKER_ENGINE": "timed",
            "WORKER_LISTEN": "{host}:0",
            "WORKER_BOOTSTRAP_HOST": "{host}",
            "WORKER_REDIS_URL": stack.redis_url,
            "WORKER_CATALOG": str(stack.catalog_file),
            "WORKER_MODEL_PATH": str(stack.models_dir / "tiny"),
            "WORKER_JOURNAL_DIR": str(stack.folder / "journal-{worker_id}"),
            "WORKER_PEER_TOKEN": PEER_TOKEN,
            "WORKER_STEP_MS": "50",
        },
        max_workers=4,
        zones=("a", "b"),
        resources={"CPU": 1},
    )


@pytest.fixture
async def stack(
    stack_folder: Path, redis_url: str, database_url: str, catalog_file: Path, models_dir: Path
) -> AsyncIterator[Stack]:
    async with processes(stack_folder, redis_url, database_url, catalog_file, models_dir) as stack:
        yield stack


@asynccontextmanager
async def processes(
    folder: Path,
    redis_url: str,
    database_url: str,
    catalog_file: Path,
    models_dir: Path,
    environ: Environ = None,
    *,
    otlp_endpoint: str = "",
) -> AsyncIterator[Stack]:
    """Run a gateway, a scheduler and billing."""
    stack = Stack(
        folder=folder, redis_url=redis_url, database_url=database_url, catalog_file=catalog_file, models_dir=models_dir
    )
    stack.otlp_endpoint = otlp_endpoint
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler(cpu_profile=True, environ=environ)
    stack.add_billing()
    stack.start()
    try:
        yield stack
    finally:
        stack.stop()


async def test_a_machine_that_is_lost_costs_no_request(machines: RayMachines, stack: Stack, tmp_path: Path):
    async with agent_of(machines, {"tiny": timed_workers(stack)}, tmp_path / "agent") as fleet:
        for zone in ("a", "b"):
            for role in GROUP:
                await fleet.start(WorkerSpec(worker_id=f"{role}-{zone}", pool="tiny", role=role, zone=zone))

        redis = redis_client(stack.redis_url)

        async def registered(number: int) -> bool:
            alive = [await redis.exists(keys.worker_lease("tiny", f"{r}-{z}")) for z in ("a", "b") for r in GROUP]
            return sum(alive) == number

        await until(lambda: registered(4), 120)
        await stack.ready()
        for zone in ("a", "b"):  # a pair never parts over two zones
            assert {machines.name_of(process_of(f"{role}-{zone}")) for role in GROUP} == {f"{zone}-1"}
        expected = await all_streams(stack)
        assert {finish for _, finish in expected} == {"length"}

        machines.add("b-2", zone="b", cpus=2)
        lost = {f"{role}-b": process_of(f"{role}-b").pid for role in GROUP}

        async def lose() -> None:
            machines.lose("b-1")

        assert await all_streams(stack, lose) == expected

        async def again() -> bool:
            found = {one.spec.worker_id: one for one in await fleet.list("tiny")}
            states = [found[worker_id] for worker_id in lost]
            return all(one.state is InstanceState.RUNNING and one.restarts == 1 for one in states)

        await until(again, 90)
        await until(lambda: registered(4), 60)
        for worker_id, pid in lost.items():
            process = process_of(worker_id)
            assert process.pid != pid
            assert machines.name_of(process) == "b-2"
        assert await all_streams(stack) == expected  # with all four again
        for one in await fleet.list("tiny"):
            await fleet.stop(one.spec.worker_id, grace_s=5)

        async def empty() -> bool:
            return not await fleet.list("tiny")

        await until(empty, 60)
        assert "worker_stops" in await fleet.logs("decode-b", max_bytes=100_000)
        assert await registered(0)
        await redis.aclose()


@pytest.fixture
def scaled_catalog(catalog_file: Path, tmp_path: Path) -> Path:
    file = tmp_path / "models.toml"
    file.write_text(catalog_file.read_text() + SCALING)
    return file


async def test_a_machine_that_is_lost_costs_no_request_where_workers_come_by_demand(
    machines: RayMachines,
    stack_folder: Path,
    redis_url: str,
    database_url: str,
    scaled_catalog: Path,
    models_dir: Path,
    tmp_path: Path,
):
    machines.add("b-3", zone="b", cpus=2)
    agent = tmp_path / "agent"
    environ = {"SCHEDULER_FLEET": "ray", "SCHEDULER_FLEET_ADDRESS": str(agent / "s" / "socket")}
    workers = [f"tiny-auto-unified-{number}" for number in (1, 2)]
    async with (
        processes(stack_folder, redis_url, database_url, scaled_catalog, models_dir, environ) as stack,
        agent_of(machines, {"tiny": timed_workers(stack)}, agent) as fleet,
        redis_client(redis_url) as redis,
    ):

        async def both() -> bool:
            alive = [await redis.exists(keys.worker_lease("tiny", worker_id)) for worker_id in workers]
            return sum(alive) == 2

        await stack.ready()
        assert [finish for _, finish in await all_streams(stack, streams=1)] == ["length"]  # from nothing
        await until(both, 120)
        homes = {machines.name_of(process_of(worker_id)): worker_id for worker_id in workers}
        (machine,) = [name for name in homes if name.startswith("b")]
        doomed = homes[machine]
        expected = await all_streams(stack)
        assert {finish for _, finish in expected} == {"length"}
        before = process_of(doomed).pid

        async def lose() -> None:
            machines.lose(machine)

        assert await all_streams(stack, lose) == expected

        async def again() -> bool:
            found = {one.spec.worker_id: one for one in await fleet.list("tiny")}
            return found[doomed].state is InstanceState.RUNNING and found[doomed].restarts == 1

        await until(again, 90)
        await until(both, 60)
        assert process_of(doomed).pid != before
        assert await all_streams(stack) == expected
        assert {one.spec.worker_id for one in await fleet.list("tiny")} == set(workers)  # and nobody else
        for worker_id in workers:
            await fleet.stop(worker_id, grace_s=5)
