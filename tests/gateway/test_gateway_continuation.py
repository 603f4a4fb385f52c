"""A worker is lost after the client has tokens: the rest comes from another one, without a seam."""

import asyncio

import pytest
from gateway_rig import HELLO, PeerWorker, Rig, events_of, eventually

from contracts.lifecycle import FinishReason, Phase, Role
from contracts.usage import Outcome
from contracts.wire import Abort, Continue, pack_ids


async def accepted(rig: Rig, rid: str) -> None:
    await eventually(lambda: rig.gateway.table.find(rid).accepted)


async def started(rig: Rig, prompt: int = 9, cached: int = 4):
    """A request that streams from the pair: (its submit, its decode handle)."""
    submit = await rig.scheduler.submit()
    await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
    prefill = await rig.prefill.open(submit.rid, Phase.PREFILL)
    await prefill.finish(FinishReason.STOP, prompt=prompt, cached=cached)
    return submit, await rig.decode.open(submit.rid, Phase.DECODE)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_client_reads_one_answer_and_pays_for_its_tokens_once(rig: Rig, stream: bool):
    spare = PeerWorker("spare-0", Role.UNIFIED)
    await spare.start()
    await rig.register(spare)
    body = {**HELLO, "stream": stream, "stream_options": {"include_usage": True}} if stream else HELLO
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=body))
        submit, decode = await started(rig)
        await decode.tokens("naï", "", "ve ")
        await accepted(rig, submit.rid)
        await rig.decode.stop()
        await eventually(lambda: not rig.gateway.fleet.attached("decode-0"))
        await rig.scheduler.lost(submit, retrying=False)
        entry = await rig.scheduler.next()
        assert entry == Continue(
            rid=submit.rid,
            lost_attempt=1,
            delivered=(pack_ids(range(3)),),
            delivered_chars=(6,),
            gateway_id=submit.gateway_id,
        )
        await rig.scheduler.placed(submit, decode=spare, attempt=2)
        again = await spare.open(submit.rid, Phase.UNIFIED, attempt=2)
        await again.tokens("story")
        await again.finish(FinishReason.STOP, prompt=12, cached=8, completion=1)
    await spare.stop()
    if stream:
        events = [e for e in events_of(asked.result().text) if e != "[DONE]"]
        deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
        assert "".join(d.get("content", "") for d in deltas) == "naïve story"
        assert sum("role" in d for d in deltas) == 1
        usage, pdgate = events[-1]["usage"], events[-1]["pdgate"]
    else:
        answer = asked.result().json()
        assert answer["choices"][0]["message"]["content"] == "naïve story"
        usage, pdgate = answer["usage"], answer["pdgate"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], pdgate["attempts"]) == (9, 4, 2)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.attempts, event.estimated) == (Outcome.FINISHED, 2, False)
    assert (event.tokens.prefill_computed, event.tokens.prefill_cached, event.tokens.decode) == (5, 4, 4)
    assert event.timings.decode_tokens == 4


async def test_late_tokens_of_the_lost_attempt_reach_nobody(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit, decode = await started(rig)
        await decode.tokens("one ")
        await accepted(rig, submit.rid)
        await rig.scheduler.lost(submit, retrying=False)  # the scheduler hears nothing of it, and neither do we
        assert isinstance(await rig.scheduler.next(), Continue)
        await eventually(lambda: rig.decode.aborts)
        await decode.tokens("late ")  # SIGCONT: it goes on where it stopped
        await rig.scheduler.placed(submit, decode=rig.decode, attempt=2)
        again = await rig.decode.open(submit.rid, Phase.UNIFIED, attempt=2)
        await decode.tokens("later ")
        await again.tokens("two")
        await again.finish(FinishReason.LENGTH, prompt=10, completion=1)
    assert asked.result().json()["choices"][0]["message"]["content"] == "one two"


async def test_what_a_frozen_worker_had_goes_on_as_soon_as_it_is_given_up(rig: Rig, monkeypatch):
    """It has been silent to us for as long as to the scheduler: another second of waiting would show nothing."""
    monkeypatch.setattr("gateway.generation.SILENT_S", 60.0)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit, decode = await started(rig)
        await decode.tokens("one ")
        await accepted(rig, submit.rid)
        rig.gateway.fleet._links["decode-0"]._heard_s -= 60.0
        await rig.scheduler.lost(submit, retrying=False)
        assert isinstance(await rig.scheduler.next(), Continue)
        await rig.scheduler.placed(submit, decode=rig.decode, attempt=2)
        again = await rig.decode.open(submit.rid, Phase.UNIFIED, attempt=2)
        await again.tokens("two")
        await again.finish(FinishReason.LENGTH, prompt=10, completion=1)
    assert asked.result().json()["choices"][0]["message"]["content"] == "one two"


async def test_an_answer_that_cannot_go_on_ends_with_one_error_and_costs_nothing(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json={**HELLO, "stream": True}))
        submit, decode = await started(rig)
        await decode.tokens("half")
        await accepted(rig, submit.rid)
        await decode.finish(FinishReason.ERROR)
        assert isinstance(await rig.scheduler.next(), Continue)
        await rig.scheduler.refused(submit, "interrupted", "with 'n' it cannot be continued")
    events = events_of(asked.result().text)
    assert events[0]["choices"][0]["delta"]["content"] == "half"
    assert events[-1]["error"]["code"] == "interrupted"
    assert len(events) == 2
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.cost, event.cause) == (Outcome.INTERRUPTED, 0, "worker_error")
    assert (event.tokens.prompt, event.tokens.decode) == (9, 1)  # our cost, kept
    assert event.slo_met is False


