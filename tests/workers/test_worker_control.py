"""Control: fences, idempotence, inventory, deadlines, drain and health by progress."""

import asyncio

import pytest

from contracts.lifecycle import FinishReason
from contracts.v1 import worker_pb2 as pb
from contracts.wire import FINISH_FROM_PB, attempt_from_pb, attempt_to_pb, rid_bytes
from tests.workers.peers import Leader, new_attempt, submit_of, unified_bench
from workers.control import COALESCE_S, _Stream
from workers.engines.faults import HANG
from workers.engines.timed_text import expected_text

PROMPT = list(range(50))


async def test_a_deposed_leader_may_not_submit():
    async with unified_bench() as bench:
        newer = Leader(bench.worker.address, epoch=7, scheduler_id="s2")
        inventory = await newer.open(bench.tasks)
        assert inventory.leader_epoch == 7
        await bench.submit(PROMPT)  # epoch 1
        rejected = await bench.leader.next_of("rejected", lambda _: True)
        assert rejected.code == "stale_leader"
        attempt = new_attempt()
        await newer.send(submit=submit_of(bench.worker, PROMPT, attempt=attempt, epoch=7))
        answer = await bench.gateway.answer(attempt)
        await newer.close()
    assert answer.text == expected_text(PROMPT, 16)


async def test_a_standby_sees_status_and_may_do_nothing():
    async with unified_bench() as bench:
        standby = Leader(bench.worker.address, epoch=0, scheduler_id="s2")
        await standby.open(bench.tasks)
        await standby.next_of("status", lambda s: s.progressing)
        running = await bench.submit(PROMPT, max_tokens=40)
        await standby.send(abort=pb.Abort(id=attempt_to_pb(running)))
        await standby.send(submit=submit_of(bench.worker, PROMPT, epoch=0))
        rejected = await standby.next_of("rejected", lambda _: True)
        answer = await bench.gateway.answer(running)
        assert not standby.of("final")
        await standby.close()
    assert rejected.code == "stale_leader"
    assert answer.reason is FinishReason.LENGTH


async def test_a_submit_for_an_earlier_life_of_the_worker_is_rejected():
    async with unified_bench() as bench:
        await bench.submit(PROMPT, worker_epoch=bench.worker.epoch - 1)
        rejected = await bench.leader.next_of("rejected", lambda _: True)
    assert rejected.code == "stale_worker_epoch"


async def test_malformed_submits_are_rejected_and_the_stream_lives_on():
    async with unified_bench() as bench:
        good = submit_of(bench.worker, PROMPT)
        for spoil in ({"prompt": b"abc"}, {"prompt": b""}, {"phase": 0}, {"phase": 1}):
            bad = pb.Submit()
            bad.CopyFrom(good)
            for field, value in spoil.items():
                setattr(bad, field, value)
            await bench.leader.send(submit=bad)
        await bench.leader.next_of("status", lambda _: len(bench.leader.of("rejected")) == 4)
        codes = [r.code for r in bench.leader.of("rejected")]
        answer = await bench.gateway.answer(await bench.submit(PROMPT))
    assert codes == ["bad_request", "bad_request", "bad_request", "wrong_role"]
    assert answer.reason is FinishReason.LENGTH


async def test_a_repeated_submit_runs_once():
    async with unified_bench() as bench:
        attempt = new_attempt()
        for _ in range(3):
            await bench.submit(PROMPT, attempt=attempt)
        answer = await bench.gateway.answer(attempt)
        await bench.submit(PROMPT, attempt=attempt)
        await bench.leader.next_of("status", lambda _: len(bench.leader.of("accepted")) == 4)
        finals = bench.leader.of("final")
    assert answer.text == expected_text(PROMPT, 16)
    assert len(finals) == 2  # at the end, and as the answer to the last submit


async def test_coalesced_commands_are_obeyed_in_order():
    async with unified_bench() as bench:
        attempts = [new_attempt() for _ in range(5)]
        commands = [pb.ControlCommand(submit=submit_of(bench.worker, PROMPT, attempt=a)) for a in attempts]
        await bench.leader.send(submit=commands[0].submit, also=commands[1:])
        answers = [await bench.gateway.answer(a) for a in attempts]
    assert {a.text for a in answers} == {expected_text(PROMPT, 16)}


async def test_a_new_leader_gets_what_runs_and_what_is_not_settled():
    async with unified_bench() as bench:
        ended = await bench.submit(PROMPT, max_tokens=2)
        await bench.gateway.answer(ended)
        runs = await bench.submit(PROMPT, max_tokens=1500)
        await bench.gateway.until(lambda: (runs, 3) in bench.gateway.answers)
        await bench.leader.close()
        bench.leader = Leader(bench.worker.address, epoch=2, scheduler_id="s2")
        inventory = await bench.leader.open(bench.tasks)
        assert [attempt_from_pb(r.id) for r in inventory.running] == [runs]
        assert [attempt_from_pb(f.id) for f in inventory.finals] == [ended]
        assert inventory.finals[0].counts.completion_tokens == 2
        await bench.leader.send(settled=pb.Settled(rid=rid_bytes(ended.rid)))
        await bench.leader.send(abort=pb.Abort(id=attempt_to_pb(runs)))
        final = await bench.leader.final(runs)
        assert FINISH_FROM_PB[final.reason] is FinishReason.ABORTED
        kept = [attempt_from_pb(f.id) for f in bench.worker.server.assignments.finals.all()]
    assert kept == [runs]


