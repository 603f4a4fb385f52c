"""A pool whose workers come and go: what the scheduler makes of a fleet."""

import asyncio

import msgspec
from rig import FAST, SLOW_DECODE, Rig, eventually
from rig_fleet import RigFleet
from rig_gateway import POOL
from rig_helm import counted

from contracts import keys
from contracts.lifecycle import FinishReason, Role
from contracts.perf import DecodeCost
from contracts.scaling import Scaling, decode_note
from contracts.slo import SloTarget
from observability.metrics import Instruments
from scheduler.crew import Crew
from scheduler.helm import HelmSettings
from scheduler.legacy import decode as decode_legacy
from scheduler.policy import decisions
from scheduler.policy.cluster import Limits
from scheduler.policy.headcount import ScaleLimits
from scheduler.policy.ladder import Rung
from scheduler.profile import PoolProfile

TARGET = SloTarget(ttft_ms=2000, tpot_ms=100)
QUICK = HelmSettings(look_s=0.05, point_s=0.2, scale=ScaleLimits(period_s=0.1))
ONE = Scaling(max_workers=1, idle_s=600)
PAIR = Scaling(max_workers=3, idle_s=600, min_prefill=1, min_decode=1)


def profile(scaling: Scaling) -> PoolProfile:
    return PoolProfile(model="tiny", target=TARGET, tiers={"default": TARGET}, scaling=scaling)


async def leading(rig: Rig, scaling: Scaling, fleet: RigFleet, **more):
    pool = rig.scheduler(profile=profile(scaling), fleet=fleet, **{"helm": QUICK, **more})
    await eventually(lambda: pool.term is not None and pool.term.helm.autoscaler.plan is not None, "scaling")
    return pool


async def note(rig: Rig):
    raw = await rig.redis.get(keys.scaling(POOL))
    return decode_note(raw) if raw else None


async def told(rig: Rig, condition) -> None:
    """Wait until the pool's note is as it should be."""
    async with asyncio.timeout(10):
        while (seen := await note(rig)) is None or not condition(seen):  # noqa: ASYNC110 - a key in Redis has no event
            await asyncio.sleep(0.02)


def arrivals(autoscaler):
    """Return how many a term and those before it have counted."""
    counted = autoscaler.handover().arrivals
    return sum(counted.bins) + counted.open


async def test_a_pool_goes_from_zero_to_one_to_the_pair_and_back(rig: Rig, tmp_path):
    fleet, instruments = RigFleet(rig), Instruments()
    gateway = await rig.gateway()
    scaling = msgspec.structs.replace(PAIR, idle_s=2.0)
    helm = msgspec.structs.replace(QUICK, decision_log=tmp_path)
    await leading(rig, scaling, fleet, instruments=instruments, helm=helm)
    await told(rig, lambda seen: seen.wakes and seen.why == "asleep" and seen.cold_s > 1)
    request = await gateway.submit(max_tokens=4)
    await eventually(lambda: request.reason() is FinishReason.LENGTH, "answered")
    assert fleet.started[0].role is Role.UNIFIED
    await eventually(lambda: len(fleet.started) == 3, "the pair follows")
    assert {spec.role for spec in fleet.started[1:]} == {Role.PREFILL, Role.DECODE}
    await told(rig, lambda seen: seen.cold_s is None and (seen.prefill, seen.decode) == (1, 1))
    await gateway.finish(request)
    await eventually(lambda: len(fleet.stopped) == 3, "all of them go")
    await told(rig, lambda seen: seen.cold_s is not None and seen.prefill == seen.decode == seen.unified == 0)
    steps = counted(instruments, "scale_steps")
    assert steps[POOL, "start", "unified", "cold_start"] == 1
    assert steps[POOL, "start", "prefill", "floor"] == steps[POOL, "start", "decode", "floor"] == 1
    assert sum(value for labels, value in steps.items() if labels[1] == "stop" and labels[3] == "idle") == 3
    parts = {
        sample.labels["phase"]: sample.value
        for family in instruments.registry.collect()
        for sample in family.samples
        if sample.name == "pdgate_cold_start_seconds_count"
    }
    assert parts == {"place": 3, "load": 3, "warm": 3}
    rows = decisions.decode((tmp_path / f"{POOL}.jsonl").read_bytes().splitlines(keepends=True))
    scaled = [row for row in rows if isinstance(row, decisions.Scaled) and row.steps]
    assert [row.why for row in scaled] == ["cold_start", "floor", "idle"]


