"""Workers that die, refuse, lose the hand-off or their stream."""

import pytest
from rig import SLOW_DECODE, SLOW_PREFILL, TIMING, Rig, eventually, state_of
from rig_gateway import POOL

from contracts import keys
from contracts.lifecycle import FinishReason, Path, Phase, RequestState, Role
from scheduler.policy.cluster import Limits
from scheduler.record import decode_record
from scheduler.worker import Standing
from workers.engine import Refusal
from workers.engines.faults import HANG, LOSE_HAND_OFF


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_lost_before_the_prompt_is_done_is_replaced_without_asking(rig: Rig, victim: str):
    pair = dict(zip(("prefill", "decode"), await rig.pair(SLOW_PREFILL), strict=True))
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.placed)
    await eventually(lambda: pair["prefill"].submitted and pair["decode"].submitted)
    spare = await rig.worker(Role.UNIFIED)
    await pair[victim].kill()
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    await eventually(lambda: len(request.placed) == 2)
    assert [(n.attempt, n.retrying) for n in request.lost] == [(1, True)]
    assert (request.placed[1].attempt, request.placed[1].path) == (2, Path.FALLBACK)
    assert request.placed[1].decode.worker_id == spare.worker_id
    assert decode_record(await rig.redis.get(keys.inflight(POOL, request.rid))).attempt == 2
    other = pair["decode" if victim == "prefill" else "prefill"]
    await eventually(lambda: other.running == 0)  # its half was aborted


async def test_a_decode_worker_lost_while_streaming_is_the_gateways_to_judge(rig: Rig):
    await rig.worker(Role.PREFILL)
    decode = await rig.worker(Role.DECODE, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=500)
    await eventually(lambda: request.tokens)
    await decode.kill()
    await eventually(lambda: request.lost)
    assert [(n.attempt, n.retrying, n.cause) for n in request.lost] == [(1, False, "worker_lost")]
    assert state_of(pool, request) is RequestState.DECODING
    await gateway.abort(request)  # it had accepted tokens: interrupted
    await eventually(lambda: state_of(pool, request) is RequestState.ABORTED)
    assert len(request.placed) == 1


async def test_the_gateway_starts_a_request_again_when_it_has_no_token_of_it(rig: Rig):
    first = await rig.worker(Role.UNIFIED, SLOW_PREFILL)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.placed and first.submitted)
    second = await rig.worker(Role.UNIFIED)
    await first.kill()
    await eventually(lambda: request.lost)
    assert request.lost[0].retrying is False
    await gateway.start_again(request, lost_attempt=1)
    await gateway.start_again(request, lost_attempt=1)  # a repeated answer starts nothing more
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert request.placed[-1].decode.worker_id == second.worker_id
    assert [p.attempt for p in request.placed] == [1, 2]
    assert await rig.redis.xlen(keys.inbox(POOL)) == 1


async def test_a_prefill_worker_lost_after_the_hand_off_disturbs_nothing(rig: Rig):
    prefill = await rig.worker(Role.PREFILL)
    await rig.worker(Role.DECODE, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=20)
    await eventually(lambda: request.tokens)
    await prefill.kill()
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    assert not request.lost
    await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)


async def test_attempts_are_bounded(rig: Rig):
    workers = [await rig.worker(Role.PREFILL, SLOW_PREFILL) for _ in range(2)]
    await rig.worker(Role.DECODE)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler(limits=Limits(max_attempts=2)))
    request = await gateway.submit()
    for attempt in (1, 2):
        await eventually(lambda attempt=attempt: len(request.placed) == attempt)
        name = request.placed[-1].prefill.worker_id
        await next(w for w in workers if w.worker_id == name).kill()
    await eventually(lambda: request.refused)
    assert request.refused[0].code == "interrupted"
    assert len(request.placed) == 2


# -- hand-off ------------------------------------------------------------------------------------------


async def test_a_failed_hand_off_ends_both_sides_and_is_tried_once_elsewhere(rig: Rig):
    prefill = await rig.worker(Role.PREFILL)
    decode = await rig.worker(Role.DECODE, hand_off_timeout_s=0.3)
    decode.faults.on.add(LOSE_HAND_OFF)
    prefill.faults.on.add(LOSE_HAND_OFF)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.placed)
    spare = await rig.worker(Role.UNIFIED)
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert [(n.cause, n.retrying) for n in request.lost] == [("hand_off", True)]
    assert request.placed[-1].decode.worker_id == spare.worker_id
    await eventually(lambda: prefill.running == decode.running == 0)
    await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)


async def test_a_second_failed_hand_off_refuses(rig: Rig):
    prefill = await rig.worker(Role.PREFILL)
    decode = await rig.worker(Role.DECODE, hand_off_timeout_s=0.3)
    decode.faults.on.add(LOSE_HAND_OFF)
    prefill.faults.on.add(LOSE_HAND_OFF)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.refused)
    assert request.refused[0].code == "interrupted"
    assert [p.attempt for p in request.placed] == [1, 2]


async def test_the_schedulers_own_timer_ends_a_hand_off_that_hangs(rig: Rig):
    import msgspec

    prefill = await rig.worker(Role.PREFILL, hand_off_timeout_s=60)
    decode = await rig.worker(Role.DECODE, hand_off_timeout_s=60)
    decode.faults.on.add(LOSE_HAND_OFF)
    prefill.faults.on.add(LOSE_HAND_OFF)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler(timing=msgspec.structs.replace(TIMING, hand_off_min_s=0.3)))
    request = await gateway.submit()
    await eventually(lambda: request.placed)
    await rig.worker(Role.UNIFIED)
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    await eventually(lambda: prefill.running == decode.running == 0)


