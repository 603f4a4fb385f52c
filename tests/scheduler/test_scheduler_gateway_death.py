"""The scheduler settles for gateways that died, by the same script as theirs."""

import math
import time

import msgspec
from rig import SLOW_DECODE, SLOW_PREFILL, TIMING, Rig, eventually
from rig_gateway import OWNER, POOL, GatewayRequest, RigGateway

from contracts import keys
from contracts.identity import shard_of
from contracts.lifecycle import FinishReason, Path, Role
from contracts.rating import Tokens, cost
from contracts.settlement import (
    METER_GENERATED,
    Budget,
    Lease,
    Rate,
    Reservation,
    Reserved,
    SettlementScripts,
    encode_owner,
    usage_event_of,
)
from contracts.usage import Outcome, UsageEvent
from contracts.wire import FIELD

BUCKET = keys.rate_bucket(OWNER.org, "org", OWNER.org, METER_GENERATED)
LEASES = keys.concurrency_leases(OWNER.org, "org", OWNER.org)


async def reserve(rig: Rig, request: GatewayRequest) -> None:
    """What the gateway does before it writes to the inbox."""
    await rig.redis.hset(keys.key_states(OWNER.org), OWNER.key_id, "active:1")
    answer = await SettlementScripts(rig.redis).reserve(
        OWNER.org,
        Reservation(
            rid=request.rid,
            member=f"{OWNER.org}/{request.rid}",
            now_ms=int(time.time() * 1000),
            deadline_ms=request.submit.deadline_unix_ms,
            key_id=OWNER.key_id,
            key_state="active:1",
            owner=encode_owner(OWNER),
            pool=POOL,
            rates=[Rate(key=BUCKET, meter=METER_GENERATED, limit=6000, amount=3000)],
            leases=[Lease(key=LEASES, limit=4)],
            budgets=[Budget(key=keys.budget(OWNER.org, "org", OWNER.org), limit=10**12, amount=1000)],
        ),
    )
    assert isinstance(answer, Reserved)
    assert await SettlementScripts(rig.redis).extend(OWNER.org, request.rid, 500) is None


async def events(rig: Rig) -> list[UsageEvent]:
    rows = await rig.redis.xrange(keys.usage_stream(shard_of(OWNER.org)))
    return [msgspec.msgpack.decode(fields[FIELD.encode()], type=UsageEvent) for _, fields in rows]


async def settled(rig: Rig, pool, request: GatewayRequest) -> UsageEvent:
    """Wait until the request is settled and gone; return its only event."""
    await eventually(lambda: request.rid not in pool.term.book)
    found = await events(rig)
    assert [e.rid for e in found] == [request.rid]

    async def gone() -> bool:
        return not await rig.redis.xlen(keys.inbox(POOL)) and not await rig.redis.exists(
            keys.inflight(POOL, request.rid)
        )

    for _ in range(1000):
        if await gone():
            break
    assert await gone()
    assert not await rig.redis.exists(keys.reservation(OWNER.org, request.rid))
    budget = await rig.redis.hgetall(keys.budget(OWNER.org, "org", OWNER.org))
    assert budget == {b"reserved": b"0", b"spent": str(found[0].cost).encode()}
    assert await rig.redis.zcard(LEASES) == 0
    assert int(await rig.redis.hget(BUCKET, "level")) >= 6_000_000 - found[0].tokens.decode * 1000
    assert not await rig.redis.exists(keys.reservation_added(OWNER.org, request.rid))
    return found[0]


async def orphan(rig: Rig, gateway: RigGateway, request: GatewayRequest) -> None:
    await reserve(rig, request)
    await gateway.die()


async def test_a_waiting_request_of_a_dead_gateway_costs_nothing(rig: Rig):
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: len(pool.term.waiting) == 1)
    await orphan(rig, gateway, request)
    event = await settled(rig, pool, request)
    assert (event.outcome, event.cost, event.cause) == (Outcome.INTERRUPTED, 0, "gateway_dead")
    assert (event.tokens, event.settled_by, event.path) == (Tokens(), "scheduler", None)


async def test_a_running_request_of_a_dead_gateway_ends_and_costs_nothing_but_keeps_its_counts(rig: Rig):
    await rig.worker(Role.PREFILL)
    decode = await rig.worker(Role.DECODE, SLOW_DECODE)
    decode.server.assignments._limits = msgspec.structs.replace(decode.server.assignments._limits, reader_lost_s=0.3)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=2000)
    await eventually(lambda: len(request.tokens.get((1, 0), ())) > 3)
    await orphan(rig, gateway, request)
    event = await settled(rig, pool, request)
    assert (event.outcome, event.cost, event.finish_reason) == (Outcome.INTERRUPTED, 0, "reader_lost")
    assert event.tokens.prompt == 32
    assert 3 < event.tokens.decode < 2000
    assert (event.path, event.estimated, event.attempts) == (Path.PD, False, 1)
    await eventually(lambda: not decode.server.assignments.finals.all())


