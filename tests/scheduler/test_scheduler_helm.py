"""Steering a pool: what users got, the ladder, the ratio, the decision log and the series."""

import asyncio

import msgspec
import pytest
from rig import DEADLINE_S, FAST, SLOW_DECODE, Rig, eventually
from rig_gateway import OWNER, POOL

from contracts import keys
from contracts.lifecycle import FinishReason, HandOff, Path, Role
from contracts.perf import PrefillCost
from contracts.series import read_series
from contracts.slo import SloTarget, Timings
from contracts.steering import Steering, encode_steering
from observability.metrics import Instruments
from scheduler.helm import HelmSettings
from scheduler.policy import decisions
from scheduler.policy.blame import Stage
from scheduler.policy.ladder import LadderLimits, Rung
from scheduler.policy.ratio import Mode, Why
from scheduler.policy.sight import RatioLimits
from scheduler.profile import PoolProfile
from workers.engines.timed_store import TimedStore

QUICK = HelmSettings(
    look_s=0.05,
    point_s=0.2,
    ratio=RatioLimits(period_s=0.1, min_samples=4, cooldown_s=1.0, cooldown_from_decode_s=1.0),
    ladder=LadderLimits(up_s=0.2, down_s=0.3),
)
TIGHT = SloTarget(ttft_ms=500, tpot_ms=50)
PROFILE = PoolProfile(model="tiny", target=TIGHT, tiers={"default": TIGHT}, resident_tpot_ms=50)
replace = msgspec.structs.replace


def counted(instruments: Instruments, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in instruments.registry.collect()
        for sample in family.samples
        if sample.name == f"pdgate_{name}_total"
    }


# -- order ---------------------------------------------------------------------------------------------


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
    await rig.leading(rig.scheduler())

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
        return request.placed[-1].decode.worker_id

    homes = {await home() for _ in range(6)}
    assert len(homes) == 1
    await next(w for w in workers if w.worker_id in homes).kill()
    after = {await home() for _ in range(4)}
    assert len(after) == 1
    assert not after & homes


# -- window --------------------------------------------------------------------------------------------


async def test_a_miss_is_blamed_on_the_stage_that_took_the_time(rig: Rig):
    slow = replace(FAST, prefill=PrefillCost(fixed_ms=40.0, per_token_ms=0.01))
    await rig.worker(Role.PREFILL, slow)
    await rig.worker(Role.DECODE)
    gateway = await rig.gateway()
    instruments = Instruments()
    pool = await rig.leading(rig.scheduler(profile=PROFILE, helm=QUICK, instruments=instruments))
    owner = replace(OWNER, slo=TIGHT)
    requests = [await gateway.submit(owner=owner) for _ in range(3)]
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in requests))
    seen = Timings(ttft_ms=100, decode_ms=20, decode_tokens=8)
    late = msgspec.structs.replace(seen, ttft_ms=900)
    slow_stream = msgspec.structs.replace(seen, decode_ms=7 * 80)
    await gateway.finish(requests[0], timings=seen, slo_met=True, completion_tokens=8)
    await gateway.finish(requests[1], timings=late, slo_met=False, completion_tokens=8)
    await gateway.finish(requests[2], timings=slow_stream, slo_met=False, completion_tokens=8)
    await eventually(lambda: len(pool.term.book) == 0)
    # 900 ms are none of the 40 ms that the worker took, nor of the queue: they passed at the gateway.
    assert pool.term.helm.window.blamed().by_stage == {Stage.NONE: 1, Stage.GATEWAY: 1, Stage.DECODE_LOAD: 1}
    assert counted(instruments, "request_slo") == {
        ("true", "none", "default", "tiny"): 1,
        ("false", "gateway", "default", "tiny"): 1,
        ("false", "decode_load", "default", "tiny"): 1,
    }


async def test_refusals_for_capacity_count_as_misses_in_the_second_ratio(rig: Rig):
    gateway = await rig.gateway()
    from scheduler.policy.cluster import Limits

    pool = await rig.leading(rig.scheduler(helm=QUICK, limits=Limits(no_worker_grace_s=0.1)))
    request = await gateway.submit()
    await eventually(lambda: request.refused)
    await eventually(lambda: pool.term.helm.window.blamed().refused == 1)
    assert pool.term.helm.window.blamed().attainment is None


