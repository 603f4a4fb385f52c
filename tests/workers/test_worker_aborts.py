"""Cancels in every state, on both sides: everything is free afterwards, and nothing computes for nobody."""

import asyncio
import random

from contracts.lifecycle import FinishReason, Phase
from tests.workers.peers import Pair, Worker, new_attempt, prompt_of, timed_pair, unified_bench

NUM_CANCELS = 1000
WAVE = 100


def assert_idle(worker: Worker) -> None:
    """Slots, rooms and KV are back where they began."""
    engine = worker.engine
    assert len(worker.server.assignments) == 0
    assert (engine._requests, engine._rooms, engine._asks, engine._fetching) == ({}, {}, {}, {})
    assert (list(engine._waiting), list(engine._prompts), engine._running) == ([], [], [])
    assert engine._kv_used == 0
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_transfers, load.kv_used_tokens) == (0, 0, 0, 0)


async def cancel_soon(pair: Pair, dice: random.Random) -> None:
    """Submit a request and cancel it after some steps, on both sides or by one of them first."""
    attempt = await pair.submit(prompt_of(dice.randrange(8, 60)), max_tokens=400)
    steps = pair.decode.engine.num_steps + dice.choice([0, 0, 1, 3, 8, 20])
    for _ in range(dice.randrange(0, 12)):
        if pair.decode.engine.num_steps >= steps:
            break
        await asyncio.sleep(0.001)
    sides = [pair.prefill_gateway, pair.decode_gateway]
    dice.shuffle(sides)
    for side in sides:
        await side.abort(attempt, all_samples=True)
    answer = await pair.decode_gateway.answer(attempt, Phase.DECODE)
    await pair.prefill_gateway.answer(attempt, Phase.PREFILL)
    assert answer.reason in (FinishReason.ABORTED, FinishReason.HAND_OFF)
    assert answer.finished.counts.completion_tokens == len(answer.ids)


async def test_a_thousand_random_cancels_leave_nothing_behind():
    dice = random.Random(20)
    async with timed_pair() as pair:
        for _ in range(NUM_CANCELS // WAVE):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(WAVE):
                    tasks.create_task(cancel_soon(pair, dice))
        async with asyncio.timeout(20):
            while pair.prefill.engine._requests or pair.prefill.engine._asks:  # noqa: ASYNC110 - frames on their way
                await asyncio.sleep(0.005)
        for worker in (pair.prefill, pair.decode):
            assert_idle(worker)
        attempt = await pair.submit(prompt_of(20))
        answer = await pair.decode_gateway.answer(attempt, Phase.DECODE)
    assert answer.reason is FinishReason.LENGTH


async def test_at_most_one_more_step_is_computed_once_the_leave_has_reached_the_worker():
    async with unified_bench() as bench:
        engine, assignments = bench.worker.engine, bench.worker.server.assignments
        at_abort: list[int] = []
        abort = assignments.abort

        def noted(*args, **kwargs):
            at_abort.append(engine.num_steps)
            abort(*args, **kwargs)

        assignments.abort = noted
        attempt = await bench.submit(prompt_of(20), max_tokens=5000)
        await bench.gateway.until(lambda: len(bench.gateway.batches) >= 3)
        await bench.gateway.abort(attempt)
        answer = await bench.gateway.answer(attempt)
        other = await bench.submit(prompt_of(20), max_tokens=1)  # steps go on for others
        await bench.gateway.answer(other)
        tokens_after = answer.finished.counts.completion_tokens - at_abort[0]
    assert answer.reason is FinishReason.ABORTED
    assert tokens_after <= 1
    assert engine.num_steps - at_abort[0] <= 1 + 2  # one of ours at most, and two of the other request


async def test_an_abort_before_its_submit_is_not_forgotten():
    async with unified_bench() as bench:
        attempt = new_attempt()
        await bench.gateway.abort(attempt)
        await asyncio.sleep(0)
        seen = len(bench.leader.of("status"))
        await bench.leader.next_of("status", lambda s: bench.leader.of("status").index(s) > seen)
        await bench.submit(prompt_of(20), attempt=attempt, max_tokens=5000)
        final = await bench.leader.final(attempt)
        assert final.counts.completion_tokens == 0
        assert_idle(bench.worker)