# -- refusals by workers -----------------------------------------------------------------------------------


async def test_a_submit_that_one_side_rejects_is_aborted_on_the_other_and_tried_again(rig: Rig):
    prefill, decode = await rig.pair()
    real, calls = prefill.engine.submit, []

    def full_once(job, outlet):
        calls.append(job)
        if len(calls) == 1:
            raise Refusal("full", "no room")
        real(job, outlet)

    prefill.engine.submit = full_once
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert not request.lost  # a rejected submit is retried silently
    await eventually(lambda: [p.attempt for p in request.placed] == [1, 2])
    await eventually(lambda: decode.running == 0)
    assert request.reason(attempt=1) in (FinishReason.ABORTED, None)


async def test_a_request_that_the_engine_calls_bad_is_refused_not_retried(rig: Rig):
    _, decode = await rig.pair()

    def bad(job, outlet):
        raise Refusal("bad_request", "no such adapter")

    decode.engine.submit = bad
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.refused)
    assert (request.refused[0].code, request.refused[0].message) == ("invalid_request", "no such adapter")


async def test_a_draining_worker_gets_nothing_new(rig: Rig):
    first = await rig.worker(Role.UNIFIED)
    second = await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    from contracts.lifecycle import WorkerState

    first.server.condition.move(WorkerState.DRAINING)
    await eventually(lambda: any(w.state is WorkerState.DRAINING for w in pool.registry.workers()))
    requests = [await gateway.submit() for _ in range(4)]
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in requests))
    assert (len(first.submitted), len(second.submitted)) == (0, 4)


# -- streams -----------------------------------------------------------------------------------------------


async def test_a_control_stream_that_breaks_and_returns_costs_nothing(rig: Rig):
    prefill = await rig.worker(Role.PREFILL)
    decode = await rig.worker(Role.DECODE, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=20)
    await eventually(lambda: request.tokens)
    for worker in (prefill, decode):
        await worker.cut_control()
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)
    assert not request.lost
    assert len(request.placed) == 1


async def test_a_final_that_got_lost_with_the_stream_comes_with_the_inventory(rig: Rig):
    _, decode = await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    tell = decode.server._control.tell_leaders

    def lose_finals(report, **when):
        if report.WhichOneof("report") != "final":
            tell(report, **when)

    decode.server._control.tell_leaders = lose_finals
    request = await gateway.submit()
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    assert not pool.term.book.get(request.rid).terminal
    await decode.cut_control()
    await eventually(lambda: state_of(pool, request) is RequestState.FINISHED)


async def test_a_silent_worker_is_suspected_then_dead_then_welcome_again(rig: Rig):
    worker = await rig.worker(Role.UNIFIED)
    pool = await rig.leading(rig.scheduler())
    known = next(pool.registry.workers())
    tell = worker.server._control.tell_status
    worker.server._control.tell_status = lambda status: None
    await eventually(lambda: known.standing is Standing.SUSPECT)
    await eventually(lambda: known.standing is Standing.DEAD)
    worker.server._control.tell_status = tell
    await eventually(lambda: known.standing is Standing.UP)


async def test_a_worker_that_restarts_is_another_worker(rig: Rig):
    old = await rig.worker(Role.UNIFIED, SLOW_PREFILL, worker_id="w")
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: old.submitted)
    await old.kill()
    new = await rig.worker(Role.UNIFIED, worker_id="w")
    await eventually(lambda: request.lost)
    await gateway.start_again(request, lost_attempt=1)
    await eventually(lambda: request.reason(attempt=2) is FinishReason.LENGTH)
    assert request.placed[-1].decode.epoch == new.epoch
    assert [w.epoch for w in pool.registry.workers()] == [new.epoch]


async def test_a_vanished_lease_under_a_healthy_stream_only_stops_new_work(rig: Rig):
    worker = await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    running = await gateway.submit(max_tokens=30)
    await eventually(lambda: running.tokens)
    worker.tasks[1].cancel()  # its heartbeat
    await rig.redis.delete(keys.worker_lease(POOL, worker.worker_id))
    await eventually(lambda: not next(pool.registry.workers()).ready)
    await eventually(lambda: running.reason() is FinishReason.LENGTH)
    waiting = await gateway.submit()
    await eventually(lambda: len(pool.term.waiting) == 1)
    assert not waiting.placed


async def test_work_that_nobody_knows_is_aborted_when_a_worker_connects(rig: Rig):
    await rig.pair(SLOW_PREFILL)
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.placed and all(w.running for w in rig.workers))
    await rig.kill(first)
    await gateway.finish(request, "interrupted")  # settled while nobody led
    await rig.leading(rig.scheduler())
    await eventually(lambda: all(w.running == 0 for w in rig.workers))


async def test_a_hanging_worker_turns_unhealthy_and_gets_nothing_new(rig: Rig):
    worker = await rig.worker(Role.UNIFIED)
    worker.server.condition._grace_s = 0.2
    worker.faults.on.add(HANG)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    await gateway.submit()
    await eventually(lambda: worker.running)
    await eventually(lambda: not next(pool.registry.workers()).ready)
    assert Phase.UNIFIED in {p.phase for p in next(iter(pool.term.book)).parts.values()}