async def test_a_request_waits_for_the_first_worker_however_short_the_grace_for_lost_ones(rig: Rig):
    fleet = RigFleet(rig)
    fleet.may_boot.clear()
    gateway = await rig.gateway()
    pool = await leading(rig, ONE, fleet, limits=Limits(no_worker_grace_s=0.05))
    request = await gateway.submit(max_tokens=4)
    await eventually(lambda: len(fleet.started) == 1, "asked for")
    await told(rig, lambda seen: seen.why == "booting")
    assert not request.refused
    assert pool.term.helm.ladder.rung is Rung.NORMAL  # nobody there is no emergency
    fleet.may_boot.set()
    await eventually(lambda: request.reason() is FinishReason.LENGTH, "answered")


async def test_without_room_requests_are_refused_and_the_reason_is_told(rig: Rig):
    gateway = await rig.gateway()
    await leading(rig, ONE, RigFleet(rig, room=0), limits=Limits(no_worker_grace_s=0.3))
    request = await gateway.submit(max_tokens=4)
    await told(rig, lambda seen: not seen.wakes and "no_room" in seen.blocked)
    await eventually(lambda: request.refused, "refused")
    assert request.refused[0].code == "no_capacity"
    assert request.refused[0].retry_after_s > 2  # what a start is believed to take


async def test_workers_that_do_not_stay_up_are_not_joined_by_more_of_them(rig: Rig):
    fleet = RigFleet(rig)
    fleet.may_boot.clear()
    gateway = await rig.gateway()
    await leading(rig, PAIR, fleet, limits=Limits(no_worker_grace_s=0.3))
    request = await gateway.submit(max_tokens=4)
    await eventually(lambda: len(fleet.started) == 1, "asked for")
    fleet.fail(fleet.started[0].worker_id)
    await told(rig, lambda seen: "exit code 3" in seen.blocked)
    await eventually(lambda: request.refused, "refused")
    assert len(fleet.started) == 1


async def test_shadow_says_what_it_would_do_and_does_nothing(rig: Rig):
    fleet, instruments = RigFleet(rig), Instruments()
    gateway = await rig.gateway()
    helm = msgspec.structs.replace(QUICK, scaling="shadow")
    await leading(rig, ONE, fleet, helm=helm, instruments=instruments, limits=Limits(no_worker_grace_s=0.5))
    request = await gateway.submit(max_tokens=4)
    await eventually(lambda: request.refused, "refused as ever")
    assert counted(instruments, "scale_ticks")[POOL, "shadow", "cold_start"] >= 1
    assert counted(instruments, "scale_steps") == {}
    assert fleet.started == []
    assert not (await note(rig)).wakes


async def test_off_is_off(rig: Rig):
    await rig.pair()
    pool = await rig.leading(
        rig.scheduler(profile=profile(ONE), fleet=RigFleet(rig), helm=msgspec.structs.replace(QUICK, scaling="off"))
    )
    assert pool.term.helm.autoscaler is None
    assert await note(rig) is None


async def test_a_request_calls_back_who_is_about_to_leave(rig: Rig, monkeypatch):
    monkeypatch.setattr("scheduler.crew.LEAST_DRAIN_S", 60.0)
    fleet = RigFleet(rig)
    gateway = await rig.gateway()
    pool = await leading(rig, ONE, fleet)
    first = await gateway.submit(max_tokens=4)
    await eventually(lambda: first.reason() is FinishReason.LENGTH, "answered")
    autoscaler = pool.term.helm.autoscaler
    autoscaler.crew.let_go(fleet.started[0].worker_id)
    assert not autoscaler.serving
    second = await gateway.submit(max_tokens=4)
    await eventually(lambda: second.reason() is FinishReason.LENGTH, "answered by the same one")
    assert len(fleet.started) == 1
    assert fleet.stopped == []