async def test_the_deadline_is_enforced_in_the_worker():
    async with unified_bench() as bench:
        attempt = await bench.submit(PROMPT, max_tokens=1500, deadline_s=0.3)
        answer = await bench.gateway.answer(attempt)
        final = await bench.leader.final(attempt)
    assert answer.reason is FinishReason.DEADLINE
    assert FINISH_FROM_PB[final.reason] is FinishReason.DEADLINE
    assert 0 < final.counts.completion_tokens == len(answer.ids) < 1500


async def test_a_draining_worker_finishes_its_work_and_takes_no_more():
    async with unified_bench() as bench:
        running = await bench.submit(PROMPT, max_tokens=100)
        await bench.leader.send(drain=pb.Drain(on=True, leader_epoch=1))
        await bench.submit(PROMPT)
        rejected = await bench.leader.next_of("rejected", lambda _: True)
        answer = await bench.gateway.answer(running)
        await bench.leader.send(drain=pb.Drain(on=False, leader_epoch=1))
        again = await bench.gateway.answer(await bench.submit(PROMPT))
    assert rejected.code == "draining"
    assert answer.reason is again.reason is FinishReason.LENGTH


async def test_a_role_change_is_answered():
    async with unified_bench() as bench:
        await bench.leader.send(set_role=pb.SetRole(role=pb.ROLE_UNSPECIFIED, leader_epoch=1))
        refused = await bench.leader.next_of("role_result", lambda _: True)
        await bench.leader.send(set_role=pb.SetRole(role=pb.ROLE_UNIFIED, leader_epoch=1))
        same = await bench.leader.next_of("role_result", lambda r: r.ok)
    assert not refused.ok
    assert refused.role == same.role == pb.ROLE_UNIFIED


async def test_a_hung_engine_is_unhealthy_although_every_call_is_answered():
    async with unified_bench(min_grace_s=0.2, force_end_s=0.5) as bench:
        bench.worker.server.condition._grace_s = 0.2
        attempt = await bench.submit(PROMPT, max_tokens=1500)
        await bench.gateway.until(lambda: len(bench.gateway.batches) >= 3)
        bench.worker.faults.on.add(HANG)
        status = await bench.leader.next_of("status", lambda s: not s.progressing)
        assert status.last_progress_age_ms >= 200
        assert status.state == pb.WORKER_STATE_UNHEALTHY
        await bench.submit(PROMPT)
        rejected = await bench.leader.next_of("rejected", lambda _: True)
        assert rejected.code == "unhealthy"
        # the engine ignores the abort: the request ends without it
        await bench.gateway.abort(attempt)
        answer = await bench.gateway.answer(attempt)
        bench.worker.faults.on.clear()
    assert answer.reason is FinishReason.ABORTED
    assert answer.finished.counts.completion_tokens == len(answer.ids) > 0
    assert "did not end" in answer.finished.error


async def test_stopping_ends_what_runs_and_gets_the_ends_out():
    async with unified_bench() as bench:
        attempt = await bench.submit(PROMPT, max_tokens=1500)
        await bench.gateway.until(lambda: len(bench.gateway.batches) >= 3)
        async with asyncio.timeout(5):
            await bench.worker.server.drain()
        answer = await bench.gateway.answer(attempt)
        final = await bench.leader.final(attempt)
    assert answer.reason is FinishReason.ERROR
    assert answer.finished.error == "the worker stops"
    assert final.counts.completion_tokens == len(answer.ids)


async def test_news_that_left_with_other_news_does_not_leave_again():
    stream = _Stream()
    stream.report(pb.ControlReport(final=pb.Final()))
    stream.report(pb.ControlReport(delivered=pb.Delivered()))
    await stream.next()
    stream.report(pb.ControlReport(final=pb.Final()))
    async with asyncio.TaskGroup() as tasks:
        leaves = tasks.create_task(stream.next())
        await asyncio.sleep(0)  # it waits for company, since the last message has just left
        stream.report(pb.ControlReport(delivered=pb.Delivered()), within_s=2 * COALESCE_S)
    report = leaves.result()
    assert report is not None
    assert len(report.also) == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5 * COALESCE_S):
            await stream.next()


async def test_a_report_that_may_wait_long_delays_none_that_may_not():
    stream = _Stream()
    stream.report(pb.ControlReport(accepted=pb.Accepted()), within_s=3600.0)
    stream.report(pb.ControlReport(final=pb.Final()), within_s=0.001)
    async with asyncio.timeout(20):
        first = await stream.next()
    assert first.HasField("accepted")
    assert [also.WhichOneof("report") for also in first.also] == ["final"]