async def test_a_request_whose_last_batch_was_acknowledged_is_charged(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=8)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    await eventually(lambda: all(p.delivered for p in pool.term.book.get(request.rid).streaming_parts))
    await orphan(rig, gateway, request)  # before it could settle
    event = await settled(rig, pool, request)
    tokens = Tokens(prefill_computed=32, decode=8)
    assert (event.outcome, event.tokens) == (Outcome.FINISHED, tokens)
    assert event.cost == cost(tokens, OWNER.price) > 0


async def test_a_gateway_that_only_lost_redis_keeps_its_streams_and_is_charged(rig: Rig):
    await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=40)
    await eventually(lambda: request.tokens)
    await reserve(rig, request)
    await gateway.lose_lease()
    event = await settled(rig, pool, request)
    assert (event.outcome, event.tokens.decode) == (Outcome.FINISHED, 40)
    assert request.reason() is FinishReason.LENGTH


async def test_a_request_that_the_gateway_settled_before_it_died_is_not_settled_twice(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await reserve(rig, request)
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    event = usage_event_of(OWNER, rid=request.rid, pool=POOL, outcome=Outcome.FINISHED, tokens=Tokens(decode=8))
    assert await SettlementScripts(rig.redis).settle(event, {})
    await gateway.die()  # after its settle script, before its ack
    await eventually(lambda: request.rid not in pool.term.book)
    assert await events(rig) == [event]
    await eventually(lambda: all(not w.server.assignments.finals.all() for w in rig.workers))


async def test_a_worker_that_dies_too_leaves_an_estimate(rig: Rig):
    worker = await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit(max_tokens=2000)
    await eventually(lambda: request.tokens)
    await reserve(rig, request)
    await gateway.die()
    await worker.kill()
    event = await settled(rig, pool, request)
    assert (event.outcome, event.cost, event.estimated) == (Outcome.INTERRUPTED, 0, True)


async def test_requests_of_a_gateway_that_died_with_the_leader_are_settled_by_the_next(rig: Rig):
    await rig.pair(SLOW_PREFILL)
    for worker in rig.workers:
        limits = worker.server.assignments._limits
        worker.server.assignments._limits = msgspec.structs.replace(limits, reader_lost_s=0.3)
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    request = await gateway.submit()
    await eventually(lambda: request.placed)
    await rig.kill(first)
    await orphan(rig, gateway, request)
    second = rig.scheduler("b")
    await eventually(lambda: second.term is not None and second.term.attempts.caught_up)
    event = await settled(rig, second, request)
    assert (event.outcome, event.cost) == (Outcome.INTERRUPTED, 0)


async def test_a_lease_that_comes_back_in_time_changes_nothing(rig: Rig):
    await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    timing = msgspec.structs.replace(TIMING, gateway_dead_after_s=30.0)
    pool = await rig.leading(rig.scheduler(timing=timing))
    request = await gateway.submit(max_tokens=1000)
    await eventually(lambda: request.tokens)
    watch = pool.term._dead_gateways
    lease = gateway.pause_lease()
    await rig.redis.delete(keys.gateway_lease(gateway.gateway_id))
    await eventually(lambda: watch._missing_since_s)
    lease.set()
    await eventually(lambda: not watch._missing_since_s)
    await gateway.abort(request)
    await eventually(lambda: request.reason() is FinishReason.ABORTED)
    assert request.rid in pool.term.book
    assert await events(rig) == []


async def test_what_came_back_with_old_data_of_redis_is_left_to_the_workers_journals_first(rig: Rig, monkeypatch):
    """The leader claims it, and so does the next one; neither settles it before that time is over."""
    monkeypatch.setattr("scheduler.settlement.RESTORED_WITHIN_S", 3600.0)
    gateway = await rig.gateway()
    first = await rig.leading(rig.scheduler("a"))
    await rig.redis.set(keys.redis_life(POOL), "another-life")
    request = await gateway.submit()
    await reserve(rig, request)
    await rig.kill(first)
    await gateway.die()
    second = rig.scheduler("b")
    await eventually(lambda: second.term is not None and request.rid in second.term.book)
    await rig.kill(second)
    third = rig.scheduler("c")
    await eventually(lambda: third.term is not None and request.rid in third.term.book)
    watch = third.term._dead_gateways
    await eventually(lambda: gateway.gateway_id in watch._missing_since_s)
    for _ in range(3):
        await watch.look()
    assert await events(rig) == []
    watch._old_data_s = -math.inf  # long ago
    event = await settled(rig, third, request)
    assert (event.outcome, event.cost) == (Outcome.INTERRUPTED, 0)
