"""What any fleet must do. An adapter's tests subclass FleetContract and give it a rig.

The workers are small programs, not engines: a fleet knows processes only. PROGRAM prints its identity and waits;
with STAYS_DOWN in the environment's WORKER_ID it ends at once.
"""

import asyncio
import contextlib
from typing import Protocol

import pytest

from contracts.lifecycle import Role
from scheduler.fleet.protocol import Fleet, FleetError, Instance, InstanceState, NoRoom, WorkerSpec

POOL = "small"
OTHER_POOL = "other"
ROOM = 3
"""Workers that POOL may have at once; all in one zone, or where there are none."""
PRICE_NANO = 2_500_000_000
STAYS_DOWN = "stays-down"
PROGRAM = (
    "import os, sys, time\n"
    "print('I am', os.environ['WORKER_ID'], os.environ['WORKER_ROLE'], os.environ['WORKER_POOL'],"
    " os.environ['WORKER_ZONE'] or 'nowhere', os.environ['OWN'], flush=True)\n"
    f"sys.exit(3) if os.environ['WORKER_ID'].startswith('{STAYS_DOWN}') else time.sleep(600)\n"
)
"""What the launches of POOL and OTHER_POOL run; their environment has OWN={worker_id}."""


class Rig(Protocol):
    """An adapter over something real."""

    fleet: Fleet
    within_s: float
    """How long starting, ending or being noticed may take."""

    def another(self) -> Fleet:
        """Return an adapter that a scheduler started later would have, over the same workers."""

    async def kill(self, instance: Instance) -> None:
        """Kill the worker's process, as a fault would."""


def spec(worker_id: str, role: Role = Role.DECODE, pool: str = POOL, **more) -> WorkerSpec:
    return WorkerSpec(worker_id=worker_id, pool=pool, role=role, **more)


async def instances(fleet: Fleet, pool: str = POOL) -> dict[str, Instance]:
    return {instance.spec.worker_id: instance for instance in await fleet.list(pool)}


async def until(rig: Rig, condition):
    """Ask again and again until the condition, a coroutine function, gives something; return that."""
    async with asyncio.timeout(rig.within_s):
        while not (found := await condition()):  # noqa: ASYNC110 - a fleet tells nobody, it is asked
            await asyncio.sleep(0.02)
    return found


async def running(rig: Rig, worker_id: str, pool: str = POOL) -> Instance:
    async def look():
        instance = (await instances(rig.fleet, pool)).get(worker_id)
        return instance if instance is not None and instance.state is InstanceState.RUNNING else None

    return await until(rig, look)


async def gone(rig: Rig, worker_id: str) -> None:
    async def look():
        return worker_id not in await instances(rig.fleet)

    await until(rig, look)


async def said(rig: Rig, worker_id: str, words: str) -> str:
    async def look():
        with contextlib.suppress(FleetError):
            text = await rig.fleet.logs(worker_id, max_bytes=10_000)
            return text if words in text else None

    return await until(rig, look)


