"""Legacy completions and tokens."""

import asyncio

import pytest
from gateway_rig import Rig, events_of, eventually

from contracts.lifecycle import FinishReason, Phase
from contracts.usage import Outcome
from contracts.wire import Submit, unpack_ids

ASK = {"model": "tiny", "prompt": "Say hello"}


async def play(rig: Rig, submit: Submit, *pieces: str, samples: int = 1) -> None:
    """Serve one request on a unified-like pair, each sample with the same pieces."""
    await rig.scheduler.placed(submit, decode=rig.decode)
    for sample in range(samples):
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED, sample=sample)
        for piece in pieces:
            await handle.tokens(piece)
        prompt = len(submit.prompt) // 4
        await handle.finish(FinishReason.LENGTH, prompt=prompt, completion=len(pieces))


async def complete(rig: Rig, *plays: tuple[str, ...], samples: int = 1, **body: object):
    """Ask for a completion; prompt i is answered by `plays[i]`."""
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/completions", json={**ASK, **body}))
        submits = [await rig.scheduler.submit() for _ in plays]
        for submit, pieces in zip(submits, plays, strict=True):
            await play(rig, submit, *pieces, samples=samples)
    return submits, asked.result()


async def test_a_completion_has_openais_legacy_form_and_sixteen_tokens_by_default(rig: Rig):
    (submit,), answer = await complete(rig, ("Hi", " there"))
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"] == f"cmpl-{submit.rid}"
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hi there", "finish_reason": "length", "logprobs": None}]
    assert body["usage"]["completion_tokens"] == 2
    assert submit.sampling.max_tokens == 16
    assert answer.headers["x-request-id"] == submit.rid


async def test_a_prompt_of_token_ids_reaches_the_worker_unchanged_and_text_gets_no_chat_template(rig: Rig):
    (by_ids,), answer = await complete(rig, ("x",), prompt=[5, 6, 7])
    assert answer.status_code == 200
    assert unpack_ids(by_ids.prompt) == [5, 6, 7]
    (by_text,), _ = await complete(rig, ("x",))
    tokens = (await rig.client.post("/v1/tokenize", json=ASK)).json()
    assert unpack_ids(by_text.prompt) == tokens["tokens"]
    back = await rig.client.post("/v1/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]})
    assert back.json() == {"prompt": "Say hello"}


async def test_echo_puts_the_prompt_before_each_choice(rig: Rig):
    _, answer = await complete(rig, ("!",), echo=True)
    assert answer.json()["choices"][0]["text"] == "Say hello!"
    _, streamed = await complete(rig, ("!", "?"), echo=True, stream=True)
    texts = [event["choices"][0]["text"] for event in events_of(streamed.text)[:-1]]
    assert texts == ["Say hello!", "?", ""]


async def test_many_prompts_are_many_requests_and_one_answer(rig: Rig):
    submits, answer = await complete(rig, ("a",), ("b", "b"), prompt=["one", [9, 10]], n=2, samples=2)
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer.json()["choices"]] == ["a", "a", "bb", "bb"]
    assert submits[0].rid != submits[1].rid
    events = [await rig.usage(submit.rid) for submit in submits]
    assert [event.tokens.decode for event in events] == [2, 4]
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["prompt_tokens"] == sum(event.tokens.prompt for event in events)
    assert answer.json()["pdgate"]["cost_nano"] == sum(event.cost for event in events)
    assert await rig.nothing_queued_or_reserved()


