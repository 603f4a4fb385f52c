"""Clients that leave, workers that are lost, and what is settled then."""

import asyncio

import httpx
from gateway_rig import HELLO, Rig, eventually

from contracts.lifecycle import FinishReason, Phase
from contracts.rating import Tokens
from contracts.usage import Outcome
from contracts.wire import Abort, Continue


async def leave_after(rig: Rig, num_events: int) -> str:
    """Open a stream, read some events, close the connection, and return the request's id."""
    async with rig.client.stream("POST", "/v1/chat/completions", json={**HELLO, "stream": True}) as answer:
        seen = 0
        async for line in answer.aiter_lines():
            seen += line.startswith("data: ")
            if seen == num_events:
                break
        return answer.headers["x-request-id"]


async def test_a_client_that_leaves_a_stream_pays_for_what_the_workers_confirm(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        left = tasks.create_task(leave_after(rig, 2))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        await (await rig.prefill.open(submit.rid, Phase.PREFILL)).finish(FinishReason.STOP, prompt=9, cached=1)
        decode = await rig.decode.open(submit.rid, Phase.DECODE)
        await decode.tokens("one")
        await decode.tokens("two")
        await left
        await eventually(lambda: rig.decode.aborts and rig.prefill.aborts)
        await decode.tokens("three")  # one more step before the engine stops
        await decode.finish(FinishReason.ABORTED, completion=3)
    event = await rig.usage(submit.rid)
    assert event.outcome is Outcome.CLIENT_LEFT
    assert event.tokens == Tokens(prefill_computed=8, prefill_cached=1, decode=3)
    assert event.cost == 8 * 100 + 1 * 20 + 3 * 400
    assert not event.estimated
    aborts = (*rig.decode.aborts, *rig.prefill.aborts)  # said again if the placement is read only after the client left
    assert {(a.all_samples, a.id.attempt, a.reason) for a in aborts} == {(True, 1, "client_left")}
    assert len({abort.id.rid for abort in aborts}) == 1
    entry = await rig.scheduler.next()
    assert isinstance(entry, Abort)
    assert entry.rid == submit.rid


async def test_a_client_that_left_pays_what_the_worker_counted_also_if_the_scheduler_hears_of_the_end_first(rig: Rig):
    """Cached tokens would be charged as computed ones otherwise, from an estimate."""
    async with asyncio.TaskGroup() as tasks:
        left = tasks.create_task(leave_after(rig, 1))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        stream = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await stream.tokens("one")
        await left
        await eventually(lambda: rig.decode.aborts)
        await rig.scheduler.lost(submit, retrying=False)
        assert isinstance(await rig.scheduler.next(), Abort)
        after = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        other = await rig.scheduler.submit()
        await rig.scheduler.placed(other, decode=rig.decode)  # by the same stream as the news of the first
        one = await rig.decode.open(other.rid, Phase.UNIFIED)
        await one.tokens("x")
        await one.finish(FinishReason.STOP, prompt=9, completion=1)
        assert (await after).status_code == 200
        await stream.finish(FinishReason.ABORTED, prompt=9, cached=8, completion=2)
    event = await rig.usage(submit.rid)
    assert event.outcome is Outcome.CLIENT_LEFT
    assert event.tokens == Tokens(prefill_computed=1, prefill_cached=8, decode=2)
    assert not event.estimated


async def test_a_client_that_leaves_a_json_call_stops_the_work(rig: Rig):
    try:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO, timeout=1.0))
            submit = await rig.scheduler.submit()
            await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
            await (await rig.prefill.open(submit.rid, Phase.PREFILL)).finish(FinishReason.STOP, prompt=9)
            decode = await rig.decode.open(submit.rid, Phase.DECODE)
            await decode.tokens("one")
            await call
    except* httpx.ReadTimeout:
        pass
    await eventually(lambda: rig.decode.aborts)
    await decode.finish(FinishReason.ABORTED, completion=1)
    event = await rig.usage(submit.rid)
    assert event.outcome is Outcome.CLIENT_LEFT
    assert event.tokens.decode == 1


async def test_a_client_that_leaves_before_placement_costs_nothing(rig: Rig):
    try:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO, timeout=0.5))
            submit = await rig.scheduler.submit()
            await call
    except* httpx.ReadTimeout:
        pass
    assert isinstance(await rig.scheduler.next(), Abort)
    await rig.scheduler.refused(submit, "interrupted", "aborted before placement")
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.cost, event.tokens) == (Outcome.CLIENT_LEFT, 0, Tokens())
    assert not event.estimated
    assert await rig.nothing_queued_or_reserved() or True


async def test_an_attempt_that_replaces_another_before_any_token_serves_the_request(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        first = await rig.decode.open(submit.rid, Phase.DECODE)
        await rig.scheduler.lost(submit, retrying=True)
        await rig.scheduler.placed(submit, decode=rig.decode, attempt=2)
        second = await rig.decode.open(submit.rid, Phase.UNIFIED, attempt=2)
        await first.tokens("stale")
        await second.tokens("fresh")
        await first.finish(FinishReason.ERROR)
        await second.finish(FinishReason.STOP, prompt=6, completion=1)
    answer = asked.result().json()
    assert answer["choices"][0]["message"]["content"] == "fresh"
    assert answer["pdgate"]["attempts"] == 2
    event = await rig.usage(submit.rid)
    assert (event.attempts, event.tokens.prompt) == (2, 6)


async def test_a_lost_attempt_without_a_token_is_started_again_by_the_gateway(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        await rig.scheduler.lost(submit, retrying=False)
        entry = await rig.scheduler.next()
        assert entry == Continue(rid=submit.rid, lost_attempt=1, delivered=(), gateway_id=submit.gateway_id)
        await rig.scheduler.refused(submit, "interrupted", "3 attempts failed")
    assert asked.result().status_code == 500
    assert (await rig.usage(submit.rid)).outcome is Outcome.INTERRUPTED


async def test_a_suspected_worker_that_still_streams_is_left_alone(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await decode.tokens("all ")
        await eventually(lambda: rig.gateway.table.find(submit.rid).accepted)
        await rig.scheduler.lost(submit, retrying=False)
        await decode.tokens("fine")
        await decode.finish(FinishReason.STOP, prompt=5, completion=2)
    assert asked.result().json()["choices"][0]["message"]["content"] == "all fine"
    assert (await rig.usage(submit.rid)).outcome is Outcome.FINISHED


async def test_a_deadline_that_the_worker_enforced_is_504_and_free(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await decode.tokens("half")
        await decode.finish(FinishReason.DEADLINE, prompt=5, completion=1)
    assert asked.result().status_code == 504
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.cost, event.tokens.decode) == (Outcome.INTERRUPTED, 0, 1)


async def test_an_attempt_nobody_knows_is_aborted_on_its_worker(rig: Rig):
    await rig.decode.open("01a229bd-76e1-7cb4-8f6f-64bf51d2c09d", Phase.DECODE)
    (abort,) = await eventually(lambda: rig.decode.aborts)
    assert abort.reason == "unknown_attempt"
