"""What nobody settled is settled as lost: limits come back, nothing is charged."""

import msgspec
import pytest
from billing_rig import TINY, usage_event
from test_settlement_scripts import (
    NOW,
    ORG,
    budget,
    budget_of,
    lease,
    level,
    rate,
    reservation,
)

from billing.events import decode_event
from billing.sweeper import GONE_S, GRACE_MS, Sweeper
from contracts import keys
from contracts.identity import new_rid, shard_of
from contracts.settlement import METER_GENERATED, METER_TOKENS, SettlementScripts, actual_usage

DEADLINE = NOW + 600_000


@pytest.fixture
async def open_request(rig):
    """A reservation of everything, made long ago."""
    await rig.redis.hset(keys.key_states(ORG), "key_1", "active:1")
    rid = new_rid(NOW)
    await SettlementScripts(rig.redis).reserve(
        ORG,
        reservation(
            rid,
            rates=[rate(METER_TOKENS, 1000, 900), rate(METER_GENERATED, 1000, 800)],
            leases=[lease(1)],
            budgets=[budget(10**9, 5_000_000)],
        ),
    )
    return rid


def sweeper(rig, now):
    return Sweeper(rig.redis, SettlementScripts(rig.redis), now_ms=lambda: now)


async def test_a_reservation_is_left_alone_until_120_s_after_its_deadline(rig, open_request):
    assert await sweeper(rig, DEADLINE + GRACE_MS - 1).sweep() == 0
    assert await budget_of(rig.redis) == (0, 5_000_000)


async def test_an_abandoned_reservation_gives_everything_back_and_is_recorded_as_lost(rig, open_request):
    for meter in (METER_TOKENS, METER_GENERATED):  # no refill: what comes back is what was taken
        await rig.redis.hset(keys.rate_bucket(ORG, "org", ORG, meter), "at", 2**52)
    assert await sweeper(rig, DEADLINE + GRACE_MS).sweep() == 1
    assert await budget_of(rig.redis) == (0, 0)
    assert await level(rig.redis, METER_TOKENS) == 1000
    assert await level(rig.redis, METER_GENERATED) == 1000
    assert await rig.redis.zcard(keys.concurrency_leases(ORG, "key", "key_1")) == 0
    assert await rig.redis.zcard(keys.open_reservations(ORG)) == 0
    assert await sweeper(rig, DEADLINE + GRACE_MS).sweep() == 0

    (fields,) = [fields for _, fields in await rig.redis.xrange(keys.usage_stream(shard_of(ORG)))]
    event = decode_event(fields[b"d"]).event
    assert (event.outcome, event.cost, event.settled_by, event.cause) == ("lost", 0, "billing", "nobody_settled")
    assert (event.org, event.project, event.key_id, event.model) == (ORG, "proj_web", "key_1", "tiny")
    assert (event.rid, event.price, event.pool, event.path) == (open_request, TINY, "tiny", None)


async def test_a_request_that_the_gateway_settles_late_is_still_settled_once(rig, open_request):
    event = usage_event(rid=open_request)
    assert await SettlementScripts(rig.redis).settle(event, actual_usage(event))
    assert await sweeper(rig, DEADLINE + GRACE_MS).sweep() == 0
    assert await rig.redis.xlen(keys.usage_stream(shard_of(ORG))) == 1


async def test_a_member_without_a_reservation_is_removed(rig):
    await rig.redis.zadd(keys.open_reservations(ORG), {f"{ORG}/{new_rid(NOW)}": DEADLINE})
    assert await sweeper(rig, DEADLINE + GRACE_MS).sweep() == 0
    assert await rig.redis.zcard(keys.open_reservations(ORG)) == 0


async def test_one_unreadable_reservation_does_not_stop_the_others(rig, open_request):
    rid = new_rid(NOW)
    await rig.redis.set(keys.reservation(ORG, rid), b"\xc1")
    await rig.redis.zadd(keys.open_reservations(ORG), {f"{ORG}/{rid}": DEADLINE - 1})
    assert await sweeper(rig, DEADLINE + GRACE_MS).sweep() == 1
    assert await rig.redis.zrange(keys.open_reservations(ORG), 0, -1) == [f"{ORG}/{rid}".encode()]


async def test_one_reservation_that_redis_refuses_to_settle_does_not_stop_the_others(rig, open_request):
    broken = new_rid(NOW)
    await SettlementScripts(rig.redis).reserve(ORG, reservation(broken, budgets=[budget(9, 1, scope="project")]))
    await rig.redis.set(keys.budget(ORG, "project", ORG), "no hash")
    await rig.redis.zadd(keys.open_reservations(ORG), {f"{ORG}/{broken}": 1})  # the first one to be swept
    assert await sweeper(rig, DEADLINE + GRACE_MS).sweep() == 1
    assert await rig.redis.exists(keys.reservation(ORG, open_request)) == 0
    assert await rig.redis.exists(keys.reservation(ORG, broken)) == 1


async def test_what_a_dead_gateway_had_reserved_and_never_handed_over_comes_back(rig):
    """It was killed between the two. What is in flight is the scheduler's, what lives is the gateway's."""
    await rig.redis.hset(keys.key_states(ORG), "key_1", "active:1")
    scripts, rids = SettlementScripts(rig.redis), {}
    for name, gateway in (("left", "dead"), ("running", "dead"), ("alive", "living"), ("old", "")):
        rids[name] = new_rid(NOW)
        made = reservation(rids[name], budgets=[budget(10**9, 1000)])
        await scripts.reserve(ORG, msgspec.structs.replace(made, gateway_id=gateway))
    await rig.redis.set(keys.inflight("tiny", rids["running"]), b"x")
    await rig.redis.zadd(keys.GATEWAYS, {"dead": NOW, "living": NOW})
    await rig.redis.set(keys.gateway_lease("living"), "h:1")
    clock = [0.0]
    sweeper = Sweeper(rig.redis, scripts, now_ms=lambda: NOW, clock_s=lambda: clock[0])
    assert await sweeper.bury() == 0, "its lease may only be late"
    clock[0] = GONE_S
    assert await sweeper.bury() == 1
    assert await budget_of(rig.redis) == (0, 3000)
    (fields,) = [fields for _, fields in await rig.redis.xrange(keys.usage_stream(shard_of(ORG)))]
    event = decode_event(fields[b"d"]).event
    assert (event.rid, event.outcome, event.cost, event.cause) == (rids["left"], "interrupted", 0, "gateway_dead")
    await rig.redis.delete(keys.inflight("tiny", rids["running"]))
    assert await sweeper.bury() == 0, "once for each life"


async def test_a_gateway_that_comes_back_is_not_buried(rig):
    await rig.redis.zadd(keys.GATEWAYS, {"slow": NOW})
    await rig.redis.hset(keys.key_states(ORG), "key_1", "active:1")
    scripts, clock = SettlementScripts(rig.redis), [0.0]
    made = reservation(new_rid(NOW), budgets=[budget(10**9, 1000)])
    await scripts.reserve(ORG, msgspec.structs.replace(made, gateway_id="slow"))
    sweeper = Sweeper(rig.redis, scripts, now_ms=lambda: NOW, clock_s=lambda: clock[0])
    assert await sweeper.bury() == 0
    await rig.redis.set(keys.gateway_lease("slow"), "h:1")
    clock[0] = GONE_S
    assert await sweeper.bury() == 0
    await rig.redis.delete(keys.gateway_lease("slow"))
    assert await sweeper.bury() == 0
    clock[0] = 2 * GONE_S
    assert await sweeper.bury() == 1
