"""Roles follow the demand, by moves that say why; or stay, under shadow and by hand."""

import asyncio
import time

import msgspec
import pytest
from rig import DEADLINE_S, FAST, Rig, all_ends_heard, eventually
from rig_gateway import OWNER, POOL
from rig_helm import PROFILE, QUICK, TIGHT, counted, logged, replace

from contracts import keys
from contracts.lifecycle import FinishReason, HandOff, Role
from contracts.perf import PrefillCost
from contracts.series import read_series
from contracts.steering import Steering, encode_steering
from observability.metrics import Instruments
from scheduler.policy import decisions
from scheduler.policy.demand import OutputMoments
from scheduler.policy.ratio import Mode, Why
from scheduler.policy.sight import RatioLimits
from workers.engines.timed_store import TimedStore


async def test_shadow_decides_and_tells_and_does_nothing(rig: Rig, tmp_path):
    slow = replace(FAST, prefill=PrefillCost(fixed_ms=0.0, per_token_ms=0.4))
    for role in (Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE):
        await rig.worker(role, slow)
    gateway = await rig.gateway()
    instruments = Instruments()
    helm = msgspec.structs.replace(QUICK, mode=Mode.SHADOW, decision_log=tmp_path)
    pool = await rig.leading(rig.scheduler(profile=PROFILE, helm=helm, instruments=instruments))
    controller = pool.term.helm.controller
    requests = []

    async def wanted() -> bool:
        requests.append(await gateway.submit(1000, max_tokens=2, owner=replace(OWNER, slo=TIGHT)))
        return controller.last is not None and controller.last.move is not None

    for _ in range(400):
        if await wanted():
            break
        await eventually(lambda: len(pool.term.waiting) < 40)
    assert controller.last.move.from_role is Role.DECODE
    assert controller.last.why is Why.GAIN
    assert sorted(w.server.condition.role for w in rig.workers) == [*[Role.DECODE] * 3, Role.PREFILL]
    assert [w.role for w in pool.registry.workers()].count(Role.PREFILL) == 1
    reasons = {labels[2] for labels in counted(instruments, "controller_ticks")}
    assert "gain" in reasons
    assert counted(instruments, "flips") == {}
    await eventually(lambda: any(isinstance(r, decisions.Ticked) and r.move for r in logged(tmp_path)))


async def test_an_operator_sets_the_mode_for_every_leader(rig: Rig):
    await rig.pair()
    pool = await rig.leading(rig.scheduler("s-a", helm=QUICK))
    await rig.redis.set(keys.steering(POOL), encode_steering(Steering(mode="manual", prefill=1, decode=1)))
    await eventually(lambda: pool.term.helm.controller.steering.mode == "manual")
    await eventually(lambda: pool.term.helm.controller.last.why is Why.PINNED)
    standby = rig.scheduler("s-b", helm=QUICK)
    await rig.kill(pool)
    await eventually(lambda: standby.term is not None and standby.term.helm.controller.steering.mode == "manual")
    await rig.redis.delete(keys.steering(POOL))
    await eventually(lambda: standby.term.helm.controller.steering.mode == "auto")


async def test_zero_traffic_and_constant_load_move_nothing(rig: Rig):
    for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE):
        await rig.worker(role)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler(profile=PROFILE, helm=QUICK))
    controller = pool.term.helm.controller
    await eventually(lambda: controller.last is not None)
    assert controller.last.move is None
    for _ in range(40):
        request = await gateway.submit(200, max_tokens=4)
        await eventually(lambda r=request: r.reason() is FinishReason.LENGTH)
        assert controller.last.move is None
    assert controller.last.gain == controller.last.gain  # no NaN


async def test_answers_that_are_settled_late_are_not_taken_for_long_ones(rig: Rig):
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler(profile=PROFILE, helm=QUICK))
    requests = [await gateway.submit(max_tokens=4) for _ in range(12)]
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in requests))
    await all_ends_heard(pool)
    router, kind = pool.memory.router, pool.term.book.get(requests[0].rid).sized.key
    router.growing.look(time.monotonic() + 30)  # and none is settled: half a minute of steps of 2 ms
    assert len(router.growing) == 12
    assert router.growing.moments(kind, OutputMoments(1, 1)) == OutputMoments(4, 16)


