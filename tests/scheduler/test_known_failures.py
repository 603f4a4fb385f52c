"""Failures that other split servers are known for, each with what happens here instead."""

import asyncio

import msgspec
from rig import FAST, SLOW_PREFILL, Rig, eventually
from rig_gateway import POOL

from contracts import keys
from contracts.lifecycle import Phase, Role, WorkerState
from contracts.perf import DecodeCost
from contracts.v1 import worker_pb2 as pb
from contracts.wire import AttemptLost, Inflight, Placed, Refused
from scheduler.pairs import PairState
from workers.engines.faults import LOSE_HAND_OFF

PROMPT = 600  # tokens: longer than what a unified worker takes for short
ONE_SLOT = msgspec.structs.replace(FAST, decode=DecodeCost(fixed_ms=20.0), max_running=1)


async def test_decode_does_not_wait_for_a_prefill_worker_that_died(rig: Rig):
    prefill, decode = await rig.worker(Role.PREFILL, SLOW_PREFILL), await rig.worker(Role.DECODE)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit(PROMPT)
    await eventually(lambda: prefill.running and decode.running, "both run")
    await prefill.kill()
    await rig.worker(Role.PREFILL)
    await eventually(lambda: (2, 0, Phase.DECODE) in request.finished, "done by another prefill worker")
    assert request.finished[2, 0, Phase.DECODE].reason == pb.FINISH_REASON_LENGTH
    await eventually(lambda: not decode.running, "no slot is held")


async def test_waiting_for_a_decode_slot_is_no_hand_off_time(rig: Rig):
    """Five requests on one slot wait 0.9 s in all; the hand-off timers are 0.2 s."""
    prefill = await rig.worker(Role.PREFILL, hand_off_timeout_s=0.2)
    decode = await rig.worker(Role.DECODE, ONE_SLOT, hand_off_timeout_s=0.2, max_running=64)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    requests = [await gateway.submit(PROMPT, max_tokens=8) for _ in range(5)]
    await eventually(lambda: all((1, 0, Phase.DECODE) in r.finished for r in requests), "all done at the first attempt")
    assert {r.finished[1, 0, Phase.DECODE].reason for r in requests} == {pb.FINISH_REASON_LENGTH}
    assert not any(r.of(AttemptLost) for r in requests)
    assert (prefill.running, decode.running) == (0, 0)


async def test_failed_hand_offs_leak_no_slot(rig: Rig):
    prefill = await rig.worker(Role.PREFILL, hand_off_timeout_s=0.1)
    decode = await rig.worker(Role.DECODE, hand_off_timeout_s=0.1)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    prefill.faults.on.add(LOSE_HAND_OFF)
    requests = [await gateway.submit(PROMPT) for _ in range(12)]
    await eventually(lambda: all(r.of(Refused) for r in requests), "all refused in the end")
    await eventually(lambda: not prefill.running and not decode.running, "nothing runs")
    assert not any(ids for r in requests for ids in r.tokens.values())  # of a KV cache that never came
    for worker in (prefill, decode):
        engine = worker.engine
        assert (engine._kv_used, engine._rooms, engine._fetching, engine._requests) == (0, {}, {}, {})
    await eventually(lambda: all(not w.charges for w in pool.registry.workers()), "no load is counted any more")


async def test_a_closed_kv_port_is_found_by_a_probe_although_the_worker_answers(rig: Rig):
    prefill = await rig.worker(Role.PREFILL, probes=True)
    prefill.engine._server.close()  # its gRPC port goes on answering
    decode = await rig.worker(Role.DECODE, probes=True)
    unified = await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    pairs = pool.registry.pairs
    await eventually(lambda: pairs.find(prefill.worker_id, decode.worker_id).state is PairState.FAILED, "probe failed")
    request = await gateway.submit(PROMPT)
    await eventually(lambda: (1, 0, Phase.UNIFIED) in request.finished, "served elsewhere, at the first attempt")
    assert request.placed[0].decode.worker_id == unified.worker_id
    assert prefill.server.condition.progressing


