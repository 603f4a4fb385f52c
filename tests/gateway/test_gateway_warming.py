"""A prompt is computed ahead: as many copies as workers, each metered as prefill only."""

import asyncio

from gateway_rig import Rig

from contracts.lifecycle import FinishReason, Phase

SYSTEM = {"model": "tiny", "messages": [{"role": "system", "content": "You answer in one word."}]}


async def warm(rig: Rig, *, copies: int, prompt: int, cached: int, **body: object):
    """Ask for a warm prefix and serve every copy; return the submits and the answer."""
    submits = []
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/prefixes/warm", json={**SYSTEM, **body}))
        for _ in range(copies):
            submit = await rig.scheduler.submit()
            submits.append(submit)
            await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
            part = await rig.prefill.open(submit.rid, Phase.PREFILL)
            await part.finish(FinishReason.STOP, prompt=prompt, cached=cached)
            # What a worker says of a prompt without an answer: no token, and none counted.
            await (await rig.decode.open(submit.rid, Phase.DECODE)).finish(FinishReason.LENGTH)
    return submits, asked.result()


async def test_a_warm_prompt_is_billed_as_prefill_only(rig: Rig):
    (submit,), answer = await warm(rig, copies=1, prompt=20, cached=8)
    assert answer.status_code == 200, answer.text
    assert (submit.warm_replica, submit.sampling.max_tokens) == (1, 1)
    assert submit.owner.slo.ttft_ms is None, "nobody waits for it"
    usage = await rig.usage(submit.rid)
    assert (usage.tokens.prefill_computed, usage.tokens.prefill_cached, usage.tokens.decode) == (12, 8, 0)
    assert usage.billable
    assert usage.slo_met is None
    assert usage.cost == 12 * 100 + 8 * 20  # nano-units a token, from the catalogue's prices
    told = answer.json()
    assert (told["object"], told["replicas"]) == ("prefix.warmed", 1)
    assert told["usage"]["completion_tokens"] == 0
    assert told["pdgate"]["cost_nano"] == usage.cost


async def test_no_more_copies_are_made_than_workers_compute_prompts(rig: Rig):
    submits, answer = await warm(rig, copies=1, prompt=30, cached=0, replicas=8)
    assert [one.warm_replica for one in submits] == [1]
    assert answer.json()["replicas"] == 1


async def test_a_warm_prompt_begins_as_the_chat_that_follows(rig: Rig):
    (ahead,), _ = await warm(rig, copies=1, prompt=30, cached=0)
    body = {**SYSTEM, "messages": [*SYSTEM["messages"], {"role": "user", "content": "Hi"}], "max_tokens": 1}
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=body))
        submit = await rig.scheduler.submit()
        await rig.scheduler.refused(submit, "no_capacity", "enough seen")
    assert asked.result().status_code == 503
    shared = next(
        (i for i, (a, b) in enumerate(zip(ahead.prompt, submit.prompt, strict=False)) if a != b), len(ahead.prompt)
    )
    # All but the head of the answer, which the template puts behind whatever it was given.
    assert shared // 4 >= len(ahead.prompt) // 4 - 8
    assert ahead.cache_salt == submit.cache_salt


async def test_a_warm_prompt_needs_messages_or_text_and_not_both(rig: Rig):
    for body in ({"model": "tiny"}, {**SYSTEM, "prompt": "x"}):
        answer = await rig.client.post("/v1/prefixes/warm", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
