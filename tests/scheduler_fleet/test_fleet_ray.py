"""The fleet of a Ray cluster, for real: a head and machines with raylets of their own, on this machine."""

import asyncio
import os
import sys

import pytest

from contracts.units import Nano
from scheduler.fleet.launch import Launch
from scheduler.fleet.protocol import FleetError, InstanceState, NoRoom
from tests.scheduler_fleet.fleet_contract import (
    OTHER_POOL,
    POOL,
    PRICE_NANO,
    PROGRAM,
    ROOM,
    FleetContract,
    gone,
    instances,
    running,
    said,
    spec,
    until,
)
from tests.scheduler_fleet.ray_cluster import RayMachines, agent_of, process_of, ray_machines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ZONED, WITH_GPU = "zoned", "with-gpu"


def launch(program=PROGRAM, **more):
    return Launch(
        argv=(sys.executable, "-I", "-S", "-c", program),
        env={"OWN": "{worker_id}", "PATH": os.environ["PATH"]},
        **{"max_workers": ROOM, "per_hour": Nano(PRICE_NANO), **more},
    )


TELLS_DEVICES = PROGRAM.replace("'I am'", "'devices', os.environ.get('CUDA_VISIBLE_DEVICES'), 'I am'")
LAUNCHES = {
    POOL: launch(),
    OTHER_POOL: launch(),
    ZONED: launch(max_workers=8, zones=("a", "b")),
    WITH_GPU: launch(TELLS_DEVICES, max_workers=8, resources={"CPU": 1, "GPU": 1}),
}


class RayRig:
    within_s = 60.0

    def __init__(self, fleet, later):
        self.fleet = fleet
        self._later = later

    def another(self):
        return self._later

    async def kill(self, instance):
        process_of(instance.spec.worker_id).kill()


@pytest.fixture(scope="module")
def machines():
    with ray_machines({"a-1": "a", "b-1": "b"}, gpus=2) as machines:
        yield machines


@pytest.fixture
async def rig(machines: RayMachines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    async with agent_of(machines, LAUNCHES, folder / "1") as fleet, agent_of(machines, LAUNCHES, folder / "2") as later:
        rig = RayRig(fleet, later)
        yield rig
        for pool in LAUNCHES:
            for worker_id in await instances(fleet, pool):
                await fleet.stop(worker_id, grace_s=0.1)

        async def empty():
            return not [worker for pool in LAUNCHES for worker in await instances(fleet, pool)]

        await until(rig, empty)


class TestRayFleet(FleetContract):
    """What every fleet does."""


async def test_prefill_and_decode_of_a_group_are_placed_in_the_zone_that_was_asked(machines, rig):
    for number in range(3):
        await rig.fleet.start(spec(f"w-{number}", pool=ZONED, zone="b"))
        instance = await running(rig, f"w-{number}", ZONED)
        assert instance.zone == "b"
        assert machines.name_of(process_of(f"w-{number}")) == "b-1"
    await said(rig, "w-0", f"{ZONED} b")
    assert (await rig.fleet.capacity(ZONED)).free == {"a": 4, "b": 1}  # four cores each, one for a worker
    await rig.fleet.start(spec("w-3", pool=ZONED, zone="b"))
    with pytest.raises(NoRoom, match="in b"):
        await rig.fleet.start(spec("w-4", pool=ZONED, zone="b"))
    await rig.fleet.start(spec("w-4", pool=ZONED))
    assert (await running(rig, "w-4", ZONED)).zone == "a"


async def test_each_worker_sees_the_accelerators_that_were_kept_for_it(machines, rig):
    seen = set()
    for number in range(4):
        await rig.fleet.start(spec(f"g-{number}", pool=WITH_GPU))
        await running(rig, f"g-{number}", WITH_GPU)
        text = await said(rig, f"g-{number}", "I am")
        seen.add((machines.name_of(process_of(f"g-{number}")), text.split()[1]))
    assert seen == {("a-1", "0"), ("a-1", "1"), ("b-1", "0"), ("b-1", "1")}
    with pytest.raises(NoRoom):
        await rig.fleet.start(spec("g-4", pool=WITH_GPU))


async def test_workers_of_a_lost_machine_run_again_on_another_of_its_zone(machines, rig):
    machines.add("b-2", zone="b")
    for number in range(5):
        await rig.fleet.start(spec(f"w-{number}", pool=ZONED, zone="b"))
        await running(rig, f"w-{number}", ZONED)
    where = {f"w-{number}": machines.name_of(process_of(f"w-{number}")) for number in range(5)}
    assert set(where.values()) == {"b-1", "b-2"}
    lost = [worker_id for worker_id, name in where.items() if name == "b-2"]
    old = {worker_id: process_of(worker_id) for worker_id in lost}
    machines.lose("b-2")

    async def died():
        return not any(process.is_running() and process.status() != "zombie" for process in old.values())

    await until(rig, died)  # with their machine: nothing is left that could answer twice
    for worker_id in lost[: 8 - len(where)]:

        async def again(worker_id=worker_id):
            now = (await instances(rig.fleet, ZONED)).get(worker_id)
            settled = now is not None and now.state is InstanceState.RUNNING and now.restarts == 1
            return settled or (now is not None and "no other one has room" in now.message)

        await until(rig, again)
    states = {w: i.state for w, i in (await instances(rig.fleet, ZONED)).items()}
    assert sum(1 for state in states.values() if state is InstanceState.RUNNING) == 4  # as many as b-1 has cores
    (waiting,) = [w for w, state in states.items() if state is InstanceState.PLACING]
    machines.add("b-3", zone="b")
    assert (await running(rig, waiting, ZONED)).restarts == 1
    assert machines.name_of(process_of(waiting)) == "b-3"


async def test_a_worker_that_waits_for_a_machine_can_be_stopped(machines, rig):
    machines.add("b-4", zone="b")
    await rig.fleet.start(spec("w-1", pool=ZONED, zone="b"))
    await running(rig, "w-1", ZONED)
    await rig.fleet.stop("w-1", grace_s=0.1)
    await gone(rig, "w-1")
    with pytest.raises(FleetError, match="no worker's name"):
        await rig.fleet.start(spec("../etc/passwd"))


async def test_an_agent_that_cannot_work_says_why_in_one_line(tmp_path):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler.fleet.ray_agent"),
        env={**os.environ, "RAYFLEET_SOCKET": str(tmp_path / "s" / "socket"), "RAYFLEET_LAUNCHES": "/dev/null"},
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert errors.startswith(b"RAYFLEET_LAUNCHES: /dev/null: ")
    assert process.returncode == 1
