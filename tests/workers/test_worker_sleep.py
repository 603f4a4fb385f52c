"""A worker gives its device's memory back while nobody needs it, and takes it again."""

import asyncio

import msgspec
import pytest

from contracts.lifecycle import FinishReason, Role, WorkerState
from contracts.perf import DecodeCost, WeightsCost
from contracts.v1 import worker_pb2 as pb
from tests.workers.peers import FAST, Gateway, Leader, new_attempt, running_worker, submit_of
from workers.engines.timed_text import expected_text
from workers.roles import RestartNeeded

PROMPT = list(range(40))
SLEEPY = msgspec.structs.replace(FAST, weights=WeightsCost(bytes=1_000_000, bytes_per_ms=1e6))
SLOW = msgspec.structs.replace(SLEEPY, decode=DecodeCost(fixed_ms=20.0))
SLOW_TO_SLEEP = msgspec.structs.replace(FAST, weights=WeightsCost(bytes=300_000_000, bytes_per_ms=1e6))


async def order(leader: Leader, *, on: bool, epoch: int = 1) -> None:
    await leader.send(sleep=pb.Sleep(on=on, leader_epoch=epoch))


async def becomes(leader: Leader, state: pb.WorkerState, *, after: int = 0) -> int:
    """Wait for a status with a state after so many reports; return how many there were."""

    def seen() -> bool:
        later = leader.reports[after:]
        return any(r.WhichOneof("report") == "status" and r.status.state == state for r in later)

    await leader.until(seen)
    return len(leader.reports)


async def test_a_worker_sleeps_refuses_wakes_and_says_the_same():
    async with running_worker(Role.UNIFIED, SLEEPY) as worker, asyncio.TaskGroup() as tasks:
        leader, gateway = Leader(worker.address), Gateway(worker.address)
        await leader.open(tasks)
        await gateway.attach(tasks, epoch=worker.epoch)
        assert worker.server.condition.facts.sleeps
        await order(leader, on=True)
        at = await becomes(leader, pb.WORKER_STATE_SLEEPING)
        await leader.send(submit=submit_of(worker, PROMPT))
        rejected = await leader.next_of("rejected", lambda _: True)
        assert rejected.code == "unhealthy"
        await leader.send(drain=pb.Drain(on=False, leader_epoch=1))  # does not wake it
        await order(leader, on=False)
        await becomes(leader, pb.WORKER_STATE_READY, after=at)
        attempt = new_attempt()
        await leader.send(submit=submit_of(worker, PROMPT, attempt=attempt))
        answer = await gateway.answer(attempt)
        assert answer.text == expected_text(PROMPT, 16)
        await gateway.detach()
        await leader.close()


async def test_a_worker_that_runs_something_does_not_sleep():
    async with running_worker(Role.UNIFIED, SLOW) as worker, asyncio.TaskGroup() as tasks:
        leader, gateway = Leader(worker.address), Gateway(worker.address)
        await leader.open(tasks)
        await gateway.attach(tasks, epoch=worker.epoch)
        attempt = new_attempt()
        await leader.send(submit=submit_of(worker, PROMPT, attempt=attempt))
        await gateway.until(lambda: any(key[0] == attempt for key in gateway.answers))
        await order(leader, on=True)
        answer = await gateway.answer(attempt)
        assert answer.reason is FinishReason.LENGTH
        assert not any(r.status.state == pb.WORKER_STATE_SLEEPING for r in leader.reports)
        assert not worker.server.sleep.wanted
        condition = worker.server.condition
        await leader.until(lambda: worker.server.assignments.quiet and not condition.load.num_running)
        await order(leader, on=True)
        await becomes(leader, pb.WORKER_STATE_SLEEPING)
        await gateway.detach()
        await leader.close()


async def test_a_worker_that_is_wanted_again_while_it_falls_asleep_wakes_at_once():
    async with running_worker(Role.UNIFIED, SLOW_TO_SLEEP) as worker, asyncio.TaskGroup() as tasks:
        leader = Leader(worker.address)
        await leader.open(tasks)
        await order(leader, on=True)
        at = await becomes(leader, pb.WORKER_STATE_DRAINING)
        await order(leader, on=False)
        await leader.send(drain=pb.Drain(on=False, leader_epoch=1))
        await becomes(leader, pb.WORKER_STATE_READY, after=at)
        assert worker.server.condition.state is WorkerState.READY
        assert not worker.server.sleep.wanted
        await leader.close()


@pytest.mark.parametrize(("latency", "epoch"), [(FAST, 1), (SLEEPY, 0)], ids=["cannot sleep", "no leader"])
async def test_an_order_that_does_not_hold_changes_nothing(latency, epoch):
    async with running_worker(Role.UNIFIED, latency) as worker, asyncio.TaskGroup() as tasks:
        leader = Leader(worker.address)
        await leader.open(tasks)
        await order(leader, on=True, epoch=epoch)
        at = len(leader.reports)
        await becomes(leader, pb.WORKER_STATE_READY, after=at)
        assert worker.server.condition.state is WorkerState.READY
        await leader.close()


class Lost:
    """An engine that does not get its memory back."""

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        raise RuntimeError("out of memory")


async def loses_its_memory() -> None:
    async with running_worker(Role.UNIFIED, SLEEPY, sleeper=Lost()) as worker, asyncio.TaskGroup() as tasks:
        leader = Leader(worker.address)
        await leader.open(tasks)
        await order(leader, on=True)
        await becomes(leader, pb.WORKER_STATE_SLEEPING)
        await order(leader, on=False)
        await asyncio.Event().wait()  # the worker's end ends this


async def test_an_engine_that_does_not_wake_is_started_again():
    with pytest.raises(ExceptionGroup) as raised:
        await loses_its_memory()
    assert raised.group_contains(RestartNeeded, match="out of memory")
