"""The real SGLang evicts by worth: a prompt that was computed ahead is there when others have filled the cache."""

import pytest

from contracts.wire import counts_from_pb
from tests.workers.engine_client import client_of
from workers.engines.sglang_options import CPU_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(600)]

SYSTEM = [50 + 3 * i % 1000 for i in range(400)]
FLOOD = [[2000 + 7 * number + i % 900 for i in range(1000)] for number in range(CPU_TOKENS // 1000 + 4)]
ONE = {"temperature": 0.0, "max_tokens": 1}


@pytest.mark.parametrize("warmed", [True, False])
async def test_only_what_was_computed_ahead_outlives_a_cache_full_of_other_prompts(engines, warmed: bool):
    salt = f"flooded-{warmed}"
    async with client_of(engines) as client:
        first = await client.unified(SYSTEM, cache_salt=salt, prompt_only=warmed, **ONE)
        again = await client.unified([*SYSTEM, 7], cache_salt=salt, **ONE)
        for prompt in FLOOD:
            await client.unified(prompt, cache_salt=salt, **ONE)
        last = await client.unified([*SYSTEM, 8], cache_salt=salt, **ONE)
    assert counts_from_pb(first.finished.counts).cached_tokens == 0
    assert counts_from_pb(again.finished.counts).cached_tokens == len(SYSTEM)
    assert counts_from_pb(last.finished.counts).cached_tokens == (len(SYSTEM) if warmed else 0)
