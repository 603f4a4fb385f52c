"""One leads, the others stand by; what a new leader does with the work of the one before."""

import asyncio

from msgspec.structs import replace
from rig import SLOW_DECODE, SLOW_PREFILL, Rig, all_ends_heard, eventually, state_of
from rig_gateway import OWNER, POOL

from contracts import keys
from contracts.lifecycle import FinishReason, RequestState, Role
from contracts.wire import Attempt
from scheduler.helm import HelmSettings
from scheduler.legacy import decode as decode_legacy
from scheduler.policy.lengths import LengthKey
from scheduler.policy.sight import RatioLimits
from scheduler.takeover import Takeover


async def leader_of(rig: Rig) -> bytes | None:
    return await rig.redis.get(keys.leader(POOL))


async def test_only_one_leads_and_the_standby_reads_status(rig: Rig):
    await rig.pair()
    first = await rig.leading(rig.scheduler("a"))
    second = rig.scheduler("b")
    await eventually(lambda: [w.ready for w in second.registry.workers()] == [True, True])
    assert second.term is None
    assert await leader_of(rig) == f"a:{first.lease.epoch}".encode()


async def test_a_leader_that_stops_hands_over_at_once_with_a_higher_epoch(rig: Rig):
    first = await rig.leading(rig.scheduler("a"))
    second = rig.scheduler("b")
    rig._schedulers[first].cancel()
    await eventually(lambda: second.term is not None)
    assert second.lease.epoch == first.lease.epoch + 1
    assert await leader_of(rig) == f"b:{second.lease.epoch}".encode()


async def test_the_epoch_is_above_what_workers_have_seen_even_if_redis_forgot(rig: Rig):
    worker = await rig.worker(Role.UNIFIED)
    worker.server.condition.leader_epoch = 41
    pool = rig.scheduler()
    gateway = await rig.gateway()
    request = await gateway.submit()
    # The first leader may have placed it before it heard of the higher epoch: then another attempt answers.
    await eventually(lambda: FinishReason.LENGTH in (request.reason(1), request.reason(2)))
    assert pool.lease.epoch > 41


async def test_a_dead_leaders_running_requests_are_adopted_and_nothing_runs_twice(rig: Rig):
    prefill = await rig.worker(Role.PREFILL)
    decode = await rig.worker(Role.DECODE, SLOW_DECODE)
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    second = rig.scheduler("b")
    running = [await gateway.submit(max_tokens=60) for _ in range(4)]
    await eventually(lambda: all(r.tokens for r in running))
    started_s = asyncio.get_running_loop().time()
    await rig.kill(first)
    fresh = await gateway.submit()  # arrives while nobody leads
    await eventually(lambda: second.term is not None and second.term.attempts.caught_up)
    assert asyncio.get_running_loop().time() - started_s < 10
    await eventually(lambda: fresh.reason() is FinishReason.LENGTH)
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in running))
    assert all(len(r.tokens[1, 0]) == 60 for r in running)
    expected = {Attempt(r.rid, 1) for r in (*running, fresh)}
    assert sorted(decode.submitted, key=str) == sorted(expected, key=str) == sorted(prefill.submitted, key=str)
    assert not any(r.lost for r in running)
    book = second.term.book
    await eventually(lambda: all(book.get(r.rid).state is RequestState.FINISHED for r in (*running, fresh)))
    for request in (*running, fresh):
        await gateway.finish(request)
    await eventually(lambda: len(book) == 0)
    await eventually(lambda: not decode.server.assignments.finals.all())
    await all_ends_heard(second)


