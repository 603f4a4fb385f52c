"""What Redis acknowledged and lost is settled again by the gateway that has it: once, and only if it was lost."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

from gateway_rig import eventually, silent_records
from redis.asyncio import Redis
from test_gateway_outage import RID, closed, reserve

from contracts import keys
from contracts.identity import shard_of
from contracts.resp import RespConnection
from gateway.journal import Journal
from gateway.settlement import Settlement
from gateway.unconfirmed import KEEP_S, Unconfirmed

USAGE = keys.usage_stream(shard_of("org_1"))


@asynccontextmanager
async def settling(redis_url: str, folder: Path):
    """A settlement loop, and a way to break its connection as a server that is killed does."""
    connection = RespConnection(redis_url, timeout_s=5)
    journal = Journal(folder, "gateway", max_bytes=100_000)
    settlement = Settlement(connection, journal, silent_records(), max_waiting=10)
    settlement.recover()
    breaker = RespConnection(redis_url, timeout_s=5)

    async def broken() -> None:
        await breaker.call("CLIENT", "KILL", "ID", await connection.call("CLIENT", "ID"))

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(settlement.run())
        yield settlement, broken
        running.cancel()
    settlement.close()
    breaker.close()


async def test_what_redis_lost_with_its_last_seconds_is_settled_again(redis: Redis, redis_url: str, tmp_path: Path):
    """The file ends before the reservation, before the settlement, or after both."""
    async with settling(redis_url, tmp_path) as (settlement, broken):
        await reserve(redis)
        settlement.offer(closed())
        await settlement.drain(10)
        assert await redis.xlen(USAGE) == 1
        await redis.flushall()
        await broken()
        await eventually(lambda: redis.xlen(USAGE))
        assert await redis.exists(keys.settled_request("org_1", RID))
        await redis.flushall()
        await reserve(redis)  # it came back, its settlement did not
        await broken()
        await eventually(lambda: redis.xlen(USAGE))
        assert not await redis.exists(keys.reservation("org_1", RID))
        assert await redis.zcard(keys.open_reservations("org_1")) == 0


async def test_what_redis_kept_is_not_settled_twice(redis: Redis, redis_url: str, tmp_path: Path):
    async with settling(redis_url, tmp_path) as (settlement, broken):
        await reserve(redis)
        settlement.offer(closed())
        await settlement.drain(10)
        other = "01a229bd-76e1-7cb4-8f6f-64bf51d2c09e"
        await redis.set(keys.inflight("tiny", RID), b"came back with an old file")
        await broken()
        settlement.offer(closed(other))  # settled over the new connection, and then what is unconfirmed
        await settlement.drain(10)
        await eventually(lambda: _is_gone(redis, keys.inflight("tiny", RID)))
        assert await redis.xlen(USAGE) == 2, "one event each"


async def _is_gone(redis: Redis, key: str) -> bool:
    return not await redis.exists(key)


def test_settlements_are_kept_for_some_seconds_and_in_order():
    now = [100.0]
    kept = Unconfirmed(now_s=lambda: now[0])
    first, second = closed(), closed("01a229bd-76e1-7cb4-8f6f-64bf51d2c09e", decode=9)
    kept.add([first])
    now[0] += KEEP_S / 2
    kept.add([second])
    kept.forget_old()
    assert list(kept.batches(1)) == [[first], [second]]
    now[0] += KEEP_S / 2 + 0.1
    kept.forget_old()
    assert list(kept.batches(10)) == [[second]]
    now[0] += KEEP_S
    kept.forget_old()
    assert len(kept) == 0