async def test_answer_lengths_and_tenants_costs_are_learned_from_outcomes(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=8)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    sized = pool.term.book.get(request.rid).sized
    before = pool.memory.router.lengths.forecast(sized.key).mean
    await gateway.finish(request, completion_tokens=8, prompt_tokens=32)
    await eventually(lambda: len(pool.term.book) == 0)
    assert pool.memory.router.lengths.forecast(sized.key).mean < before
    # 32 prompt tokens at 1, 8 answered ones at 4, instead of the forecast.
    assert pool.term.waiting._fair.counter("default", "org-1") == 32 + 4 * 8


# -- ladder --------------------------------------------------------------------------------------------


async def test_without_prefill_workers_short_prompts_run_on_unified_ones_and_it_shows(rig: Rig):
    prefill, _ = await rig.pair()
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    steady = msgspec.structs.replace(QUICK, ladder=LadderLimits(up_s=600, down_s=0.3))
    pool = await rig.leading(rig.scheduler(helm=steady, profile=PROFILE))
    normal = await gateway.submit(3000)
    await eventually(lambda: normal.placed)
    assert normal.placed[0].path is Path.PD
    await prefill.kill()
    await eventually(lambda: pool.term.helm.ladder.rung is Rung.SHORT_ON_UNIFIED)
    short = await gateway.submit(100)
    await eventually(lambda: short.reason() is FinishReason.LENGTH)
    await eventually(lambda: short.placed)
    assert (short.placed[0].path, short.placed[0].reason) == (Path.FALLBACK, "degraded")
    # A long one waits for its pair, delays nobody, and runs when a prefill worker is back.
    long = await gateway.submit(3000)
    await eventually(lambda: len(pool.term.waiting) == 1)
    behind = await gateway.submit(100)
    await eventually(lambda: behind.reason() is FinishReason.LENGTH)
    assert not long.placed
    await rig.worker(Role.PREFILL)
    await eventually(lambda: long.reason() is FinishReason.LENGTH)
    await eventually(lambda: pool.term.helm.ladder.rung is Rung.NORMAL)
    again = await gateway.submit(3000)
    await eventually(lambda: again.placed)
    assert again.placed[0].path is Path.PD


async def test_what_a_local_model_serves_in_place_of_another_says_so(rig: Rig):
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(local=True)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    await eventually(lambda: request.placed)
    assert request.placed[0].path is Path.LOCAL
    await gateway.finish(request)
    await eventually(lambda: len(pool.term.book) == 0)


async def test_a_pair_may_serve_a_local_model_and_says_so_too(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit(local=True)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    await eventually(lambda: request.placed)
    assert request.placed[0].path is Path.LOCAL
    assert request.placed[0].prefill is not None


async def test_a_step_of_the_ladder_is_in_the_series_at_once(rig: Rig):
    worker = await rig.worker(Role.UNIFIED)
    pool = await rig.leading(rig.scheduler(helm=replace(QUICK, point_s=3600.0)))
    await worker.kill()
    await eventually(lambda: pool.term.helm.ladder.rung is Rung.LOCAL)

    async def rungs() -> list[str]:
        return [point.rung for point in await read_series(rig.redis, POOL)]

    async with asyncio.timeout(DEADLINE_S):
        while await rungs() != ["local"]:  # noqa: ASYNC110 - a stream in Redis has no event here
            await asyncio.sleep(0.02)


async def test_batch_work_is_shed_before_interactive_work(rig: Rig):
    slow = replace(FAST, prefill=PrefillCost(fixed_ms=0.0, per_token_ms=2.0))
    await rig.worker(Role.UNIFIED, slow, max_running=2)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler(helm=QUICK, profile=PROFILE))
    load = [await gateway.submit(1000, max_tokens=200) for _ in range(6)]
    await eventually(lambda: pool.term.helm.ladder.rung >= Rung.SHED_BATCH)
    batch = await gateway.submit(owner=replace(OWNER, tier="batch"))
    await eventually(lambda: batch.refused)
    assert batch.refused[0].code == "no_capacity"
    assert batch.refused[0].retry_after_s > 0
    assert not any(request.refused for request in load)


# -- ratio ---------------------------------------------------------------------------------------------


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


# -- what is left behind ---------------------------------------------------------------------------------


def logged(folder) -> list[decisions.Record]:
    with (folder / f"{POOL}.jsonl").open("rb") as lines:
        return list(decisions.decode(lines))