async def test_a_leader_killed_under_load_is_followed_within_two_seconds_and_nothing_is_dispatched_twice(rig: Rig):
    prefill = await rig.worker(Role.PREFILL)
    decodes = [await rig.worker(Role.DECODE, SLOW_DECODE, max_running=8) for _ in range(2)]
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    second = rig.scheduler("b")
    orgs = [replace(OWNER, org=f"org-{number}", tier=("default", "flex")[number % 2]) for number in range(4)]
    requests = [await gateway.submit(max_tokens=20, owner=orgs[number % 4]) for number in range(40)]
    await eventually(lambda: len(first.term.waiting) > 8 and sum(bool(r.tokens) for r in requests) > 8)
    streaming = [request for request in requests if request.tokens]
    gap_s = asyncio.get_running_loop().time()
    await rig.kill(first)
    late = [await gateway.submit(max_tokens=4, owner=orgs[0]) for _ in range(4)]
    await eventually(lambda: second.term is not None and second.term.attempts.caught_up)
    gap_s = asyncio.get_running_loop().time() - gap_s
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in (*requests, *late)), "all answered")
    assert all(len(request.tokens[1, 0]) == 20 for request in streaming)  # no running stream was cut
    once = sorted([Attempt(r.rid, 1) for r in (*requests, *late)], key=str)
    assert sorted(prefill.submitted, key=str) == once
    assert sorted(decodes[0].submitted + decodes[1].submitted, key=str) == once
    # A lease of 1.5 s, looked at each 0.2 s; what a loaded machine adds to that is not ours.
    assert second.lease._ttl_s + second.lease._poll_s < 2
    assert gap_s < 10
    # The new leader knows lengths and order anew, and counts nothing below zero.
    for request in (*requests, *late):
        await gateway.finish(request, completion_tokens=20, prompt_tokens=32)
    await eventually(lambda: len(second.term.book) == 0)
    assert all(w.num_requests == w.kv_tokens == w.queued_prefill_tokens == 0 for w in second.registry.workers())