async def test_a_stream_of_many_prompts_has_one_usage_chunk_and_one_done(rig: Rig):
    _, answer = await complete(
        rig, ("a",), ("b",), prompt=["one", "two"], stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage, done = events_of(answer.text)
    assert done == "[DONE]"
    assert answer.text.count("[DONE]") == 1
    assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    by_choice = {i: [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i] for i in (0, 1)}
    assert ["".join(c["text"] for c in by_choice[i]) for i in (0, 1)] == ["a", "b"]
    assert [by_choice[i][-1]["finish_reason"] for i in (0, 1)] == ["length", "length"]


async def test_each_prompt_has_its_own_times(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/completions", json={**ASK, "prompt": ["one", "two"]}))
        first, second = await rig.scheduler.submit(), await rig.scheduler.submit()
        await play(rig, first, "a")
        early = await rig.usage(first.rid)
        await play(rig, second, "b")
    assert asked.result().status_code == 200
    late = await rig.usage(second.rid)
    assert early.timings is not None
    assert late.timings is not None
    assert late.timings.ttft_ms > early.timings.total_ms


async def test_when_one_prompt_fails_the_others_are_stopped_and_cost_nothing(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/completions", json={**ASK, "prompt": ["one", "two"]}))
        first, second = await rig.scheduler.submit(), await rig.scheduler.submit()
        await rig.scheduler.placed(first, decode=rig.decode)
        handle = await rig.decode.open(first.rid, Phase.UNIFIED)
        await handle.tokens("x")
        await rig.scheduler.refused(second, "no_capacity", "no room", 2.0)
    assert asked.result().status_code == 503
    await handle.finish(FinishReason.ABORTED, prompt=3, completion=1)
    stopped = await rig.usage(first.rid)
    assert (stopped.outcome, stopped.cause, stopped.cost) == (Outcome.INTERRUPTED, "sibling_failed", 0)


async def test_a_client_that_leaves_a_completion_of_many_prompts_stops_each(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/completions", json={**ASK, "prompt": ["one", "two"]}))
        submits = [await rig.scheduler.submit(), await rig.scheduler.submit()]
        handles = []
        for submit in submits:
            await rig.scheduler.placed(submit, decode=rig.decode)
            handles.append(await rig.decode.open(submit.rid, Phase.UNIFIED))
            await handles[-1].tokens("x")
        asked.cancel()
        # A placement that the gateway reads only now makes it say so once more.
        await eventually(lambda: len({abort.id.rid for abort in rig.decode.aborts}) == 2)
    for handle in handles:
        await handle.finish(FinishReason.ABORTED, prompt=3, completion=1)
    assert [(await rig.usage(submit.rid)).outcome for submit in submits] == [Outcome.CLIENT_LEFT] * 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt"),
        ({"prompt": [10_000_000]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": "contract " * 3000}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"logprobs": 6}, "logprobs"),
    ],
)
async def test_what_a_completion_cannot_do_is_refused_by_name(rig: Rig, body: dict[str, object], param: str):
    answer = await rig.client.post("/v1/completions", json={**ASK, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert await rig.nothing_queued_or_reserved()


async def test_an_over_long_prompt_is_a_400_that_says_context_length_exceeded(rig: Rig):
    answer = await rig.client.post("/v1/completions", json={**ASK, "prompt": list(range(100)) * 30})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_tokenize_renders_conversations_and_says_what_is_wrong(rig: Rig):
    messages = [{"role": "user", "content": "Hello"}]
    asked = {"model": "tiny", "messages": messages, "return_token_strs": True}
    answer = (await rig.client.post("/v1/tokenize", json=asked)).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["token_strs"][0] == "<|im_start|>"
    assert answer["max_model_len"] == 2048
    for wrong in ({"model": "tiny"}, {"model": "tiny", "prompt": "a", "messages": messages}):
        assert (await rig.client.post("/v1/tokenize", json=wrong)).status_code == 400
    assert (await rig.client.post("/v1/tokenize", json={"model": "none", "prompt": "a"})).status_code == 404
    beyond = await rig.client.post("/v1/detokenize", json={"model": "tiny", "tokens": [10_000_000]})
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "tokens")
    nobody = await rig.client.post("/v1/tokenize", json=ASK, headers={"authorization": "Bearer pdg_wrong"})
    assert nobody.status_code == 401


async def test_a_key_may_come_in_x_api_key(rig: Rig):
    del rig.client.headers["authorization"]
    answer = await rig.client.post("/v1/tokenize", json=ASK, headers={"x-api-key": rig.secret})
    assert answer.status_code == 200
