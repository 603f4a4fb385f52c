"""What billing holds about requests, for assertions."""

import re

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


def restored(log: str) -> set[str]:
    """Return the requests that a process says it settled since Redis had lost them."""
    lines = [line for line in log.splitlines() if "usage_restored" in line]
    return {rid for line in lines for rid in re.findall(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f-]{21}", line)}


async def ledger_is_balanced(database: asyncpg.Connection) -> bool:
    """Return whether every ledger transaction sums to zero and the whole equals the billable records."""
    unbalanced = await database.fetchval(
        "SELECT count(*) FROM (SELECT transaction_id FROM billing.ledger_entry"
        " GROUP BY transaction_id HAVING sum(amount) <> 0) AS t"
    )
    return bool(unbalanced == 0)


async def nothing_is_reserved(redis: Redis) -> bool:
    """Return whether no reservation, lease, inbox entry or in-flight record is left anywhere."""
    return not await what_is_reserved(redis)


async def what_is_reserved(redis: Redis) -> list[str]:
    """Return what is left of reservations, leases, inbox entries and in-flight records: keys and what they hold."""
    left = []
    for shard in range(NUM_SHARDS):
        name = keys.open_reservations_of_shard(shard)
        if members := await redis.zrange(name, 0, -1, withscores=True):
            left.append(f"{name}: {members}")
    async for key in redis.scan_iter(match="pdgate:*"):
        name = key.decode()
        if ":res:" in name or ":inflight:" in name:
            left.append(name)
        elif ":running:" in name and (members := await redis.zrange(key, 0, -1)):
            left.append(f"{name}: {members}")
        elif name.endswith(":inbox") and (entries := await redis.xrange(key)):
            left.append(f"{name}: {entries}")
    return left
