"""Prompts that were computed ahead stay in the cache longer than what nobody asked to keep, within a bound."""

import msgspec

from contracts.identity import new_rid
from contracts.lifecycle import Phase
from contracts.wire import Attempt, Sampling, counts_from_pb, pack_ids
from tests.workers.peers import FAST, unified_bench
from workers.engine import Job
from workers.pins import ORDINARY, WARMED, Pins

SMALL = msgspec.structs.replace(FAST, kv_capacity_tokens=512)
SYSTEM = list(range(1000, 1064))  # four full pages, the last of which is computed in part


def job(first: int, num_tokens: int = 100, **changes) -> Job:
    values = {
        "attempt": Attempt(new_rid(0), 1),
        "phase": Phase.UNIFIED,
        "gateway_id": "gw",
        "deadline_unix_ms": 0,
        "prompt": pack_ids(range(first, first + num_tokens)),
        "sampling": Sampling(max_tokens=1),
        "prompt_only": True,
    }
    return Job(**{**values, **changes})


def test_half_of_the_cache_may_be_warmed_and_the_same_prompt_counts_once():
    pins = Pins(500)
    assert pins.value_of(job(0, prompt_only=False)) == ORDINARY
    assert [pins.value_of(job(0)), pins.value_of(job(0)), pins.value_of(job(200))] == [WARMED] * 3
    assert pins.value_of(job(400)) == ORDINARY  # 300 of 250 tokens
    assert pins.value_of(job(400, num_tokens=50)) == WARMED
    assert pins.value_of(job(0, cache_salt="another tenant")) == ORDINARY
    pins.clear()
    assert pins.value_of(job(400)) == WARMED


async def cached_after_a_flood(*, warmed: bool) -> int:
    async with unified_bench(SMALL) as bench:
        await bench.gateway.answer(await bench.submit(SYSTEM, prompt_only=warmed, max_tokens=1))
        for first in range(2000, 2800, 100):  # 800 tokens go through 512
            await bench.gateway.answer(await bench.submit(list(range(first, first + 100)), max_tokens=1))
        answer = await bench.gateway.answer(await bench.submit([*SYSTEM, 1, 2], max_tokens=1))
    return counts_from_pb(answer.finished.counts).cached_tokens


async def test_a_warmed_prompt_outlives_a_flood_of_others_and_an_ordinary_one_does_not():
    assert await cached_after_a_flood(warmed=True) == 64
    assert await cached_after_a_flood(warmed=False) == 0


async def test_what_was_warmed_gives_way_to_running_requests():
    """The KV of a request that runs is worth more than any cache."""
    async with unified_bench(SMALL) as bench:
        await bench.gateway.answer(await bench.submit(SYSTEM, prompt_only=True, max_tokens=1))
        large = await bench.gateway.answer(await bench.submit(list(range(3000, 3480)), max_tokens=4))
        answer = await bench.gateway.answer(await bench.submit([*SYSTEM, 1, 2], max_tokens=1))
    assert len(large.ids) == 4
    assert counts_from_pb(answer.finished.counts).cached_tokens < 64
