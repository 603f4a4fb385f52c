"""Orders of an operator: they reach the leader, are carried out once, and are answered."""

import asyncio
import time
from collections.abc import Iterable

import msgspec
from rig import Rig, eventually
from rig_gateway import POOL

from contracts.keys import worker_lease
from contracts.lifecycle import Role, WorkerState
from contracts.orders import Answer, Order, answer, orders
from contracts.wire import FIELD, encode
from scheduler.orders import Orders
from scheduler.registry import WorkerRegistry
from scheduler.worker import Worker


async def ordered(rig: Rig, worker_id: str, what: str, role: Role | None = None, *, pool: str = POOL) -> Answer:
    order = Order(
        order_id=f"{what}-{worker_id}",
        worker_id=worker_id,
        what=what,
        role=role,
        asked_unix_ms=int(time.time() * 1000),
    )
    await rig.redis.xadd(orders(pool), {FIELD: encode(order)})
    got = await rig.redis.blpop([answer(pool, order.order_id)], timeout=20)
    return msgspec.msgpack.decode(got[1], type=Answer)


async def test_a_role_is_changed_on_order_and_the_times_are_told(rig: Rig):
    await rig.worker(Role.PREFILL)
    worker = await rig.worker(Role.DECODE)
    await rig.leading(rig.scheduler())
    got = await ordered(rig, worker.worker_id, "role", Role.PREFILL)
    assert (got.ok, got.role) == (True, Role.PREFILL)
    assert got.switch_ms > 0
    assert worker.server.condition.role is Role.PREFILL
    assert await rig.redis.xlen(orders(POOL)) == 0


class Late:
    """A registry that has not heard its workers yet when it is first asked."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self.leader_epoch, self.send = registry.leader_epoch, registry.send
        self._registry = registry
        self._asked = 0

    def workers(self) -> Iterable[Worker]:
        self._asked += 1
        return self._registry.workers() if self._asked > 3 else ()


async def test_an_order_waits_for_a_worker_that_has_a_lease_and_is_not_heard_yet(rig: Rig):
    """One that has just started, or has just changed its role."""
    worker = await rig.worker(Role.UNIFIED)
    pool = await rig.leading(rig.scheduler())
    await rig.redis.set(worker_lease("late", worker.worker_id), b"here")
    async with asyncio.TaskGroup() as tasks:
        late = Orders(rig.redis, "late", registry=Late(pool.registry), actuator=pool.actuator)
        obeying = tasks.create_task(late.run())
        assert (await ordered(rig, worker.worker_id, "drain", pool="late")).ok
        obeying.cancel()
    await eventually(lambda: worker.server.condition.state is WorkerState.DRAINING, "drains")


async def test_a_worker_is_drained_on_order_and_comes_back(rig: Rig):
    worker = await rig.worker(Role.UNIFIED)
    await rig.leading(rig.scheduler())
    assert (await ordered(rig, worker.worker_id, "drain")).ok
    await eventually(lambda: worker.server.condition.state is WorkerState.DRAINING, "drains")
    assert (await ordered(rig, worker.worker_id, "undrain")).ok
    await eventually(lambda: worker.server.condition.state is WorkerState.READY, "is back")


async def test_an_order_for_nobody_is_answered_and_an_old_one_is_dropped(rig: Rig):
    worker = await rig.worker(Role.UNIFIED)
    old = Order(order_id="old", worker_id=worker.worker_id, what="drain", asked_unix_ms=0)
    await rig.redis.xadd(orders(POOL), {FIELD: encode(old)})
    await rig.leading(rig.scheduler())
    got = await ordered(rig, "nobody", "role", Role.DECODE)
    assert not got.ok
    assert "nobody" in got.message
    assert worker.server.condition.state is WorkerState.READY
    assert not await rig.redis.exists(answer(POOL, "old"))