async def read_until(rig: Rig, may_leave: asyncio.Event) -> None:
    """Read a stream, and leave when told."""
    async with rig.client.stream("POST", "/v1/chat/completions", json={**HELLO, "stream": True}) as answer:
        lines = answer.aiter_lines()
        while "two" not in await anext(lines):
            pass
        await may_leave.wait()


async def test_a_client_that_leaves_between_two_attempts_pays_for_what_it_read(rig: Rig):
    may_leave = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read_until(rig, may_leave))
        submit, decode = await started(rig)
        await decode.tokens("one ", "two ")
        await accepted(rig, submit.rid)
        await decode.finish(FinishReason.ERROR)
        assert isinstance(await rig.scheduler.next(), Continue)
        may_leave.set()
        assert isinstance(await rig.scheduler.next(), Abort)
        await rig.scheduler.refused(submit, "interrupted", "aborted before placement")
    event = await rig.usage(submit.rid)
    assert event.outcome is Outcome.CLIENT_LEFT
    assert (event.tokens.prompt, event.tokens.decode, event.estimated) == (9, 2, True)


async def test_a_worker_that_comes_back_with_another_epoch_has_lost_its_requests(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await decode.tokens("half")
        await accepted(rig, submit.rid)
        rig.decode.epoch = 2
        await rig.register(rig.decode)
        assert (await rig.scheduler.next()).delivered_chars == (4,)
        await rig.scheduler.refused(submit, "interrupted", "no")
    assert asked.result().status_code == 500
    assert asked.result().json()["error"]["code"] == "interrupted"
    assert (await rig.usage(submit.rid)).cause == "worker_restarted"


async def test_a_ring_that_overflowed_is_continued_from_what_had_come(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await decode.tokens("half")
        await rig.decode.send(lost=True)
        entry = await rig.scheduler.next()
        assert (entry.delivered, entry.delivered_chars) == ((pack_ids([0]),), (4,))
        await rig.scheduler.refused(submit, "interrupted", "no")
    assert asked.result().status_code == 500
    assert (await rig.usage(submit.rid)).cause == "ring_overflow"


async def test_of_two_samples_only_the_one_that_was_cut_goes_on(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json={**HELLO, "n": 2, "temperature": 0}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        first, second = [await rig.decode.open(submit.rid, Phase.UNIFIED, sample=s) for s in (0, 1)]
        await first.tokens("whole")
        await first.finish(FinishReason.STOP, prompt=7, cached=3, completion=1)
        await second.tokens("ha")
        await second.finish(FinishReason.ERROR)
        entry = await rig.scheduler.next()
        assert (entry.done, entry.delivered_chars) == ((0,), (5, 2))
        await rig.scheduler.placed(submit, decode=rig.decode, attempt=2)
        again = await rig.decode.open(submit.rid, Phase.UNIFIED, attempt=2, sample=1)
        await again.tokens("lf")
        await again.finish(FinishReason.STOP, prompt=8, completion=1)
    answer = asked.result().json()
    assert [c["message"]["content"] for c in answer["choices"]] == ["whole", "half"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 3)
    event = await rig.usage(submit.rid)
    assert (event.tokens.prefill_computed, event.tokens.prefill_cached, event.tokens.decode) == (4, 3, 3)
