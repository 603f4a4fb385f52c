"""A request from the inbox to real timed workers and back."""

import asyncio

import msgspec
from rig import DEADLINE_S, SLOW_DECODE, SLOW_PREFILL, Rig, all_ends_heard, eventually, state_of
from rig_gateway import OWNER, POOL, RigGateway

from contracts import keys
from contracts.lifecycle import FinishReason, Path, Phase, RequestState, Role
from contracts.wire import FIELD, Inflight, Placed, pack_ids
from scheduler.policy.cluster import Limits
from scheduler.record import decode_record
from workers.engines.faults import HANG


async def test_a_request_runs_on_a_pair_and_is_forgotten_once_settled(rig: Rig):
    prefill, decode = await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=8)
    await eventually(lambda: request.reason() is not None)
    assert request.reason() is FinishReason.LENGTH
    assert len(request.tokens[1, 0]) == 8
    await eventually(lambda: request.placed)
    placed = request.placed[0]
    assert (placed.path, placed.attempt) == (Path.PD, 1)
    assert placed.prefill.worker_id == prefill.worker_id
    assert placed.decode.worker_id == decode.worker_id
    assert placed.reason == "least_loaded_pair"
    assert placed.queued_ms is not None
    await eventually(lambda: request.of(Placed), "by Redis, too")
    assert request.notices_by_workers == request.of(Placed)
    await gateway.finish(request)
    await eventually(lambda: len(pool.term.book) == 0)
    await eventually(lambda: not prefill.server.assignments.finals.all() and not decode.server.assignments.finals.all())
    await all_ends_heard(pool)


async def test_the_record_is_written_before_the_workers_hear(rig: Rig):
    await rig.pair(SLOW_PREFILL)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(num_samples=2)
    await eventually(lambda: request.placed)
    record: Inflight = decode_record(await rig.redis.get(keys.inflight(POOL, request.rid)))
    assert (record.attempt, record.leader_epoch, record.path) == (1, pool.lease.epoch, Path.PD)
    assert record.entry_id == request.entry_id.decode()
    assert len(set(record.rooms)) == 2
    assert record.decode == request.placed[0].decode


async def test_samples_run_as_engine_requests_of_their_own(rig: Rig):
    prefill, decode = await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(num_samples=3, max_tokens=4)
    await eventually(lambda: all(request.reason(sample=s) is FinishReason.LENGTH for s in range(3)))
    assert {a.sample for a in prefill.submitted} == {a.sample for a in decode.submitted} == {0, 1, 2}
    await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)


async def test_a_pool_of_unified_workers_serves_without_a_pair(rig: Rig):
    unified = await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit(500)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    await eventually(lambda: request.placed)
    assert (request.placed[0].path, request.placed[0].prefill) == (Path.UNIFIED, None)
    assert request.placed[0].decode.worker_id == unified.worker_id


async def test_load_spreads_over_equal_workers(rig: Rig):
    prefills = [await rig.worker(Role.PREFILL) for _ in range(2)]
    decodes = [await rig.worker(Role.DECODE, SLOW_DECODE) for _ in range(2)]
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    requests = [await gateway.submit(max_tokens=20) for _ in range(8)]
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in requests))
    assert [len(w.submitted) for w in decodes] == [4, 4]
    assert all(len(w.submitted) >= 2 for w in prefills)


async def test_requests_wait_in_order_while_the_workers_are_full(rig: Rig):
    await rig.worker(Role.PREFILL)
    decode = await rig.worker(Role.DECODE, max_running=1)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    flex = msgspec.structs.replace(OWNER, tier="flex")
    first = await gateway.submit(max_tokens=200)
    await eventually(lambda: first.placed)
    late = await gateway.submit(owner=flex)
    requests = [await gateway.submit() for _ in range(3)]
    await eventually(lambda: len(pool.term.waiting) == 4)
    await eventually(lambda: late.reason() is FinishReason.LENGTH)
    order = [a.rid for a in decode.submitted]
    assert order == [first.rid, *(r.rid for r in requests), late.rid]


