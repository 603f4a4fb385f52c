"""Streaming chat completions: framing, usage, ends and the settlement that follows."""

import asyncio
import gc

from gateway_rig import HELLO, Rig, events_of, eventually, placed_on

from contracts.lifecycle import FinishReason, HandOff, Path, Phase
from contracts.rating import Tokens, cost
from contracts.usage import Outcome
from gateway.generation import Generation
from gateway.slots import Slot


async def serve(rig: Rig, *pieces: str, completion: int | None = None, cached: int = 0) -> str:
    """Play scheduler and workers for one request and return its id."""
    submit = await rig.scheduler.submit()
    await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
    prefill = await rig.prefill.open(submit.rid, Phase.PREFILL)
    prompt = len(submit.prompt) // 4
    await prefill.finish(FinishReason.STOP, prompt=prompt, cached=cached)
    decode = await rig.decode.open(submit.rid, Phase.DECODE)
    for piece in pieces:
        await decode.tokens(piece)
    await decode.finish(FinishReason.STOP, completion=len(pieces) if completion is None else completion)
    return submit.rid


async def stream(rig: Rig, **body: object) -> tuple[int, list[object], dict[str, str]]:
    answer = await rig.client.post("/v1/chat/completions", json={**HELLO, "stream": True, **body})
    return answer.status_code, events_of(answer.text), dict(answer.headers)


