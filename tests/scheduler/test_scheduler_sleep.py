"""A pool that is idle sleeps before it goes: its workers wake faster than others would start."""

import msgspec
from rig import FAST, Rig, eventually
from rig_fleet import RigFleet
from test_scheduler_autoscaler import QUICK, leading, told

from contracts.lifecycle import FinishReason, WorkerState
from contracts.perf import WeightsCost
from contracts.scaling import Scaling
from observability.metrics import Instruments

SLEEPY = msgspec.structs.replace(FAST, weights=WeightsCost(bytes=10_000_000, bytes_per_ms=1e6))
IDLE_S = 1.0
ONE = Scaling(max_workers=1, idle_s=IDLE_S, sleep_s=600)
PAIR = Scaling(max_workers=3, idle_s=4.0, sleep_s=600, min_prefill=1, min_decode=1)


def states(pool) -> list[WorkerState]:
    return [worker.state for worker in pool.registry.workers() if worker.leased]


async def ask(gateway):
    request = await gateway.submit(max_tokens=4)
    await eventually(lambda: request.reason() is FinishReason.LENGTH, "answered")
    await gateway.finish(request)
    return request


async def test_an_idle_pool_sleeps_and_a_request_wakes_it_without_a_start(rig: Rig):
    fleet, instruments = RigFleet(rig, latency=SLEEPY), Instruments()
    gateway = await rig.gateway()
    pool = await leading(rig, ONE, fleet, instruments=instruments)
    await ask(gateway)
    await eventually(lambda: states(pool) == [WorkerState.SLEEPING], "asleep")
    await told(rig, lambda seen: seen.wakes and seen.cold_s <= 1.0)  # what waking takes, not what a start takes
    await ask(gateway)
    assert (len(fleet.started), fleet.stopped) == (1, [])

    def parts() -> dict[str, float]:
        return {
            sample.labels["phase"]: sample.value
            for family in instruments.registry.collect()
            for sample in family.samples
            if sample.name == "pdgate_cold_start_seconds_count"
        }

    await eventually(lambda: parts() == {"place": 1, "load": 1, "warm": 1, "wake": 1}, "measured")
    await eventually(lambda: states(pool) == [WorkerState.SLEEPING], "asleep again")


async def test_workers_that_have_slept_long_enough_go(rig: Rig):
    fleet = RigFleet(rig, latency=SLEEPY)
    gateway = await rig.gateway()
    await leading(rig, msgspec.structs.replace(ONE, sleep_s=1.5), fleet)
    await ask(gateway)
    await eventually(lambda: fleet.stopped, "gone")
    await told(rig, lambda seen: seen.why == "asleep")
    await ask(gateway)
    assert len(fleet.started) == 2


async def test_workers_that_cannot_sleep_go_at_once(rig: Rig):
    fleet = RigFleet(rig)
    gateway = await rig.gateway()
    await leading(rig, ONE, fleet)
    await ask(gateway)
    await eventually(lambda: fleet.stopped, "gone")


async def test_a_pair_sleeps_and_the_next_leader_wakes_it(rig: Rig):
    fleet = RigFleet(rig, latency=SLEEPY)
    gateway = await rig.gateway()
    pool = await leading(rig, PAIR, fleet)
    await ask(gateway)
    await eventually(lambda: len(fleet.workers) == 3, "the pair follows")
    await eventually(lambda: states(pool) == [WorkerState.SLEEPING] * 3, "all of them sleep")
    await rig.kill(pool)
    later = await leading(rig, PAIR, fleet, helm=QUICK)
    await ask(gateway)
    await eventually(lambda: WorkerState.READY in states(later), "woken")
    assert (len(fleet.started), fleet.stopped) == (3, [])