async def test_the_decision_log_has_what_was_decided_and_why(rig: Rig, tmp_path):
    await rig.pair()
    gateway = await rig.gateway()
    helm = msgspec.structs.replace(QUICK, decision_log=tmp_path)
    pool = await rig.leading(rig.scheduler(profile=PROFILE, helm=helm))
    request = await gateway.submit(200, max_tokens=4)
    too_long = await gateway.submit(100, max_tokens=19_990)
    await eventually(lambda: too_long.refused)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    seen = Timings(ttft_ms=40, decode_ms=6, decode_tokens=4)
    await gateway.finish(request, timings=seen, slo_met=True, prompt_tokens=200, completion_tokens=4)
    await eventually(lambda: len(pool.term.book) == 1)
    await eventually(lambda: {decisions.Ended, decisions.Ticked} <= {type(r) for r in logged(tmp_path)})
    records = logged(tmp_path)
    assert isinstance(records[0], decisions.Head)
    assert {r.worker_id for r in records if isinstance(r, decisions.WorkerSeen)} == {w.worker_id for w in rig.workers}
    by_kind = {type(r): r for r in records if getattr(r, "rid", request.rid) == request.rid}
    assert by_kind[decisions.Arrived].prompt_tokens == 200
    assert len(by_kind[decisions.Arrived].blocks) == 3
    placed = by_kind[decisions.Placed]
    assert (placed.path, placed.reason, placed.attempt) == (Path.PD, "least_loaded_pair", 1)
    assert (by_kind[decisions.Ended].met, by_kind[decisions.Ended].output_tokens) == (True, 4)
    assert decisions.Ticked in by_kind
    refusals = [r for r in records if isinstance(r, decisions.Refused)]
    assert [(r.rid, r.reason) for r in refusals] == [(too_long.rid, "too_long")]


async def test_each_leader_begins_a_file_and_full_files_are_rotated(rig: Rig, tmp_path):
    await rig.pair()
    gateway = await rig.gateway()
    helm = msgspec.structs.replace(QUICK, decision_log=tmp_path, decision_log_max_bytes=3000, decision_log_keep=2)
    await rig.leading(rig.scheduler(helm=helm))
    requests = [await gateway.submit() for _ in range(30)]
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in requests))
    await eventually((tmp_path / f"{POOL}.2.jsonl").exists)
    for name in (f"{POOL}.1.jsonl", f"{POOL}.2.jsonl"):
        with (tmp_path / name).open("rb") as lines:
            assert isinstance(next(decisions.decode(lines)), decisions.Head)
    assert len(list(tmp_path.iterdir())) <= 3


async def test_the_series_is_in_redis_for_whoever_reads_it(rig: Rig):
    await rig.pair()
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler(profile=PROFILE, helm=QUICK))
    request = await gateway.submit(3000)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    seen = Timings(ttft_ms=40, decode_ms=6, decode_tokens=4)
    await gateway.finish(request, timings=seen, slo_met=True, completion_tokens=8)
    await eventually(lambda: len(pool.term.book) == 0)
    points = []

    async def read() -> bool:
        points[:] = await read_series(rig.redis, POOL)
        return any(point.met for point in points)

    async with asyncio.timeout(DEADLINE_S):
        while not await read():  # noqa: ASYNC110 - a stream that others write has no event here
            await asyncio.sleep(0.02)
    point = next(point for point in points if point.met)
    assert (point.prefill, point.decode, point.unified) == (1, 1, 1)
    assert (point.attainment, point.attainment_with_refused, point.rung, point.mode) == (1.0, 1.0, "normal", "auto")
    assert len(await read_series(rig.redis, POOL, count=1)) == 1
    assert await read_series(rig.redis, POOL, since_unix_ms=points[-1].at_unix_ms + 3_600_000) == []


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


# -- answers under way -----------------------------------------------------------------------------------


async def test_answers_under_way_tell_how_long_answers_get_until_they_are_broken_off(rig: Rig):
    await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler(profile=PoolProfile(model="tiny", latency=SLOW_DECODE)))
    requests = [await gateway.submit(max_tokens=200) for _ in range(12)]
    await eventually(lambda: all(request.placed for request in requests))
    router = pool.memory.router
    kind = next(iter(pool.term.book)).sized.key
    learned = router.lengths.forecast(kind).mean
    router.growing.look(pool.term.dispatcher._now_s() + 30)
    assert router.moments(kind).mean > max(learned, 30_000 / 50)  # a token each 50 ms, and on by a quarter
    for request in requests:
        await gateway.abort(request)
    await eventually(lambda: all(request.state.value == "aborted" for request in pool.term.book))
    for request in requests:
        await gateway.finish(request, outcome="client_left", completion_tokens=3)
    await eventually(lambda: len(pool.term.book) == 0)
    assert len(router.growing) == 0
    assert router.lengths.forecast(kind).mean == learned
