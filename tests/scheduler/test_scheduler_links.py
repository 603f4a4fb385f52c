"""A link that fails or is slow takes no traffic, requests go another way and say why, and it comes back by probe."""

import msgspec
import pytest
from rig import FAST, Rig, eventually

from contracts.lifecycle import FinishReason, HandOff, Path, Role
from contracts.perf import TransferCost
from contracts.wire import unpack_ids
from scheduler.policy.links import Breach, HandedOver, LinkLimits, breach
from scheduler.policy.placement import Reason
from workers.engines.faults import LOSE_HAND_OFF
from workers.engines.timed_store import TimedStore
from workers.engines.timed_text import expected_text

SLOW_LINK = msgspec.structs.replace(FAST, transfer=TransferCost(fixed_ms=400.0, bytes_per_ms=1e6, kv_bytes_per_token=1))
LIMITS = LinkLimits()


def good(ms: float = 5.0, expected_ms: float = 5.0) -> HandedOver:
    return HandedOver(ok=True, ms=ms, expected_ms=expected_ms)


BAD = HandedOver(ok=False)


@pytest.mark.parametrize(
    ("seen", "over"),
    [
        ([], None),
        ([BAD, BAD, BAD], None),  # too few to judge: one failure alone has the link probed
        ([BAD, BAD, good(), good()], Breach.ERRORS),
        ([BAD, good(), good(), good()], None),  # a quarter is within the budget
        ([good(999.0)] * 8, None),  # short ones are the machine's doing
        ([good(1001.0)] * 5 + [good()] * 3, Breach.LATENCY),
        ([good(1001.0)] * 4 + [good()] * 4, None),
        ([good(4000.0, 500.0)] * 8, None),  # long prompts take long
        ([BAD] * 10 + [good()] * 32, None),  # forgotten
    ],
)
def test_a_link_is_judged_by_its_last_hand_offs(seen: list[HandedOver], over: Breach | None):
    assert breach(seen, LIMITS) is over


def whole(requests: list) -> bool:
    return all(r.reason(attempt=len(r.placed)) is FinishReason.LENGTH for r in requests)


async def through(rig: Rig, gateway, number: int) -> list:
    requests = [await gateway.submit(100, max_tokens=4) for _ in range(number)]
    await eventually(lambda: whole(requests))
    return requests


def tighten(pool, **limits) -> None:
    pool.term.attempts._links._limits = LinkLimits(**{"pause_first_s": 0.3, **limits})


@pytest.mark.parametrize("spare", ["store", "unified"])
async def test_a_slow_link_is_left_for_the_store_or_a_unified_worker_and_taken_again(rig: Rig, spare: str):
    facts = {"store": TimedStore("tiny-r1")} if spare == "store" else {}
    prefill = await rig.worker(Role.PREFILL, SLOW_LINK, probes=True, **facts)
    await rig.worker(Role.DECODE, probes=True, **facts)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    await eventually(lambda: not pool.registry.pairs.barred)
    tighten(pool, latency_least_ms=100.0, latency_factor=0.0, pause_first_s=600.0)
    pair = next(iter(pool.registry.pairs))
    for _ in range(100):
        if pool.registry.pairs.over_budget:
            break
        slow = [await gateway.submit(100, max_tokens=4) for _ in range(2)]
        # One that comes when the link is given up waits for the spare.
        await eventually(lambda: pool.registry.pairs.over_budget or whole(slow))  # noqa: B023 - awaited at once
    assert pool.registry.pairs.over_budget
    if spare == "unified":
        await rig.worker(Role.UNIFIED)
    others = await through(rig, gateway, 3)
    assert {r.placed[0].reason for r in others} == {Reason.LINK_DOWN}
    if spare == "store":
        assert {(r.placed[0].path, r.placed[0].hand_off) for r in others} == {(Path.PD, HandOff.STORE)}
    else:
        assert {(r.placed[0].path, r.placed[0].hand_off) for r in others} == {(Path.FALLBACK, None)}
    for request in others:
        assert request.texts[1, 0] == expected_text(unpack_ids(request.submit.prompt), 4)
    prefill.engine._latency = FAST  # the link is well again
    pair.due_s = 0.0  # its pause is over
    await eventually(lambda: not pool.registry.pairs.barred)
    # Good ends are told with the next status; until then the unified worker counts as busy.
    await eventually(lambda: all(w.num_requests == 0 for w in pool.registry.workers()), "they have told that all ended")
    again = await through(rig, gateway, 1)
    assert again[0].placed[0].reason == (Reason.LEAST_LOADED_PAIR if spare == "store" else Reason.SHORT_PROMPT)


async def test_a_link_that_fails_again_and_again_is_tried_less_and_less(rig: Rig):
    prefill = await rig.worker(Role.PREFILL, probes=True, hand_off_timeout_s=0.1)
    decode = await rig.worker(Role.DECODE, probes=True, hand_off_timeout_s=0.1)
    pool = await rig.leading(rig.scheduler())
    await eventually(lambda: not pool.registry.pairs.barred)
    links, pair = pool.term.attempts._links, next(iter(pool.registry.pairs))
    tighten(pool, pause_first_s=100.0, pause_last_s=300.0)
    prefill.faults.on.add(LOSE_HAND_OFF)
    decode.faults.on.add(LOSE_HAND_OFF)
    pauses = []
    for _ in range(3):
        for _ in range(4):
            links.failed(pair.prefill, pair.decode, "test")
        pauses.append(round((pair.due_s - links._now_s()) / 100))
        pair.state = pair.state.__class__.OPEN  # a probe went through
    assert pauses == [1, 2, 3]
    assert pool.registry.pairs.over_budget