async def test_a_dead_peer_does_not_fail_ones_own_liveness(rig: Rig):
    prefill, decode = await rig.worker(Role.PREFILL, SLOW_PREFILL), await rig.worker(Role.DECODE)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    await gateway.submit(PROMPT)
    await eventually(lambda: decode.running, "decode waits for its peer")
    await prefill.kill()
    await eventually(lambda: not decode.running, "it gave up")
    assert decode.server.condition.progressing
    assert decode.server.condition.state is WorkerState.READY


async def test_every_sample_has_a_room_of_its_own(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit(PROMPT, num_samples=4, max_tokens=400)
    await eventually(lambda: request.of(Placed), "placed")
    raw = await rig.redis.get(keys.inflight(POOL, request.rid))
    rooms = msgspec.msgpack.decode(raw, type=Inflight).rooms
    assert len(set(rooms)) == 4
    await eventually(lambda: len({s for _, s, phase in request.finished if phase is Phase.DECODE}) == 4, "four answers")
    texts = [tuple(request.tokens[1, sample]) for sample in range(4)]
    assert all(len(ids) == 400 for ids in texts)


async def test_a_long_prompt_is_not_computed_by_one_worker_after_the_other(rig: Rig):
    workers = [await rig.worker(Role.PREFILL, hand_off_timeout_s=0.1) for _ in range(5)]
    await rig.worker(Role.DECODE, hand_off_timeout_s=0.1)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    for worker in workers:
        worker.faults.on.add(LOSE_HAND_OFF)
    request = await gateway.submit(3000)
    await eventually(lambda: request.of(Refused), "refused")
    computed = sum(a.rid == request.rid for w in workers for a in w.submitted)
    assert computed == 2  # once, and once more within the budget


async def test_a_worker_that_ends_gets_nothing_new(rig: Rig):
    ending, staying = await rig.worker(Role.UNIFIED), await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    ending.server.condition.move(WorkerState.DRAINING)
    await eventually(lambda: not pool.registry.get(ending.worker_id, ending.epoch).ready, "seen")
    before = len(ending.submitted)
    requests = [await gateway.submit(32) for _ in range(6)]
    await eventually(lambda: all(r.finished for r in requests), "served")
    assert len(ending.submitted) == before
    assert {r.placed[0].decode.worker_id for r in requests} == {staying.worker_id}


async def test_a_drain_waits_for_a_stream_as_long_as_it_runs(rig: Rig):
    slow = msgspec.structs.replace(FAST, decode=DecodeCost(fixed_ms=20.0))
    worker = await rig.worker(Role.UNIFIED, slow)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(32, max_tokens=60)
    await eventually(lambda: request.tokens.get((1, 0)), "streams")
    async with asyncio.TaskGroup() as tasks:
        flip = tasks.create_task(pool.actuator.flip(worker.worker_id, Role.DECODE, why="test"))
        await eventually(lambda: request.finished, "finished")
    assert request.finished[1, 0, Phase.UNIFIED].reason == pb.FINISH_REASON_LENGTH
    assert len(request.tokens[1, 0]) == 60
    assert flip.result().ok


async def test_load_counters_never_go_below_zero_nor_back_to_it_while_requests_run(rig: Rig):
    await rig.worker(Role.PREFILL)
    engine = (await rig.worker(Role.DECODE, ONE_SLOT, max_running=64)).engine
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    requests = [await gateway.submit(PROMPT, max_tokens=6) for _ in range(6)]
    decode = next(w for w in pool.registry.workers() if w.role is Role.DECODE)
    await eventually(lambda: all(r.of(Placed) for r in requests), "placed")
    lowest: list[int] = []

    def all_done() -> bool:
        for worker in pool.registry.workers():
            assert min(worker.num_requests, worker.kv_tokens, worker.queued_prefill_tokens) >= 0
        load = engine.load()
        lowest.append(decode.num_requests - load.num_running - load.num_waiting)
        return all((1, 0, Phase.DECODE) in r.finished for r in requests)

    await eventually(all_done, "all done")
    assert min(lowest) >= 0  # the worker itself has never more than it is charged for
    await eventually(lambda: all(w.num_requests == 0 for w in pool.registry.workers()), "and then zero")
