"""What billing holds about requests, for assertions."""

import asyncpg
from redis.asyncio import Redis

from contracts import keys
from contracts.identity import NUM_SHARDS

METERS = ("prefill_computed", "prefill_cached", "decode")


async def meters_of(database: asyncpg.Connection, rid: str) -> dict[str, int]:
    """Return meter -> tokens of one request; fails when a meter has more than one row."""
    rows = await database.fetch("SELECT meter, tokens FROM billing.usage_record WHERE request_id = $1::uuid", rid)
    assert len(rows) == len({row["meter"] for row in rows}), f"{rid} has a meter twice"
    return {row["meter"]: row["tokens"] for row in rows}


async def request_row(database: asyncpg.Connection, rid: str) -> asyncpg.Record | None:
    """Return the row of one request."""
    return await database.fetchrow("SELECT * FROM billing.request WHERE request_id = $1::uuid", rid)


async def requests(database: asyncpg.Connection) -> dict[str, asyncpg.Record]:
    """Return all request rows by rid; fails when one is there twice."""
    rows = await database.fetch("SELECT * FROM billing.request")
    found = {str(row["request_id"]): row for row in rows}
    assert len(found) == len(rows)
    return found


async def ledger_is_balanced(database: asyncpg.Connection) -> bool:
    """Return whether every ledger transaction sums to zero and the whole equals the billable records."""
    unbalanced = await database.fetchval(
        "SELECT count(*) FROM (SELECT transaction_id FROM billing.ledger_entry"
        " GROUP BY transaction_id HAVING sum(amount) <> 0) AS t"
    )
    return bool(unbalanced == 0)


async def nothing_is_reserved(redis: Redis) -> bool:
    """Return whether no reservation, lease, inbox entry or in-flight record is left anywhere."""
    for shard in range(NUM_SHARDS):
        if await redis.zcard(keys.open_reservations_of_shard(shard)):
            return False
    async for key in redis.scan_iter(match="pdgate:*"):
        name = key.decode()
        if ":res:" in name or ":inflight:" in name:
            return False
        if ":running:" in name and await redis.zcard(key):
            return False
        if name.endswith(":inbox") and await redis.xlen(key):
            return False
    return True