class FleetContract:
    """The tests; a subclass has the fixture `rig`."""

    async def test_a_worker_that_is_started_runs_with_what_tells_it_from_others(self, rig: Rig):
        await rig.fleet.start(spec("w-1", Role.PREFILL))
        instance = await running(rig, "w-1")
        assert instance.spec.role is Role.PREFILL
        assert instance.node
        assert instance.restarts == 0
        assert instance.running_unix_ms is not None
        assert instance.running_unix_ms >= instance.asked_unix_ms > 0
        await said(rig, "w-1", f"I am w-1 prefill {POOL} {instance.zone or 'nowhere'} w-1")

    async def test_started_twice_is_one_worker(self, rig: Rig):
        await rig.fleet.start(spec("w-1"))
        again = await rig.fleet.start(spec("w-1"))
        assert again.spec.worker_id == "w-1"
        await running(rig, "w-1")
        assert list(await instances(rig.fleet)) == ["w-1"]

    async def test_a_stopped_worker_is_gone_and_its_id_may_be_used_again(self, rig: Rig):
        await rig.fleet.start(spec("w-1"))
        await running(rig, "w-1")
        await rig.fleet.stop("w-1", grace_s=0.5)
        await rig.fleet.stop("w-1", grace_s=0.5)  # again changes nothing
        await rig.fleet.stop("never-was", grace_s=0.5)  # nor does one that is not there
        await gone(rig, "w-1")
        await rig.fleet.start(spec("w-1", Role.UNIFIED))
        assert (await running(rig, "w-1")).spec.role is Role.UNIFIED

    async def test_room_is_taken_and_given_back_and_without_it_nothing_starts(self, rig: Rig):
        free = (await rig.fleet.capacity(POOL)).total
        assert free == ROOM
        for number in range(ROOM):
            await rig.fleet.start(spec(f"w-{number}"))

        async def none_left():
            return (await rig.fleet.capacity(POOL)).total == 0

        await until(rig, none_left)
        with pytest.raises(NoRoom, match="w-more"):
            await rig.fleet.start(spec("w-more"))
        assert "w-more" not in await instances(rig.fleet)
        await rig.fleet.stop("w-0", grace_s=0.5)

        async def one_free():
            return (await rig.fleet.capacity(POOL)).total == 1

        await until(rig, one_free)
        await rig.fleet.start(spec("w-more"))
        await running(rig, "w-more")

    async def test_pools_are_apart(self, rig: Rig):
        await rig.fleet.start(spec("w-1"))
        await rig.fleet.start(spec("o-1", pool=OTHER_POOL))
        await running(rig, "o-1", OTHER_POOL)
        assert list(await instances(rig.fleet)) == ["w-1"]
        assert list(await instances(rig.fleet, OTHER_POOL)) == ["o-1"]

    async def test_an_unknown_pool_or_zone_is_an_error_that_names_it(self, rig: Rig):
        with pytest.raises(FleetError, match="nobodys"):
            await rig.fleet.start(spec("w-1", pool="nobodys"))
        with pytest.raises(FleetError, match="the-moon"):
            await rig.fleet.start(spec("w-1", zone="the-moon"))
        assert await instances(rig.fleet) == {}

    async def test_a_worker_whose_process_dies_is_started_again_under_its_name(self, rig: Rig):
        await rig.fleet.start(spec("w-1"))
        first = await running(rig, "w-1")
        await rig.kill(first)

        async def again():
            now = (await instances(rig.fleet)).get("w-1")
            return now is not None and now.state is InstanceState.RUNNING and now.restarts > first.restarts

        await until(rig, again)

    async def test_a_worker_that_does_not_stay_up_is_failed_and_can_be_stopped(self, rig: Rig):
        await rig.fleet.start(spec(STAYS_DOWN))

        async def failed():
            instance = (await instances(rig.fleet)).get(STAYS_DOWN)
            return instance if instance is not None and instance.state is InstanceState.FAILED else None

        instance = await until(rig, failed)
        assert instance.message
        await rig.fleet.stop(STAYS_DOWN, grace_s=0.5)
        await gone(rig, STAYS_DOWN)

    async def test_the_output_of_a_worker_that_has_ended_can_still_be_read(self, rig: Rig):
        await rig.fleet.start(spec("w-1"))
        await running(rig, "w-1")
        await said(rig, "w-1", "I am w-1")
        await rig.fleet.stop("w-1", grace_s=0.5)
        await gone(rig, "w-1")
        assert "I am w-1" in await rig.fleet.logs("w-1", max_bytes=10_000)
        with pytest.raises(FleetError, match="never-was"):
            await rig.fleet.logs("never-was", max_bytes=10)

    async def test_a_later_scheduler_finds_and_stops_what_an_earlier_one_started(self, rig: Rig):
        await rig.fleet.start(spec("w-1", Role.PREFILL))
        await running(rig, "w-1")
        later = rig.another()
        found = (await instances(later))["w-1"]
        assert found.spec.role is Role.PREFILL
        assert found.spec.pool == POOL
        await later.stop("w-1", grace_s=0.5)
        await gone(rig, "w-1")

    async def test_a_worker_costs_what_its_pool_says(self, rig: Rig):
        assert (await rig.fleet.price(POOL)).per_hour == PRICE_NANO
