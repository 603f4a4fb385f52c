"""The real SGLang sleeps and wakes. Without an accelerator it gives no memory back: calls and states are real."""

import asyncio

import pytest

from contracts.v1 import worker_pb2 as pb
from tests.engines import Engines
from tests.workers.engine_client import LEADER_EPOCH, client_of

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(840)]


async def test_real_workers_sleep_and_wake_and_say_the_same(engines: Engines):
    async with client_of(engines) as client:
        prompt = engines.prompts[0]
        unified = (await client.unified(prompt, temperature=0.0)).text
        _, pair = await client.pair(prompt, temperature=0.0)
        for role, leader in client.leaders.items():
            await client.idle(role)
            await leader.send(sleep=pb.Sleep(on=True, leader_epoch=LEADER_EPOCH))
        for leader in client.leaders.values():
            async with asyncio.timeout(60):
                await _state(leader, pb.WORKER_STATE_SLEEPING, 0)
        for leader in client.leaders.values():
            at = len(leader.reports)
            await leader.send(sleep=pb.Sleep(on=False, leader_epoch=LEADER_EPOCH))
            async with asyncio.timeout(60):
                await _state(leader, pb.WORKER_STATE_READY, at)
        again = await client.unified(prompt, temperature=0.0)
        assert again.text == unified
        assert again.finished.counts.cached_tokens == 0  # its cache went with its memory
        _, woken = await client.pair(prompt, temperature=0.0)
        assert woken.text == pair.text


async def _state(leader, state, after: int) -> None:
    def seen() -> bool:
        later = leader.reports[after:]
        return any(r.WhichOneof("report") == "status" and r.status.state == state for r in later)

    await leader.until(seen)
