"""Batch work on unified workers gives way to whoever waits for an answer, and loses no token by it."""

import msgspec
from rig import SLOW_DECODE, Rig, eventually
from rig_gateway import OWNER

from contracts.lifecycle import FinishReason, Role
from contracts.slo import SloTarget
from scheduler.profile import PoolProfile

replace = msgspec.structs.replace
BATCH = replace(OWNER, org="org-batch", tier="batch")
PROFILE = PoolProfile(model="tiny", latency=SLOW_DECODE)


async def batch_lines(rig: Rig, gateway, number: int, **fields):
    lines = [await gateway.submit(owner=BATCH, batch=True, max_tokens=60, **fields) for _ in range(number)]
    await eventually(lambda: all(line.tokens.get((1, 0)) for line in lines), "every line runs")
    return lines


async def test_a_batch_line_leaves_for_an_interactive_request_and_keeps_its_tokens(rig: Rig):
    await rig.worker(Role.UNIFIED, SLOW_DECODE, max_running=2)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler(profile=PROFILE))
    first = (await batch_lines(rig, gateway, 1))[0]
    second = (await batch_lines(rig, gateway, 1))[0]
    chat = await gateway.submit(max_tokens=4)
    await eventually(lambda: second.lost, "the gateway hears that the younger line was sent away")
    await eventually(lambda: second.reason() is FinishReason.ABORTED, "its worker says so too, on a path of its own")
    assert first.reason() is None  # one was enough
    await eventually(lambda: chat.reason() is FinishReason.LENGTH)
    had = len(second.tokens[1, 0])
    assert 0 < had < 60
    await gateway.go_on(second, 1)
    await eventually(lambda: second.reason(attempt=2) is FinishReason.LENGTH)
    assert had + len(second.tokens[2, 0]) == 60
    assert first.reason() is FinishReason.LENGTH
    assert not first.lost


async def test_lines_yield_as_often_as_it_takes_and_are_not_counted_as_failed(rig: Rig):
    await rig.worker(Role.UNIFIED, SLOW_DECODE, max_running=1)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler(profile=PROFILE))
    line = (await batch_lines(rig, gateway, 1))[0]
    for attempt in range(1, 6):  # more often than a request may fail
        chat = await gateway.submit(max_tokens=2)
        await eventually(lambda chat=chat: chat.reason() is FinishReason.LENGTH)
        await eventually(lambda n=attempt: len(line.lost) == n)
        await gateway.go_on(line, attempt)
        await eventually(lambda n=attempt: line.tokens.get((n + 1, 0)), "it runs on")
    await eventually(lambda: line.reason(attempt=6) is FinishReason.LENGTH)
    assert sum(len(tokens) for tokens in line.tokens.values()) == 60
    assert not line.refused


async def test_a_line_that_could_not_go_on_and_a_request_that_others_serve_send_nobody_away(rig: Rig):
    await rig.worker(Role.UNIFIED, SLOW_DECODE, max_running=1)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler(profile=PROFILE))
    line = (await batch_lines(rig, gateway, 1, frequency_penalty=1.0))[0]
    chat = await gateway.submit(max_tokens=2)
    await eventually(lambda: chat.rid in pool.term.book and len(pool.term.waiting) == 1)
    await eventually(lambda: line.reason() is FinishReason.LENGTH)
    await eventually(lambda: chat.reason() is FinishReason.LENGTH)
    assert not line.lost
    await rig.pair(SLOW_DECODE)
    await rig.leading(pool)
    other = (await batch_lines(rig, gateway, 1))[0]
    chat = await gateway.submit(max_tokens=2)
    await eventually(lambda: chat.reason() is FinishReason.LENGTH)
    assert chat.placed[0].prefill is not None
    assert other.reason() is None


async def test_a_request_that_would_be_late_behind_a_batch_prompt_does_not_wait_for_it(rig: Rig):
    slow = replace(SLOW_DECODE, prefill=replace(SLOW_DECODE.prefill, per_token_ms=5.0))
    await rig.worker(Role.UNIFIED, slow)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler(profile=PoolProfile(model="tiny", latency=slow)))
    line = await gateway.submit(400, owner=BATCH, batch=True, max_tokens=8)  # a prompt of 2 s
    await eventually(lambda: line.placed)
    tight = replace(OWNER, slo=SloTarget(ttft_ms=1000))
    chat = await gateway.submit(16, owner=tight, max_tokens=2)
    await eventually(lambda: chat.reason() is FinishReason.LENGTH)
    assert len(pool.term.book) == 2
    assert line.lost
    assert line.reason() is FinishReason.ABORTED
    await gateway.start_again(line, 1)
    await eventually(lambda: line.reason(attempt=2) is FinishReason.LENGTH)