async def test_too_many_waiting_requests_are_refused(rig: Rig):
    await rig.pair(SLOW_PREFILL)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler(limits=Limits(max_queued_requests=0)))
    request = await gateway.submit()
    await eventually(lambda: request.refused)
    assert request.refused[0].code == "no_capacity"
    assert request.refused[0].retry_after_s > 0


async def test_without_workers_a_request_is_refused_after_a_grace(rig: Rig):
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler(limits=Limits(no_worker_grace_s=0.3)))
    request = await gateway.submit()
    await eventually(lambda: request.refused)
    assert (request.refused[0].code, request.placed) == ("no_capacity", [])
    assert request.refused[0].retry_after_s > 0


async def test_a_request_waits_for_a_worker_that_comes_within_the_grace(rig: Rig):
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: len(pool.term.waiting) == 1)
    await rig.worker(Role.UNIFIED)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    assert not request.refused


async def test_a_deadline_that_passes_in_the_queue_refuses(rig: Rig):
    await rig.worker(Role.PREFILL, SLOW_PREFILL)
    await rig.worker(Role.DECODE, SLOW_PREFILL, max_running=1)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    first = await gateway.submit()
    await eventually(lambda: first.placed)
    request = await gateway.submit(deadline_s=0.3)
    await eventually(lambda: request.refused)
    assert request.refused[0].code == "deadline_exceeded"
    assert request.refused[0].retry_after_s is None


async def test_a_prompt_that_fits_no_worker_is_refused_at_once_and_blocks_nobody(rig: Rig):
    await rig.worker(Role.PREFILL)
    await rig.worker(Role.DECODE, context_tokens=100)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    too_long, fits = await gateway.submit(200), await gateway.submit(20)
    await eventually(lambda: too_long.refused)
    assert too_long.refused[0].code == "context_length_exceeded"
    await eventually(lambda: fits.reason() is FinishReason.LENGTH)


async def test_an_entry_that_the_scheduler_fails_on_is_refused_and_stops_nothing(rig: Rig):
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    arrive = pool.term.dispatcher.arrive

    def fail_once(submit, entry_id):
        pool.term.dispatcher.arrive = arrive
        raise LookupError("a fault of ours")

    pool.term.dispatcher.arrive = fail_once
    first = await gateway.submit()
    await eventually(lambda: first.refused)
    assert first.refused[0].code == "interrupted"
    second = await gateway.submit()
    await eventually(lambda: second.reason() is FinishReason.LENGTH)
    assert await rig.redis.xlen(keys.inbox_dead_letters(POOL)) == 1


