"""In which order requests run, and where sessions stay."""

from rig import SLOW_DECODE, Rig, all_ends_heard, eventually
from rig_gateway import OWNER
from rig_helm import PROFILE, replace

from contracts.lifecycle import FinishReason, Role
from contracts.slo import SloTarget


async def test_a_tenant_that_floods_does_not_delay_another(rig: Rig):
    worker = await rig.worker(Role.UNIFIED, SLOW_DECODE, max_running=1)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    flood = [await gateway.submit(max_tokens=4) for _ in range(30)]
    await eventually(lambda: len(pool.term.waiting) == 29)
    other = replace(OWNER, org="org-2")
    few = [await gateway.submit(owner=other, max_tokens=4) for _ in range(3)]
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in few))
    places = [[a.rid for a in worker.submitted].index(request.rid) for request in few]
    assert max(places) <= 8  # every other turn, from the one after the one that ran
    assert sum(request.reason() is not None for request in flood) <= 8


async def test_what_cannot_be_in_time_does_not_hold_up_what_can(rig: Rig):
    worker = await rig.worker(Role.UNIFIED, SLOW_DECODE, max_running=1)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler(profile=PROFILE))
    first = await gateway.submit(max_tokens=20)
    await eventually(lambda: first.placed)
    hopeless = await gateway.submit(owner=replace(OWNER, slo=SloTarget(ttft_ms=1)), max_tokens=4)
    await eventually(lambda: len(pool.term.waiting) == 1)
    good = await gateway.submit(owner=replace(OWNER, slo=SloTarget(ttft_ms=60_000)), max_tokens=4)
    await eventually(lambda: hopeless.reason() is FinishReason.LENGTH)
    assert [a.rid for a in worker.submitted] == [first.rid, good.rid, hopeless.rid]


async def test_sessions_stay_on_a_worker_and_leave_it_when_it_dies(rig: Rig):
    workers = [await rig.worker(Role.UNIFIED) for _ in range(3)]
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())

    async def home() -> str:
        request = await gateway.submit(session="chat-1")

        def whole() -> bool:
            return bool(request.placed) and request.reason(request.placed[-1].attempt) is FinishReason.LENGTH

        def asked() -> bool:
            return any(not lost.retrying for lost in request.lost)

        # The first after a death may go to the dead worker: the gateway, which heard nothing, starts it again.
        await eventually(lambda: whole() or asked())
        if asked():
            await gateway.start_again(request, request.lost[-1].attempt)
        await eventually(whole)
        await all_ends_heard(pool)
        return request.placed[-1].decode.worker_id

    homes = {await home() for _ in range(6)}
    assert len(homes) == 1
    await next(w for w in workers if w.worker_id in homes).kill()
    after = {await home() for _ in range(4)}
    assert len(after) == 1
    assert not after & homes