async def test_the_demand_knows_how_long_its_own_answers_got(rig: Rig):
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler(profile=PROFILE, helm=QUICK))
    window = pool.term.helm.controller._demand
    requests = [await gateway.submit(max_tokens=4) for _ in range(12)]
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in requests))
    for request in requests[:8]:
        await gateway.finish(request, completion_tokens=4)
    for request in requests[8:]:
        await gateway.finish(request, "cancelled", completion_tokens=1)
    await eventually(lambda: not window._under_way, "every end is told")

    def valued(*, as_forecast: bool) -> float:
        thousand = OutputMoments(1000.0, 1e6)
        demand = window.demand(time.monotonic() + 2, lambda kind: thousand, as_forecast=as_forecast)
        return demand.output_tokens

    assert valued(as_forecast=True) == pytest.approx(1000)
    assert valued(as_forecast=False) == pytest.approx(4)


@pytest.mark.parametrize("hand_off", list(HandOff))
async def test_a_wrong_first_split_is_righted_by_moves_that_say_why(rig: Rig, hand_off: HandOff):
    slow = replace(FAST, prefill=PrefillCost(fixed_ms=0.0, per_token_ms=0.1))
    shared = {"hand_off": hand_off, "store": TimedStore("tiny-r1")} if hand_off is HandOff.STORE else {}
    for role in (Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE):
        await rig.worker(role, slow, **shared)
    gateway = await rig.gateway()
    instruments = Instruments()
    helm = QUICK
    if hand_off is HandOff.STORE:
        agile = msgspec.structs.replace(RatioLimits.of(hand_off), period_s=0.1, min_samples=4)
        helm = msgspec.structs.replace(QUICK, ratio=agile)
    profile = msgspec.structs.replace(PROFILE, hand_off=hand_off)
    pool = await rig.leading(rig.scheduler(profile=profile, helm=helm, instruments=instruments))
    owner = replace(OWNER, slo=TIGHT)
    requests = []

    def prefills() -> int:
        return sum(worker.role is Role.PREFILL and worker.ready for worker in pool.registry.workers())

    lives = {worker.worker_id: worker.epoch for worker in rig.workers}

    def follow() -> None:
        for worker in rig.workers:  # as gateways do: another life has another stream
            if worker.epoch != lives[worker.worker_id]:
                lives[worker.worker_id] = worker.epoch
                gateway.attach(worker.registration.address)

    def ended() -> bool:
        follow()
        return all(r.refused or (r.placed and r.reason(r.placed[-1].attempt)) for r in requests)

    async with asyncio.timeout(4 * DEADLINE_S):
        while prefills() < 2:  # 100 ms of prompt work each, 20 a second: two workers are too few, one far too few
            requests.append(await gateway.submit(1000, max_tokens=2, owner=owner))
            await asyncio.sleep(0.05)
            follow()
    await eventually(ended)
    flips = counted(instruments, "flips")
    assert flips["tiny", "decode_to_prefill", "gain", "done"] >= 1
    assert {(reason, result) for _, _, reason, result in flips} == {("gain", "done")}
    points = []

    async def told() -> bool:
        points[:] = [flip for point in await read_series(rig.redis, POOL) for flip in point.flips]
        return bool(points)

    async with asyncio.timeout(DEADLINE_S):
        while not await told():  # noqa: ASYNC110 - a stream that others write has no event here
            await asyncio.sleep(0.05)
    first = points[0]
    assert (first.from_role, first.to_role, first.why, first.done) == ("decode", "prefill", "gain", True)
    assert all(worker.num_requests >= 0 and worker.kv_tokens >= 0 for worker in pool.registry.workers())
    assert not any(request.lost for request in requests)