async def test_garbage_is_dead_lettered_and_stops_nothing(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    inbox = keys.inbox(POOL)
    await rig.redis.xadd(inbox, {FIELD: b"\xc1garbage"})
    await rig.redis.xadd(inbox, {"other": b"x"})
    await rig.redis.xadd(inbox, {FIELD: msgspec.msgpack.encode({"type": "submit", "rid": "not-a-uuid"})})
    request = await gateway.submit()
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    assert await rig.redis.xlen(keys.inbox_dead_letters(POOL)) == 3
    assert await rig.redis.xlen(inbox) == 1  # the good one is not settled yet
    assert (await rig.redis.xpending(inbox, keys.CONSUMER_GROUP_SCHEDULER))["pending"] == 1


async def test_a_submit_without_sense_is_refused_as_a_bad_request(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit(prompt=pack_ids([1, 2]) + b"x")
    await eventually(lambda: request.refused)
    assert request.refused[0].code == "invalid_request"


async def test_a_submit_written_twice_runs_once(rig: Rig):
    _, decode = await rig.pair()
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await gateway.write(request.submit)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    marker = await gateway.submit()
    await eventually(lambda: marker.reason() is FinishReason.LENGTH)
    assert [a.rid for a in decode.submitted] == [request.rid, marker.rid]
    assert await rig.redis.xlen(keys.inbox(POOL)) == 2


async def test_a_settled_request_whose_outcome_got_lost_is_forgotten(rig: Rig, monkeypatch):
    monkeypatch.setattr("scheduler.pool._UNHEARD_AFTER_S", 0.1)
    _, decode = await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    await rig.redis.xack(keys.inbox(POOL), keys.CONSUMER_GROUP_SCHEDULER, request.entry_id)
    await rig.redis.xdel(keys.inbox(POOL), request.entry_id)
    await eventually(lambda: len(pool.term.book) == 0)
    await eventually(lambda: not decode.server.assignments.finals.all())


# -- aborts ------------------------------------------------------------------------------------------


async def aborted(rig: Rig, gateway: RigGateway, request) -> None:
    await gateway.abort(request)
    await eventually(lambda: all(w.running == 0 for w in rig.workers))
    inbox = keys.inbox(POOL)

    async def acked() -> bool:
        return await rig.redis.xlen(inbox) == 1

    async with asyncio.timeout(DEADLINE_S):
        while not await acked():  # noqa: ASYNC110 - a key in Redis has no event
            await asyncio.sleep(0.005)


async def test_an_abort_in_the_queue_ends_the_request_without_a_worker(rig: Rig):
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: len(pool.term.waiting) == 1)
    await aborted(rig, gateway, request)
    await eventually(lambda: request.refused)
    assert request.refused[0].message == "aborted before placement"
    assert state_of(pool, request) is RequestState.ABORTED
    prefill, decode = await rig.pair()
    marker = await gateway.submit()
    await eventually(lambda: marker.reason() is FinishReason.LENGTH)
    assert {a.rid for a in prefill.submitted + decode.submitted} == {marker.rid}


async def test_an_abort_during_prefill_ends_both_sides(rig: Rig):
    await rig.pair(SLOW_PREFILL)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.placed)
    await aborted(rig, gateway, request)
    # The decode side may notice first that its prefill side is gone.
    await eventually(lambda: request.reason() in (FinishReason.ABORTED, FinishReason.HAND_OFF))
    await eventually(lambda: state_of(pool, request) is RequestState.ABORTED)
    assert not request.lost
    await all_ends_heard(pool)


async def test_an_abort_during_decode_stops_generation(rig: Rig):
    await rig.worker(Role.PREFILL)
    await rig.worker(Role.DECODE, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=1000)
    await eventually(lambda: request.tokens)
    await aborted(rig, gateway, request)
    await eventually(lambda: request.reason() is FinishReason.ABORTED)
    await eventually(lambda: pool.term.book.get(request.rid).terminal)
    final = request.finished[1, 0, Phase.DECODE]
    assert final.counts.completion_tokens < 1000


async def test_an_abort_after_the_end_or_of_an_unknown_request_is_dropped(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: pool.term.book.get(request.rid) and pool.term.book.get(request.rid).terminal)
    await aborted(rig, gateway, request)
    await gateway.finish(request)
    await eventually(lambda: len(pool.term.book) == 0)
    await gateway.abort(request)
    marker = await gateway.submit()
    await eventually(lambda: marker.reason() is FinishReason.LENGTH)
    assert not request.refused


async def test_a_client_that_left_is_not_retried_when_its_worker_dies(rig: Rig):
    prefill, decode = await rig.pair(SLOW_PREFILL)
    decode.faults.on.add(HANG)
    prefill.faults.on.add(HANG)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.placed)
    await gateway.abort(request)
    await eventually(lambda: pool.term.book.get(request.rid).stop_requested)
    await prefill.kill()
    await decode.kill()
    await eventually(lambda: state_of(pool, request) is RequestState.ABORTED)
    assert len(request.placed) == 1
    assert not request.lost
