"""What one tenant, or one side of the pairs, may take of the room, counted over real timed workers."""

import msgspec
from rig import SLOW_DECODE, SLOW_PREFILL, Rig, eventually
from rig_gateway import OWNER

from contracts.lifecycle import FinishReason, Role

SLOTS = 4
IN_TIME = 2 * SLOTS
"""Placements of others that a request may see go before it and still count as in time."""


async def turns_waited(rig: Rig, worker, gateway, number: int) -> list[int]:
    """Send requests of the quiet tenant one after the other; return how many of others were placed before each."""
    quiet = msgspec.structs.replace(OWNER, org="org-quiet")
    waits = []
    for _ in range(number):
        before = len(worker.submitted)
        request = await gateway.submit(owner=quiet, max_tokens=4)
        await eventually(lambda r=request: r.reason() is FinishReason.LENGTH)
        at = [attempt.rid for attempt in worker.submitted].index(request.rid)
        waits.append(max(0, at - before))
    return waits


async def test_a_tenant_beside_one_that_sends_ten_times_as_much_is_in_time_as_often_as_alone(rig: Rig):
    worker = await rig.worker(Role.UNIFIED, SLOW_DECODE, max_running=SLOTS)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    alone = await turns_waited(rig, worker, gateway, 12)
    loud = [await gateway.submit(max_tokens=8) for _ in range(120)]
    await eventually(lambda: len(pool.term.waiting) > SLOTS)
    beside = await turns_waited(rig, worker, gateway, 12)
    assert len(pool.term.waiting) > SLOTS  # the other one's load lasted all the while
    in_time = [sum(wait <= IN_TIME for wait in waits) / len(waits) for waits in (alone, beside)]
    assert in_time[0] - in_time[1] <= 0.02
    assert not any(request.refused for request in loud)


async def test_decode_workers_have_the_load_of_prompts_under_way_before_any_of_them_arrives(rig: Rig):
    await rig.worker(Role.PREFILL, SLOW_PREFILL)
    decode = await rig.worker(Role.DECODE, max_running=SLOTS)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    requests = [await gateway.submit(deadline_s=36_000) for _ in range(3 * SLOTS)]
    await eventually(lambda: len(pool.term.book) == 3 * SLOTS and sum(bool(r.placed) for r in requests) == SLOTS)
    # Nobody decodes yet, and still the decode side is full: it will be by the time the prompts are computed.
    assert len(pool.term.waiting) == 2 * SLOTS
    assert decode.running == SLOTS
    assert not any(request.tokens for request in requests)
