"""Clients that leave the real pair at random moments: slots, rooms and KV are back where they were."""

import asyncio
import random

import pytest

from contracts.lifecycle import FinishReason, Phase
from tests.workers.engine_client import client_of

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(600)]

CANCELS = 60
AT_ONCE = 6
GREEDY = {"temperature": 0.0, "max_tokens": 24}


async def test_random_cancels_leave_nothing_behind_on_the_real_pair(engines):
    dice = random.Random(7)
    async with client_of(engines) as client:
        reference = [await client.unified(prompt, **GREEDY) for prompt in engines.prompts]
        reasons: list[FinishReason] = []

        async def one() -> None:
            prompt = dice.choice(engines.prompts)
            late_s, sides = dice.choice((0.0, 0.0, 0.01, 0.05, 0.2, 0.6)), dice.choice(("both", "decode", "prefill"))
            attempt = await client.submit_pair(prompt, temperature=0.0, max_tokens=600, ignore_eos=True)
            await asyncio.sleep(late_s)  # the moment is what is tested
            if sides != "decode":
                await client.gateways["prefill"].abort(attempt)
            if sides != "prefill":
                await client.gateways["decode"].abort(attempt)
            await asyncio.sleep(dice.choice((0.0, 0.02)))
            for role in ("decode", "prefill"):  # a gateway tells both, one perhaps later
                await client.gateways[role].abort(attempt)
            decode = await client.gateways["decode"].answer(attempt, Phase.DECODE, within_s=60)
            await client.gateways["prefill"].answer(attempt, Phase.PREFILL, within_s=60)
            reasons.append(decode.reason)

        for _ in range(CANCELS // AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_ONCE):
                    tasks.create_task(one())
        statuses = [await client.idle(role) for role in ("prefill", "decode")]
        after = [await client.pair(prompt, **GREEDY) for prompt in engines.prompts]
    assert len(reasons) == CANCELS
    assert set(reasons) <= {FinishReason.ABORTED, FinishReason.HAND_OFF}
    for status in statuses:
        rooms = (status.num_prefill_bootstrap, status.num_prefill_inflight, status.num_decode_transfer)
        assert (*rooms, status.num_waiting_decode_memory) == (0, 0, 0, 0)
    assert [decode.text for _, decode in after] == [answer.text for answer in reference]