async def test_requests_that_finished_while_nobody_led_are_known_to_the_new_leader(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    request = await gateway.submit(max_tokens=100)
    await eventually(lambda: request.placed)
    await rig.kill(first)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    second = await rig.leading(rig.scheduler("b"))
    assert state_of(second, request) is RequestState.FINISHED


async def test_a_request_that_is_settled_while_it_is_claimed_does_not_run_again(rig: Rig, monkeypatch):
    """A full disk held its settlement up until the very take-over: it ran twice, and its record stayed."""
    prefill, decode = await rig.pair()
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    request = await gateway.submit(max_tokens=4)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    await rig.kill(first)
    records = Takeover._records

    async def settled_first(takeover, entries):
        if entries:
            await gateway.finish(request)
        return await records(takeover, entries)

    monkeypatch.setattr(Takeover, "_records", settled_first)
    second = await rig.leading(rig.scheduler("b"))
    later = await gateway.submit(max_tokens=4)
    await eventually(lambda: later.reason() is FinishReason.LENGTH)
    await gateway.finish(later)
    await eventually(lambda: len(second.term.book) == 0)
    assert decode.submitted == prefill.submitted == [Attempt(request.rid, 1), Attempt(later.rid, 1)]
    assert not await rig.redis.exists(keys.inflight(POOL, request.rid))


async def test_a_waiting_request_is_dispatched_by_the_new_leader(rig: Rig):
    await rig.worker(Role.PREFILL)
    decode = await rig.worker(Role.DECODE, SLOW_DECODE, max_running=1)
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    running, waiting = await gateway.submit(max_tokens=40), await gateway.submit()
    await eventually(lambda: running.tokens and len(first.term.waiting) == 1)
    await rig.kill(first)
    await rig.leading(rig.scheduler("b"))
    await eventually(lambda: waiting.reason() is FinishReason.LENGTH)
    assert decode.submitted == [Attempt(running.rid, 1), Attempt(waiting.rid, 1)]


async def test_a_request_whose_workers_died_with_the_leader_is_tried_again(rig: Rig):
    prefill, decode = await rig.pair(SLOW_PREFILL)
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    request = await gateway.submit()
    await eventually(lambda: request.placed and decode.submitted and prefill.submitted)
    await rig.kill(first)
    await decode.kill()
    await rig.worker(Role.UNIFIED)
    rig.scheduler("b")
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert [(n.attempt, n.retrying) for n in request.lost] == [(1, True)]
    await eventually(lambda: prefill.running == 0)


async def test_a_streaming_request_whose_worker_died_with_the_leader_is_the_gateways_to_judge(rig: Rig):
    decode = await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    request = await gateway.submit(max_tokens=500)
    await eventually(lambda: request.tokens)
    await rig.kill(first)
    await decode.kill()
    second = rig.scheduler("b")
    await eventually(lambda: request.lost)
    assert [(n.attempt, n.retrying) for n in request.lost] == [(1, False)]
    await gateway.abort(request)
    await eventually(lambda: state_of(second, request) is RequestState.ABORTED)


async def test_a_leader_that_died_between_record_and_submit_leaves_a_request_that_is_tried_again(rig: Rig):
    prefill, decode = await rig.pair()
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    first.registry.send = lambda worker, command: True  # what it sends from here on goes nowhere
    request = await gateway.submit()
    await eventually(lambda: request.placed)
    await rig.kill(first)
    await rig.leading(rig.scheduler("b"))
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert decode.submitted == prefill.submitted == [Attempt(request.rid, 2)]


async def test_an_abort_that_arrives_while_nobody_leads_is_obeyed(rig: Rig):
    await rig.pair(SLOW_PREFILL)
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    request = await gateway.submit()
    await eventually(lambda: request.placed and all(w.running for w in rig.workers))
    await rig.kill(first)
    await gateway.abort(request)
    second = await rig.leading(rig.scheduler("b"))
    await eventually(lambda: all(w.running == 0 for w in rig.workers))
    await eventually(lambda: state_of(second, request) is RequestState.ABORTED)


async def test_a_leader_that_lost_its_lease_stops_and_the_workers_refuse_what_it_still_sends(rig: Rig):
    _, decode = await rig.pair()
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    await rig.redis.set(keys.leader(POOL), b"someone-else:9", px=1500)
    request = await gateway.submit()
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    assert decode.submitted == [Attempt(request.rid, 1)]
    assert first.lease.epoch > 1  # it leads again, under a new epoch, after the other's lease ran out


async def test_entries_that_a_former_leader_read_after_the_take_over_are_not_stranded(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler("a"))
    inbox, paused = keys.inbox(POOL), asyncio.Event()

    async def read_nothing(block_s: float):
        paused.set()
        await asyncio.Event().wait()

    pool.term.inbox.read = read_nothing
    await paused.wait()
    request = await gateway.submit()
    # As a leader does whose blocked read returns after it lost the lease.
    assert await rig.redis.xreadgroup(keys.CONSUMER_GROUP_SCHEDULER, "b", {inbox: ">"})
    await eventually(lambda: request.reason() is FinishReason.LENGTH)


async def test_a_worker_refuses_an_old_epoch_and_the_leader_steps_down(rig: Rig):
    worker = await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    before = pool.lease.epoch
    worker.server.condition.leader_epoch = before + 5
    request = await gateway.submit()
    await eventually(lambda: any(request.reason(attempt=n) is FinishReason.LENGTH for n in (1, 2)))
    assert pool.lease.epoch > before + 5


async def test_the_next_leader_knows_what_the_last_one_learned(rig: Rig):
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    settings = HelmSettings(look_s=0.05, point_s=0.1, ratio=RatioLimits(period_s=0.1))
    first = await rig.leading(rig.scheduler("a", helm=settings))
    second = rig.scheduler("b", helm=settings)
    await eventually(lambda: [w.ready for w in second.registry.workers()] == [True])
    key = LengthKey.of(model="tiny", tenant="org-1", prompt_tokens=32)
    for _ in range(60):
        first.memory.router.lengths.learn(key, 900)
    controller = first.term.helm.controller
    controller.state = replace(controller.state, prefill_gain=1.4, last_move_s=controller._now_s() - 7)
    assert second.memory.router.lengths.forecast(key).mean < 500
    written = await rig.redis.get(keys.learned(POOL))

    async with asyncio.timeout(10):  # until what was learned is written
        while written is None or len(decode_legacy(written).lengths) < 3:
            await asyncio.sleep(0.02)
            written = await rig.redis.get(keys.learned(POOL))
    await rig.kill(first)
    await eventually(lambda: second.term is not None and second.term.attempts.caught_up)
    assert second.memory.router.lengths.forecast(key).mean > 600
    state = second.term.helm.controller.state
    assert 1.3 < state.prefill_gain <= 1.4
    assert 7 < second.term.helm.controller._now_s() - state.last_move_s < 20  # the cooldown goes on
    request = await gateway.submit()
    await eventually(lambda: request.reason() is FinishReason.LENGTH)


async def test_a_legacy_of_another_kind_is_left_alone(rig: Rig):
    await rig.redis.set(keys.learned(POOL), b"\x93\x01\x02\x03")
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
