"""Workers that the scheduler reaches and a gateway does not: nothing of that gateway is placed there."""

from rig import SLOW_PREFILL, Rig, eventually

from contracts.lifecycle import FinishReason, Role
from contracts.wire import Continue


async def test_a_request_is_not_placed_on_a_worker_that_its_gateway_cannot_reach(rig: Rig):
    first, second = [await rig.worker(Role.UNIFIED) for _ in range(2)]
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    await eventually(lambda: sum(w.ready for w in pool.registry.workers()) == 2)
    requests = [await gateway.submit(unreachable=(first.worker_id,)) for _ in range(6)]
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in requests))
    assert (len(first.submitted), len(second.submitted)) == (0, 6)


async def test_a_request_whose_gateway_reaches_no_worker_is_tried_all_the_same(rig: Rig):
    only = await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit(unreachable=(only.worker_id,))
    await eventually(lambda: request.reason() is FinishReason.LENGTH)


async def test_it_is_the_unreachable_decode_worker_that_is_avoided_even_while_the_prompt_is_computed(rig: Rig):
    """Without the gateway's word the silent side would be the prefill worker, which is not to blame."""
    prefill = await rig.worker(Role.PREFILL, SLOW_PREFILL)
    behind = await rig.worker(Role.DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.placed)
    other = await rig.worker(Role.DECODE)
    await eventually(lambda: sum(w.ready for w in pool.registry.workers()) == 3)
    await gateway.write(
        Continue(rid=request.rid, lost_attempt=1, delivered=(), unreachable=(behind.worker_id,)),
    )
    await eventually(lambda: [p.attempt for p in request.placed] == [1, 2])
    assert request.placed[-1].prefill.worker_id == prefill.worker_id
    assert request.placed[-1].decode.worker_id == other.worker_id
