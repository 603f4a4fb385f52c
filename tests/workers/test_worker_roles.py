"""A worker's change of role: what runs ends first, nothing is lost, and a failure ends well."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from contracts.lifecycle import FinishReason, Phase, Role, WorkerState
from contracts.perf import DecodeCost, PrefillCost
from contracts.v1 import worker_pb2 as pb
from contracts.wire import ROLE_TO_PB
from tests.processes import engine_python
from tests.workers.peers import FAST, Gateway, Leader, Pair, new_attempt, pair_submits, running_worker, timed_pair
from workers.engines.faults import BUSY_SWITCH, FAIL_SWITCH, REFUSE_SWITCH
from workers.engines.sglang import NOT_IDLE
from workers.engines.timed_text import expected_text
from workers.roles import RestartNeeded

PROMPT = list(range(40))
SLOW = msgspec.structs.replace(FAST, decode=DecodeCost(fixed_ms=20.0))
SLOW_PREFILL = msgspec.structs.replace(FAST, prefill=PrefillCost(fixed_ms=20_000.0, per_token_ms=0.0))


async def set_role(leader: Leader, role: Role, *, epoch: int = 1) -> pb.RoleResult:
    """Ask for a role and wait for the next result."""
    seen = len(leader.of("role_result"))
    await leader.send(set_role=pb.SetRole(role=ROLE_TO_PB[role], leader_epoch=epoch))
    return await leader.next_of("role_result", lambda r: leader.of("role_result").index(r) >= seen)


async def test_a_pair_changes_places_and_says_the_same_text():
    async with timed_pair(FAST) as pair, asyncio.TaskGroup() as tasks:
        before = pair.prefill.epoch, pair.decode.epoch
        first = await set_role(pair.prefill_leader, Role.DECODE)
        second = await set_role(pair.decode_leader, Role.PREFILL)
        assert (first.ok, second.ok) == (True, True)
        assert first.worker_epoch > before[0]
        assert second.worker_epoch > before[1]
        assert first.switch_ms > 0
        swapped = Pair(
            pair.decode,
            pair.prefill,
            [Gateway(pair.decode.address, gateway_id="again"), Gateway(pair.prefill.address, gateway_id="again")],
            [pair.decode_leader, pair.prefill_leader],
        )
        for worker, gateway in ((swapped.prefill, swapped.prefill_gateway), (swapped.decode, swapped.decode_gateway)):
            await gateway.attach(tasks, epoch=worker.epoch)
        attempt = await swapped.submit(PROMPT, gateway_id="again")
        answer = await swapped.decode_gateway.answer(attempt, Phase.DECODE)
        assert answer.text == expected_text(PROMPT, 16)
        for gateway in (swapped.prefill_gateway, swapped.decode_gateway):
            await gateway.detach()


async def test_a_change_waits_for_what_runs_and_takes_nothing_new():
    async with timed_pair(SLOW) as pair:
        attempt = await pair.submit(PROMPT, max_tokens=20)
        key = (attempt, 2)
        await pair.decode_gateway.until(lambda: key in pair.decode_gateway.answers)
        await pair.decode_leader.send(set_role=pb.SetRole(role=pb.ROLE_PREFILL, leader_epoch=1))
        late = new_attempt()
        _, to_decode = pair_submits(pair.prefill, pair.decode, PROMPT, late)
        await pair.decode_leader.send(submit=to_decode)
        rejected = await pair.decode_leader.next_of("rejected", lambda _: True)
        result = await pair.decode_leader.next_of("role_result", lambda _: True)
        answer = await pair.decode_gateway.answer(attempt, Phase.DECODE)
    assert rejected.code == "draining"
    assert answer.text == expected_text(PROMPT, 20)
    assert answer.reason is FinishReason.LENGTH
    assert result.ok
    assert result.drain_ms > result.switch_ms > 0


async def test_a_change_that_does_not_drain_is_called_off():
    async with running_worker(Role.DECODE, FAST, drain_cap_s=0.2) as decode, asyncio.TaskGroup() as tasks:
        leader = Leader(decode.address)
        await leader.open(tasks)
        async with running_worker(Role.PREFILL, SLOW_PREFILL) as prefill:
            _, to_decode = pair_submits(prefill, decode, PROMPT, new_attempt())
            await leader.send(submit=to_decode)
            await leader.next_of("accepted", lambda _: True)
            epoch = decode.epoch
            result = await set_role(leader, Role.PREFILL)
            assert (result.ok, result.role, result.worker_epoch) == (False, pb.ROLE_DECODE, epoch)
            assert "drained" in result.message
            assert decode.server.condition.state is WorkerState.READY
            assert len(decode.server.assignments) == 1  # what runs is left alone
        await leader.close()


async def test_asking_for_the_present_role_calls_a_draining_change_off():
    async with running_worker(Role.DECODE, FAST) as decode, asyncio.TaskGroup() as tasks:
        leader = Leader(decode.address)
        await leader.open(tasks)
        async with running_worker(Role.PREFILL, SLOW_PREFILL) as prefill:
            _, to_decode = pair_submits(prefill, decode, PROMPT, new_attempt())
            await leader.send(submit=to_decode)
            await leader.next_of("accepted", lambda _: True)
            await leader.send(set_role=pb.SetRole(role=pb.ROLE_PREFILL, leader_epoch=1))
            kept = await set_role(leader, Role.DECODE)
            off = await leader.next_of("role_result", lambda r: not r.ok)
            assert (kept.ok, off.message) == (True, "called off")
            assert decode.server.condition.state is WorkerState.READY
        await leader.close()


async def test_a_refused_change_leaves_the_old_role_at_work():
    async with timed_pair(FAST) as pair:
        pair.decode.faults.on.add(REFUSE_SWITCH)
        result = await set_role(pair.decode_leader, Role.PREFILL)
        attempt = await pair.submit(PROMPT)
        answer = await pair.decode_gateway.answer(attempt, Phase.DECODE)
    assert (result.ok, result.role) == (False, pb.ROLE_DECODE)
    assert answer.text == expected_text(PROMPT, 16)


async def test_a_change_waits_for_what_is_left_in_the_engine_of_requests_that_have_ended():
    async with timed_pair(FAST) as pair:
        condition, states, drains_again = pair.decode.server.condition, list[WorkerState](), asyncio.Event()

        def changed() -> None:
            states.append(condition.state)
            if states[-2:] == [WorkerState.SWITCHING, WorkerState.DRAINING]:
                drains_again.set()

        condition.on_change = changed
        pair.decode.faults.on.add(BUSY_SWITCH)
        await pair.decode_leader.send(set_role=pb.SetRole(role=pb.ROLE_PREFILL, leader_epoch=1))
        async with asyncio.timeout(20):
            await drains_again.wait()
        assert not pair.decode_leader.of("role_result")
        pair.decode.faults.on.discard(BUSY_SWITCH)
        result = await pair.decode_leader.next_of("role_result", lambda _: True)
    assert (result.ok, result.role) == (True, pb.ROLE_PREFILL)
    assert result.drain_ms > 0


def test_sglang_still_says_by_these_words_that_it_is_busy():
    srt = Path(engine_python()).parents[1].glob("lib/python3*/site-packages/sglang/srt")
    text = " ".join((next(srt) / "disaggregation/role_switch.py").read_text().split())
    assert f'"instance is {NOT_IDLE}; drain all requests before switching", safe_to_restore=True' in text


async def test_an_engine_that_stays_busy_keeps_its_role_after_the_cap():
    async with running_worker(Role.DECODE, FAST, drain_cap_s=0.2) as decode, asyncio.TaskGroup() as tasks:
        leader = Leader(decode.address)
        await leader.open(tasks)
        decode.faults.on.add(BUSY_SWITCH)
        result = await set_role(leader, Role.PREFILL)
        assert (result.ok, result.role) == (False, pb.ROLE_DECODE)
        assert "drained" in result.message
        assert decode.server.condition.state is WorkerState.READY
        await leader.close()


async def test_a_stale_leader_changes_no_role():
    async with running_worker(Role.DECODE, FAST) as decode, asyncio.TaskGroup() as tasks:
        leader = Leader(decode.address, epoch=5)
        await leader.open(tasks)
        result = await set_role(leader, Role.PREFILL, epoch=4)
        assert (result.ok, result.message) == (False, "stale leader")
        assert decode.server.condition.role is Role.DECODE
        await leader.close()


async def test_a_failed_rebuild_ends_the_worker_so_that_it_starts_again():
    result: list[pb.RoleResult] = []
    with pytest.RaisesGroup(RestartNeeded, flatten_subgroups=True):
        async with running_worker(Role.DECODE, FAST) as decode, asyncio.TaskGroup() as tasks, asyncio.timeout(20):
            decode.faults.on.add(FAIL_SWITCH)
            leader = Leader(decode.address)
            await leader.open(tasks)
            result.append(await set_role(leader, Role.PREFILL))
            await asyncio.Event().wait()
    assert not result[0].ok


async def test_ends_that_no_gateway_confirmed_hold_a_change_up():
    async with timed_pair(FAST) as pair:
        await pair.decode_gateway.detach()
        attempt = await pair.submit(PROMPT)
        await pair.decode_leader.final(attempt, Phase.DECODE)
        await pair.decode_leader.send(set_role=pb.SetRole(role=pb.ROLE_PREFILL, leader_epoch=1))
        await pair.decode_leader.next_of("status", lambda s: s.state == pb.WORKER_STATE_DRAINING)
        assert not pair.decode_leader.of("role_result")
        async with asyncio.TaskGroup() as tasks:
            await pair.decode_gateway.attach(tasks, epoch=pair.decode.epoch, last_seq=0)
            answer = await pair.decode_gateway.answer(attempt, Phase.DECODE)
            result = await pair.decode_leader.next_of("role_result", lambda _: True)
            await pair.decode_gateway.detach()
    assert answer.text == expected_text(PROMPT, 16)
    assert result.ok


async def test_a_worker_that_is_to_stop_lets_its_streams_end_and_takes_no_others():
    async with timed_pair(SLOW) as pair:
        attempt = await pair.submit(PROMPT, max_tokens=30)
        key = (attempt, 2)
        await pair.decode_gateway.until(lambda: key in pair.decode_gateway.answers)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pair.decode.server.wind_down(20.0))
            await pair.decode_leader.next_of("status", lambda s: s.state == pb.WORKER_STATE_DRAINING)
            _, to_decode = pair_submits(pair.prefill, pair.decode, PROMPT, new_attempt())
            await pair.decode_leader.send(submit=to_decode)
            rejected = await pair.decode_leader.next_of("rejected", lambda _: True)
        answer = pair.decode_gateway.answers[key]
    assert rejected.code == "draining"
    assert answer.reason is FinishReason.LENGTH
    assert answer.text == expected_text(PROMPT, 30)
