"""Degrading by steps, and what the client is told of it."""

import asyncio

import msgspec
from rig import DEADLINE_S, FAST, Rig, eventually
from rig_gateway import OWNER, POOL
from rig_helm import PROFILE, QUICK, replace

from contracts.lifecycle import FinishReason, Path, Role
from contracts.perf import PrefillCost
from contracts.series import read_series
from scheduler.policy.ladder import LadderLimits, Rung


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
