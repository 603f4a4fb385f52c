"""Money while an answer runs: reserved for the usual length, extended before it is used up, never overspent."""

import asyncio
import json

import pytest
from gateway_rig import HELLO, Rig, events_of, eventually

from contracts import keys
from contracts.lifecycle import FinishReason, Phase
from contracts.usage import EMPTY_ANSWER, Outcome
from gateway.lengths import Lengths
from gateway.limits import Limits
from gateway.purse import MARGIN_TOKENS, allowance_of, first_payment

DECODE = 400  # nano-units a token, as the test catalogue has it
COMPUTED = 100


async def money_of(rig: Rig) -> tuple[int, int]:
    raw = await rig.redis.hgetall(keys.budget(rig.org.id, "org", rig.org.id))
    return int(raw.get(b"spent", 0)), int(raw.get(b"reserved", 0))


def learned(rig: Rig, tokens: int) -> None:
    for _ in range(20):
        rig.gateway.lengths.ended(rig.org.id, "tiny", tokens)


def test_a_few_answers_say_nothing_and_many_say_what_95_of_100_need():
    lengths = Lengths()
    for tokens in range(1, 20):
        lengths.ended("org_1", "tiny", tokens)
    assert lengths.likely("org_1", "tiny") is None
    for tokens in range(20, 101):
        lengths.ended("org_1", "tiny", tokens)
    assert lengths.likely("org_1", "tiny") == 92  # they are looked at every eighth time, last at 1..96
    assert lengths.likely("org_2", "tiny") is None


@pytest.mark.parametrize(
    ("max_tokens", "likely", "paid", "allowance"),
    [(4096, None, 4096, None), (4096, 100, 132, 100), (120, 100, 120, None), (4096, 3, 64, 32)],
)
def test_the_first_payment_covers_the_usual_length_and_a_margin(max_tokens, likely, paid, allowance):
    assert first_payment(max_tokens=max_tokens, likely_tokens=likely) == paid
    assert allowance_of(paid_tokens=paid, max_tokens=max_tokens) == allowance


async def test_money_is_reserved_for_the_usual_length_and_extended_while_the_answer_runs(rig: Rig):
    await rig.tenant(org_limits=Limits(budget_nano=10_000_000))
    learned(rig, 50)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json={**HELLO, "stream": True}))
        submit = await rig.scheduler.submit()
        prompt = len(submit.prompt) // 4
        assert await money_of(rig) == (0, prompt * COMPUTED + (50 + MARGIN_TOKENS) * DECODE)
        await rig.scheduler.placed(submit, decode=rig.decode)
        decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await decode.tokens(*["x"] * 51)

        async def extended() -> bool:
            paid_tokens = min(50 + MARGIN_TOKENS + 256, submit.sampling.max_tokens)
            return (await money_of(rig))[1] == prompt * COMPUTED + paid_tokens * DECODE

        await eventually(extended)
        await decode.tokens(*["x"] * 49)
        await decode.finish(FinishReason.STOP, prompt=prompt, completion=100)
    assert events_of(asked.result().text)[-1] == "[DONE]"
    event = await rig.usage(submit.rid)
    assert event.cost == prompt * COMPUTED + 100 * DECODE
    assert await money_of(rig) == (event.cost, 0)
    assert not await rig.redis.exists(keys.reservation_added(rig.org.id, submit.rid))


async def test_an_answer_that_no_budget_pays_further_ends_as_at_its_maximum_and_overspends_nothing(rig: Rig):
    budget = 8 * COMPUTED + 100 * DECODE + 3000
    await rig.tenant(org_limits=Limits(budget_nano=budget))
    learned(rig, 60)
    async with asyncio.TaskGroup() as tasks:
        # Several prompts' worth of money is there, not 2,000 tokens' worth.
        asked = tasks.create_task(
            rig.client.post("/v1/chat/completions", content=json.dumps({**HELLO, "max_tokens": 1500, "stream": True}))
        )
        submit = await rig.scheduler.submit()
        prompt = len(submit.prompt) // 4
        await rig.scheduler.placed(submit, decode=rig.decode)
        decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await decode.tokens(*["x"] * 61)
        await eventually(lambda: rig.decode.aborts)
        await decode.tokens("too late")  # made before the abort arrived; nobody sees it
        await decode.finish(FinishReason.ABORTED, prompt=prompt, completion=62)
    events = events_of(asked.result().text)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert "too late" not in asked.result().text
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.finish_reason, event.tokens.decode) == (Outcome.FINISHED, "length", 62)
    spent, reserved = await money_of(rig)
    assert (spent, reserved) == (prompt * COMPUTED + 62 * DECODE, 0)
    assert spent <= budget


async def test_an_empty_answer_costs_nothing(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(rig.client.post("/v1/chat/completions", json=HELLO))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        decode = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await decode.tokens("")
        await decode.finish(FinishReason.STOP, prompt=8, completion=1)
    body = asked.result().json()
    assert body["choices"][0]["message"]["content"] == ""
    assert (body["usage"]["completion_tokens"], body["pdgate"]["cost_nano"]) == (1, 0)
    event = await rig.usage(submit.rid)
    assert (event.outcome, event.cause, event.cost, event.billable) == (Outcome.FINISHED, EMPTY_ANSWER, 0, False)
    assert event.tokens.prompt == 8