async def test_a_worker_is_stopped_only_when_what_it_runs_has_ended(rig: Rig):
    fleet = RigFleet(rig, latency=msgspec.structs.replace(FAST, decode=DecodeCost(fixed_ms=60)))
    gateway = await rig.gateway()
    pool = await leading(rig, ONE, fleet)
    request = await gateway.submit(max_tokens=30)
    await eventually(lambda: request.tokens, "under way")
    crew: Crew = pool.term.helm.autoscaler.crew
    pool.term.helm.autoscaler._mode = "shadow"  # which would call it back: what runs is work, and nobody else serves
    crew.let_go(fleet.started[0].worker_id)
    await eventually(lambda: request.reason() is not None, "ended")
    assert request.reason() is FinishReason.LENGTH
    assert len(request.tokens[1, 0]) == 30
    await eventually(lambda: fleet.stopped, "gone")


async def test_who_leads_next_keeps_what_was_started_and_knows_what_was_learned(rig: Rig):
    fleet = RigFleet(rig)
    gateway = await rig.gateway()
    pool = await leading(rig, PAIR, fleet)
    request = await gateway.submit(max_tokens=4)
    await eventually(lambda: len(fleet.started) == 3, "the pair follows")
    await told(rig, lambda seen: seen.cold_s is None)
    await eventually(lambda: not pool.term.helm.autoscaler.crew.restless, "all serve")
    await gateway.finish(request, slo_met=True)
    await eventually(lambda: pool.term.helm.autoscaler.handover().foresight.ended == 1, "counted")
    async with asyncio.timeout(10):
        while not (raw := await rig.redis.get(keys.learned(POOL))) or not decode_legacy(raw).scaling.foresight.ended:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert arrivals(pool.term.helm.autoscaler) == 1
    await rig.kill(pool)
    waited = [await gateway.submit(max_tokens=4) for _ in range(3)]
    later = await leading(rig, PAIR, fleet)
    autoscaler = later.term.helm.autoscaler
    await eventually(lambda: arrivals(autoscaler) == 4, "each is counted once")
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in waited), "answered")
    assert 0.9 < autoscaler.handover().foresight.ended <= 1
    await eventually(lambda: autoscaler.serving and len(autoscaler.crew.instances) == 3, "found")
    assert autoscaler._boot_s < 10
    for _ in range(5):
        plan = autoscaler.plan
        await eventually(lambda plan=plan: autoscaler.plan is not plan, "another look")
    assert len(fleet.started) == 3
    assert fleet.stopped == []


async def test_workers_that_were_started_by_hand_are_counted_and_kept(rig: Rig):
    own = await rig.worker(Role.UNIFIED, SLOW_DECODE, worker_id="by-hand")
    fleet = RigFleet(rig)
    pool = await leading(rig, msgspec.structs.replace(ONE, idle_s=0.1, max_workers=2), fleet)
    autoscaler = pool.term.helm.autoscaler
    await eventually(lambda: autoscaler.serving, "found")
    for _ in range(5):
        plan = autoscaler.plan
        await eventually(lambda plan=plan: autoscaler.plan is not plan, "another look")
    assert not own.dead
    assert fleet.started == fleet.stopped == []


async def test_a_worker_that_serves_before_its_fleet_says_that_it_runs_has_booted_all_the_same(rig: Rig):
    pool = await rig.leading(rig.scheduler())
    crew = Crew(POOL, fleet=RigFleet(rig, tells_late=True), registry=pool.registry, drain_s=lambda worker: 0.0)
    await crew.read()
    worker_id = await crew.start(Role.UNIFIED, zone="", spot=False)
    await eventually(lambda: [w.worker_id for w in pool.registry.workers() if w.ready] == [worker_id])
    assert list(crew.look()) == []
    assert crew.booting
    await crew.read()
    (boot,) = crew.look()
    assert boot.asked_unix_ms <= boot.running_unix_ms <= boot.registered_unix_ms <= boot.ready_unix_ms
    assert not crew.booting
