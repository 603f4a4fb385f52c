"""Prompts computed ahead go where the requests that begin with them will be placed, one copy a worker."""

from rig import Rig, eventually

from contracts.lifecycle import FinishReason, Phase, Role
from contracts.prefix import BLOCK_TOKENS
from contracts.wire import Counts, pack_ids
from scheduler.policy.placement import Reason

PROMPT = pack_ids(range(8 * BLOCK_TOKENS + 1))
LONGER = PROMPT + pack_ids(range(900, 900 + 4 * BLOCK_TOKENS))


async def warmed(gateway, copies: int) -> list:
    requests = [await gateway.submit(prompt=PROMPT, max_tokens=1, warm_replica=number + 1) for number in range(copies)]
    for request in requests:
        await eventually(lambda r=request: r.placed and r.reason() is FinishReason.LENGTH)
        if request.placed[0].prefill is not None:
            await eventually(lambda r=request: (1, 0, Phase.PREFILL) in r.finished, "its other worker says so too")
    return requests


def prefilled_by(requests: list) -> list[str]:
    return [request.placed[0].prefill.worker_id for request in requests]


async def test_each_copy_goes_to_another_prefill_worker_and_no_token_is_counted(rig: Rig):
    givers = [await rig.worker(Role.PREFILL) for _ in range(3)]
    await rig.worker(Role.DECODE)
    await rig.worker(Role.UNIFIED)
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    first = await warmed(gateway, copies=2)
    assert {request.placed[0].reason for request in first} == {Reason.WARMED}
    assert len(set(prefilled_by(first))) == 2
    for request in first:
        assert not request.tokens, "nobody is told the one token"
        counts = {phase: f.counts for (_, _, phase), f in request.finished.items()}
        assert counts[Phase.DECODE].completion_tokens == 0
        assert counts[Phase.PREFILL].prompt_tokens == len(PROMPT) // 4
    again = await warmed(gateway, copies=2)
    assert set(prefilled_by(again)) == set(prefilled_by(first)), "what is warm stays where it is"
    assert all(
        f.counts.cached_tokens >= 8 * BLOCK_TOKENS - 1
        for request in again
        for (_, _, phase), f in request.finished.items()
        if phase is Phase.PREFILL
    )
    third = await warmed(gateway, copies=3)
    assert set(prefilled_by(third)) == {giver.worker_id for giver in givers}
    follower = await gateway.submit(prompt=LONGER, max_tokens=4)
    await eventually(lambda: follower.reason() is FinishReason.LENGTH)


async def test_a_copy_that_died_with_its_worker_is_made_again(rig: Rig):
    givers = [await rig.worker(Role.PREFILL) for _ in range(2)]
    await rig.worker(Role.DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    (first,) = prefilled_by(await warmed(gateway, copies=1))
    holder = next(giver for giver in givers if giver.worker_id == first)
    await holder.kill()
    await eventually(lambda: sum(w.ready for w in pool.registry.workers()) == 2)
    (second,) = await warmed(gateway, copies=1)
    assert prefilled_by([second]) != [first]
    prefill = next(f for (_, _, phase), f in second.finished.items() if phase is Phase.PREFILL)
    assert Counts(prompt_tokens=prefill.counts.prompt_tokens, cached_tokens=prefill.counts.cached_tokens) == Counts(
        prompt_tokens=len(PROMPT) // 4
    )


async def test_without_pairs_unified_workers_are_warmed(rig: Rig):
    workers = [await rig.worker(Role.UNIFIED) for _ in range(2)]
    gateway = await rig.gateway()
    await rig.leading(rig.scheduler())
    requests = await warmed(gateway, copies=2)
    assert {request.placed[0].decode.worker_id for request in requests} == {w.worker_id for w in workers}
    assert all(f.counts.completion_tokens == 0 for request in requests for f in request.finished.values())