async def test_a_stream_is_openai_chunks_ending_in_done(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(stream(rig))
        rid = await serve(rig, "The ", 'quick "fox"', "\n☃")
    status, events, headers = asked.result()
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-request-id"] == rid
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert all(chunk["id"] == f"chatcmpl-{rid}" and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["The ", 'quick "fox"', "\n☃", None]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "role" not in chunks[1]["choices"][0]["delta"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all("usage" not in chunk and "pdgate" not in chunk for chunk in chunks)


async def test_a_short_answer_needs_no_notice_but_the_one_that_its_tokens_bring(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(stream(rig))
        submit = await rig.scheduler.submit()
        notice = placed_on(submit, decode=rig.decode, prefill=rig.prefill, queued_ms=0.25)
        prefill = await rig.prefill.open(submit.rid, Phase.PREFILL)
        await prefill.finish(FinishReason.STOP, prompt=len(submit.prompt) // 4)
        decode = await rig.decode.open(submit.rid, Phase.DECODE, placed=notice)
        await decode.tokens("a")
        await decode.finish(FinishReason.LENGTH, completion=1)
    status, events, headers = asked.result()
    assert (status, events[-1], headers["x-pdgate-path"]) == (200, "[DONE]", "pd")
    event = await rig.usage(submit.rid)
    assert (event.path, event.prefill_worker, event.decode_worker) == (Path.PD, "prefill-0", "decode-0")
    assert event.timings.queue_ms == 0.25


async def test_usage_comes_last_when_asked_and_equals_what_is_settled(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(stream(rig, stream_options={"include_usage": True}))
        rid = await serve(rig, "a", "b", completion=3, cached=4)
    _, events, _ = asked.result()
    *others, last, done = events
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    event = await rig.usage(rid)
    assert event.outcome is Outcome.FINISHED
    prompt = event.tokens.prompt
    assert event.tokens == Tokens(prefill_computed=prompt - 4, prefill_cached=4, decode=3)
    assert last["usage"]["prompt_tokens"] == prompt
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["total_tokens"] == prompt + 3
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    # 0.10, 0.02 and 0.40 EUR per million tokens are 100, 20 and 400 nano-units a token.
    assert last["pdgate"]["cost_nano"] == event.cost == (prompt - 4) * 100 + 4 * 20 + 3 * 400
    assert event.cost == cost(event.tokens, event.price)
    assert last["pdgate"] == {
        "rid": rid,
        "path": "pd",
        "hand_off": "direct",
        "attempts": 1,
        "cached_tokens": 4,
        "cost": last["pdgate"]["cost"],
        "cost_nano": event.cost,
        "currency": "EUR",
        "simulated": True,
    }


async def test_the_settled_event_says_how_the_request_was_served(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream(rig))
        rid = await serve(rig, "a", "b")
    event = await rig.usage(rid)
    assert (event.org, event.project, event.key_id) == (rig.org.id, rig.project.id, rig.key.id)
    assert (event.path, event.hand_off, event.attempts) == (Path.PD, HandOff.DIRECT, 1)
    assert (event.prefill_worker, event.decode_worker) == ("prefill-0", "decode-0")
    assert event.finish_reason == "stop"
    assert not event.estimated
    assert event.simulated
    assert event.timings is not None
    assert event.slo_met is True
    (outcome,) = await rig.outcomes()
    assert (outcome.rid, outcome.outcome, outcome.completion_tokens) == (rid, "finished", 2)
    assert await rig.nothing_queued_or_reserved()


async def test_the_batch_with_the_end_is_acknowledged_at_once(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream(rig))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        await (await rig.prefill.open(submit.rid, Phase.PREFILL)).finish(FinishReason.STOP, prompt=5)
        decode = await rig.decode.open(submit.rid, Phase.DECODE)
        await decode.tokens("x")
        seq = await decode.finish(FinishReason.LENGTH, completion=1)
        await eventually(lambda: rig.decode.acked >= seq)


async def test_each_sample_has_its_own_chunks_and_decode_is_their_sum(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(stream(rig, n=2))
        submit = await rig.scheduler.submit()
        assert submit.num_samples == 2
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        for sample in (0, 1):
            prefill = await rig.prefill.open(submit.rid, Phase.PREFILL, sample=sample)
            await prefill.finish(FinishReason.STOP, prompt=10, cached=8 * sample)
        one = await rig.decode.open(submit.rid, Phase.DECODE, sample=0)
        two = await rig.decode.open(submit.rid, Phase.DECODE, sample=1)
        await one.tokens("one")
        await two.tokens("two")
        await two.finish(FinishReason.LENGTH, completion=4)
        await one.finish(FinishReason.STOP, completion=3)
    _, events, _ = asked.result()
    texts = {0: "", 1: ""}
    for chunk in events[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "one", 1: "two"}
    event = await rig.usage(submit.rid)
    assert event.tokens == Tokens(prefill_computed=10, prefill_cached=0, decode=7)  # the prompt counts once


async def test_prompt_meters_come_from_the_prefill_side_even_when_it_reports_late(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(stream(rig, stream_options={"include_usage": True}))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        decode = await rig.decode.open(submit.rid, Phase.DECODE)
        await decode.tokens("x")
        seq = await decode.finish(FinishReason.STOP, prompt=99, completion=1)
        await eventually(lambda: rig.decode.acked >= seq)
        prefill = await rig.prefill.open(submit.rid, Phase.PREFILL)
        await prefill.finish(FinishReason.STOP, prompt=7, cached=2)
    _, events, _ = asked.result()
    assert events[-2]["usage"]["prompt_tokens"] == 7
    event = await rig.usage(submit.rid)
    assert event.tokens == Tokens(prefill_computed=5, prefill_cached=2, decode=1)
    assert not event.estimated


async def test_without_the_prefill_sides_counts_the_event_is_marked_as_estimated(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(stream(rig))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
        decode = await rig.decode.open(submit.rid, Phase.DECODE)
        await decode.tokens("x")
        await decode.finish(FinishReason.STOP, prompt=9, completion=1)
    assert asked.result()[1][-1] == "[DONE]"
    event = await rig.usage(submit.rid)
    assert event.estimated
    assert event.tokens == Tokens(prefill_computed=9, prefill_cached=0, decode=1)


async def test_tokens_may_come_before_the_notice_of_their_placement(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(stream(rig))
        submit = await rig.scheduler.submit()
        decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await decode.tokens("early")
        await decode.finish(FinishReason.STOP, prompt=5, completion=1)
        await rig.scheduler.placed(submit, decode=rig.decode)
    assert asked.result()[1][0]["choices"][0]["delta"]["content"] == "early"
    assert (await rig.usage(submit.rid)).path is Path.UNIFIED


async def test_a_batch_that_is_replayed_after_a_reconnect_is_not_written_twice(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(stream(rig))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await decode.tokens("once ")
        await eventually(lambda: rig.gateway.table.find(submit.rid).accepted)
        port = int(rig.decode.address.rpartition(":")[2])
        await rig.decode.stop()
        await decode.tokens("and ")
        await rig.decode.start(port)
        await decode.tokens("again")
        await decode.finish(FinishReason.STOP, prompt=5, completion=3)
    texts = [event["choices"][0]["delta"].get("content", "") for event in asked.result()[1][:-1]]
    assert "".join(texts) == "once and again"
    assert rig.decode.hellos[-1].last_seq > 0


async def test_a_settled_answer_leaves_nothing_to_the_garbage_collector(rig: Rig):
    """A circle lives until a collection, which requests that come then wait for."""

    def left() -> list[object]:
        return [it for it in gc.get_objects() if isinstance(it, Generation | Slot)]

    gc.collect()
    before = len(left())
    gc.disable()
    try:
        for _ in range(2):
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(stream(rig))
                rid = await serve(rig, "a", "b")
            assert asked.result()[0] == 200
            await rig.usage(rid)
            del asked
        await eventually(lambda: len(left()) <= before)
    finally:
        gc.enable()
