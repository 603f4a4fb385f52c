"""What a leader leaves behind: the decision log and the pool's series."""

import asyncio

import msgspec
from rig import DEADLINE_S, Rig, eventually
from rig_gateway import POOL
from rig_helm import PROFILE, QUICK, logged

from contracts.lifecycle import FinishReason, Path, Role
from contracts.series import read_series
from contracts.slo import Timings
from scheduler.policy import decisions


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
