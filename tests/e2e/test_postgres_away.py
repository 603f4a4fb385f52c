"""PostgreSQL is away while usage piles up in Redis: nothing is lost, and what piled up drains in bounded memory."""

import asyncio
import json
import os
import time
from collections.abc import Iterator

import asyncpg
import psutil
import pytest
from redis.asyncio import Redis

from contracts import keys
from contracts.identity import new_rid, shard_of
from contracts.lifecycle import HandOff, Path
from contracts.rating import Price, Tokens, cost
from contracts.resp import redis_client
from contracts.slo import Timings
from contracts.units import NanoPerMillion
from contracts.usage import Outcome, UsageEvent
from contracts.wire import FIELD, encode
from tests.e2e.kill_rig import Servers
from tests.e2e.ledger_view import ledger_is_balanced
from tests.processes import Stack, until

BACKLOG = int(os.environ.get("PDGATE_BACKLOG", "200000"))
ORGANISATIONS = 100
MOST_BYTES = 150 * 2**20  # of a consumer, as benches.billing holds it to
_PRICE = Price(
    version=1,
    model="tiny",
    prefill_computed=NanoPerMillion(100_000_000),
    prefill_cached=NanoPerMillion(20_000_000),
    decode=NanoPerMillion(400_000_000),
)  # the test catalogue's
_TOKENS = Tokens(prefill_computed=100, prefill_cached=30, decode=50)


def _events(number: int) -> Iterator[UsageEvent]:
    now_ms = int(time.time() * 1000)
    for i in range(number):
        org = f"org_{i % ORGANISATIONS}"
        yield UsageEvent(
            rid=new_rid(now_ms - i % 3_600_000), org=org, project=f"proj_{i % 7}", key_id=f"key_{i % 300}",
            model="tiny",
            pool="tiny", tier="default", outcome=Outcome.FINISHED, finish_reason="stop", tokens=_TOKENS, price=_PRICE,
            cost=cost(_TOKENS, _PRICE), path=Path.PD, hand_off=HandOff.DIRECT, prefill_worker="p", decode_worker="d",
            timings=Timings(ttft_ms=120, decode_ms=490, decode_tokens=50, total_ms=700), slo_met=True,
        )  # fmt: skip


async def _pile_up(redis: Redis, number: int) -> None:
    pipeline = redis.pipeline(transaction=False)
    for i, event in enumerate(_events(number), start=1):
        pipeline.xadd(keys.usage_stream(shard_of(event.org)), {FIELD: encode(event)})
        if i % 2_000 == 0 or i == number:
            await pipeline.execute()


@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_two_hundred_thousand_events_pile_up_while_postgres_is_away_and_drain_in_bounded_memory(
    killable: tuple[Stack, Servers],
) -> None:
    stack, servers = killable
    stack.start("billing")
    await until(lambda: "billing_started" in stack.log("billing"), 60)
    process = psutil.Process(stack.processes["billing"].pid)
    await asyncio.to_thread(servers.kill, "postgres")
    redis = redis_client(stack.redis_url)
    piled_s = time.monotonic()
    await _pile_up(redis, BACKLOG)
    at_rest = process.memory_info().rss
    assert process.is_running(), "billing gave up while Postgres was away"
    await asyncio.to_thread(servers.start, "postgres")
    back_s, most = time.monotonic(), at_rest
    database = await asyncpg.connect(stack.database_url)

    async def drained() -> bool:
        nonlocal most
        most = max(most, process.memory_info().rss)
        return bool(
            await database.fetchval("SELECT sum(requests) FROM billing.usage_hourly WHERE meter = 'decode'") == BACKLOG
        )

    await until(drained, 600, every_s=0.5)
    took_s = time.monotonic() - back_s
    row = {
        "backlog": BACKLOG,
        "away_s": round(back_s - piled_s, 1),
        "drained_s": round(took_s, 1),
        "requests_per_s": round(BACKLOG / took_s),
        "rss_mb_before": round(at_rest / 2**20, 1),
        "rss_mb_most": round(most / 2**20, 1),
    }
    print(json.dumps(row))  # noqa: T201 - `pytest -s` shows it
    assert most < MOST_BYTES
    spent = await database.fetchval("SELECT sum(cost) FROM billing.usage_hourly")
    assert spent == BACKLOG * cost(_TOKENS, _PRICE)
    assert await ledger_is_balanced(database)
    assert sum([await redis.xlen(keys.dead_letters(shard)) for shard in range(64)]) == 0
    assert sum([await redis.xlen(keys.usage_stream(shard)) for shard in range(64)]) == 0
    await database.close()
    await redis.aclose()
