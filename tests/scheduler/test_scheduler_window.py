"""What users got, who is blamed, and what is learned from it."""

import msgspec
from rig import FAST, SLOW_DECODE, Rig, eventually
from rig_gateway import OWNER
from rig_helm import PROFILE, QUICK, TIGHT, counted, replace

from contracts.lifecycle import FinishReason, Role
from contracts.perf import PrefillCost
from contracts.slo import Timings
from observability.metrics import Instruments
from scheduler.policy.blame import Stage
from scheduler.policy.cluster import Limits
from scheduler.profile import PoolProfile


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


async def test_an_outcome_that_overtakes_the_workers_last_words_waits_for_them(rig: Rig, monkeypatch):
    monkeypatch.setattr("workers.server.END_WITHIN_WITH_ROOM_S", 0.09)
    prefill, decode = await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    requests = []
    for _ in range(5):
        request = await gateway.submit(max_tokens=2)
        requests.append(request)
        await eventually(lambda request=request: request.reason() is not None)
        await gateway.finish(request, completion_tokens=2)
    await eventually(lambda: len(pool.term.book) == 0)
    await eventually(lambda: not decode.server.assignments.finals.all())
    # Nothing was left to be stopped on any worker when they were forgotten.
    assert not prefill.server.assignments._tombstones
    assert not decode.server.assignments._tombstones
