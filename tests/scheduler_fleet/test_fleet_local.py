"""The fleet of one machine, directly and through its agent."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager

import psutil
import pytest
from msgspec.structs import replace

from contracts.units import Nano
from scheduler.fleet.agent import AgentFleet, serve_fleet
from scheduler.fleet.launch import Launch
from scheduler.fleet.local import LocalFleet
from scheduler.fleet.protocol import FleetUnreachable, NoRoom
from tests.scheduler_fleet.fleet_contract import (
    OTHER_POOL,
    POOL,
    PRICE_NANO,
    PROGRAM,
    ROOM,
    FleetContract,
    gone,
    running,
    said,
    spec,
    until,
)


def launch(program=PROGRAM, **more):
    env = {"OWN": "{worker_id}", "PATH": os.environ["PATH"]}
    return Launch(
        argv=(sys.executable, "-I", "-S", "-c", program),
        env=env,
        **{"max_workers": ROOM, "per_hour": Nano(PRICE_NANO), **more},
    )


class LocalRig:
    within_s = 20.0

    def __init__(self, fleet, local, another):
        self.fleet = fleet
        self.local = local
        self.another = another

    async def kill(self, instance):
        os.killpg(self.local.pid(instance.spec.worker_id), signal.SIGKILL)


@asynccontextmanager
async def local_fleet(tmp_path, launches=None, **more):
    async with asyncio.TaskGroup() as tasks:
        fleet = LocalFleet(tasks, launches or {POOL: launch(), OTHER_POOL: launch()}, logs=tmp_path, **more)
        try:
            yield fleet
        finally:
            await fleet.close(grace_s=0.5)


class TestLocalFleet(FleetContract):
    @pytest.fixture
    async def rig(self, tmp_path):
        async with local_fleet(tmp_path) as fleet:
            yield LocalRig(fleet, fleet, lambda: fleet)


class TestFleetBehindItsAgent(FleetContract):
    @pytest.fixture
    async def rig(self, tmp_path):
        path = tmp_path / "fleet" / "socket"
        async with local_fleet(tmp_path) as fleet, serve_fleet(fleet, path):
            yield LocalRig(AgentFleet(path), fleet, lambda: AgentFleet(path))


async def test_an_agent_that_is_away_is_unreachable(tmp_path):
    with pytest.raises(FleetUnreachable, match="does not answer"):
        await AgentFleet(tmp_path / "socket").list(POOL)


async def test_garbage_at_the_socket_harms_nobody(tmp_path):
    path = tmp_path / "fleet" / "socket"
    async with local_fleet(tmp_path) as fleet, serve_fleet(fleet, path):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"\x00\x00\x00\x03abc")
        assert b"no call" in await reader.read(1000)
        writer.close()
        assert await AgentFleet(path).list(POOL) == ()
        assert path.parent.stat().st_mode & 0o077 == 0


async def test_a_worker_that_ignores_sigterm_is_killed_with_all_it_started(tmp_path):
    deaf = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    rig_launches = {POOL: launch(deaf)}
    async with local_fleet(tmp_path, rig_launches) as fleet:
        rig = LocalRig(fleet, fleet, lambda: fleet)
        await fleet.start(spec("w-1"))
        child = int((await said(rig, "w-1", "child")).split()[1])
        await fleet.stop("w-1", grace_s=600)
        await fleet.stop("w-1", grace_s=0)  # who asks again in more of a hurry is obeyed
        await gone(rig, "w-1")
        await until(rig, lambda: asyncio.to_thread(_has_ended, child))


def _has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_worker_goes_where_it_is_asked_or_where_most_room_is(tmp_path):
    launches = {POOL: launch(max_workers=2, zones=("a", "b"))}
    async with local_fleet(tmp_path, launches) as fleet:
        assert (await fleet.start(spec("w-1", zone="b"))).zone == "b"
        assert (await fleet.start(spec("w-2"))).zone == "a"
        assert (await fleet.start(spec("w-3", zone="b"))).zone == "b"
        with pytest.raises(NoRoom, match="in b"):
            await fleet.start(spec("w-4", zone="b"))
        assert (await fleet.start(spec("w-4"))).zone == "a"
        assert (await fleet.capacity(POOL)).free == {"a": 0, "b": 0}


async def test_pools_of_one_machine_share_its_room(tmp_path):
    async with local_fleet(tmp_path, max_workers=4) as fleet:
        for number in range(3):
            await fleet.start(spec(f"w-{number}"))
        assert (await fleet.capacity(OTHER_POOL)).total == 1
        await fleet.start(spec("o-1", pool=OTHER_POOL))
        with pytest.raises(NoRoom):
            await fleet.start(spec("o-2", pool=OTHER_POOL))
        assert (await fleet.capacity(OTHER_POOL)).crowded  # the others' workers are in its way
        assert not (await fleet.capacity(POOL)).crowded  # it has what it may have


async def test_workers_that_would_be_started_otherwise_by_now_are_outdated(tmp_path):
    launches = {POOL: launch()}
    async with local_fleet(tmp_path, launches) as fleet:
        await fleet.start(spec("w-1"))
        launches[POOL] = replace(launches[POOL], per_hour=Nano(1), max_workers=2)  # changes no process
        assert [one.outdated for one in await fleet.list(POOL)] == [False]
        launches[POOL] = replace(launches[POOL], env={**launches[POOL].env, "NEW": "1"})
        await fleet.start(spec("w-2"))
        assert {one.spec.worker_id: one.outdated for one in await fleet.list(POOL)} == {"w-1": True, "w-2": False}


async def test_each_instance_tells_its_machine(tmp_path):
    async with local_fleet(tmp_path) as fleet:
        await fleet.start(spec("w-1"))
        assert (await running(LocalRig(fleet, fleet, None), "w-1")).node == socket.gethostname()
