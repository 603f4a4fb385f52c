"""reserve.lua and settle.lua on a real server: limits are taken all or none, and given back once."""

import asyncio

import msgspec
import pytest
from billing_rig import DEADLINE_S, TINY, now_ms, usage_event
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import keys
from contracts.identity import new_rid, shard_of
from contracts.rating import Tokens
from contracts.resp import redis_client
from contracts.settlement import (
    METER_GENERATED,
    METER_PROMPT,
    METER_REQUESTS,
    METER_TOKENS,
    METER_UNCACHED,
    Budget,
    BudgetUnknown,
    Duplicate,
    KeyStateDiffers,
    Lease,
    LimitHit,
    NotExtended,
    Rate,
    Reservation,
    Reserved,
    Settled,
    SettlementScripts,
    Unreserved,
    actual_usage,
    encode_owner,
)
from contracts.slo import SloTarget
from contracts.units import MAX_EXACT_NANO
from contracts.usage import Outcome, UsageEvent
from contracts.wire import FIELD, Owner

ORG = "org_acme"
OWNER = Owner(
    org=ORG, project="proj_web", key_id="key_1", model="tiny", tier="default", price=TINY, slo=SloTarget(ttft_ms=2000)
)
NOW = now_ms()  # the scripts take time as an argument: no test waits


def rate(meter, limit, amount, scope="org"):
    return Rate(key=keys.rate_bucket(ORG, scope, ORG, meter), meter=meter, limit=limit, amount=amount)


def lease(limit):
    return Lease(key=keys.concurrency_leases(ORG, "key", "key_1"), limit=limit)


def budget(limit, amount, scope="org"):
    return Budget(key=keys.budget(ORG, scope, ORG), limit=limit, amount=amount)


def reservation(rid=None, *, now=NOW, **changes):
    rid = rid or new_rid(now)
    fields = {
        "rid": rid,
        "member": f"{ORG}/{rid}",
        "now_ms": now,
        "deadline_ms": now + 600_000,
        "key_id": "key_1",
        "key_state": "active:1",
        "owner": encode_owner(OWNER),
        "pool": "tiny",
    }
    return Reservation(**(fields | changes))


@pytest.fixture
async def client(redis_url):
    client = redis_client(redis_url, max_connections=200)
    await client.hset(keys.key_states(ORG), "key_1", "active:1")
    yield client
    await client.aclose()


@pytest.fixture
def scripts(client):
    return SettlementScripts(client)


async def snapshot(client):
    """Every key of the organisation's shard, for before-and-after comparisons."""
    found = {}
    for key in sorted([key async for key in client.scan_iter(match="pdgate:*")]):
        kind = await client.type(key)
        if kind == b"hash":
            found[key] = await client.hgetall(key)
        elif kind == b"zset":
            found[key] = await client.zrange(key, 0, -1, withscores=True)
        elif kind == b"stream":
            found[key] = await client.xrange(key)
        else:
            found[key] = await client.get(key)
    return found


def bare(hit):
    """A refusal without what it says of the other limits."""
    return msgspec.structs.replace(hit, remaining=(), reset_ms=())


async def budget_of(client):
    raw = await client.hgetall(keys.budget(ORG, "org", ORG))
    return int(raw.get(b"spent", 0)), int(raw.get(b"reserved", 0))


async def level(client, meter):
    return int(await client.hget(keys.rate_bucket(ORG, "org", ORG, meter), "level")) // 1000


async def test_a_reservation_takes_every_limit_and_says_what_is_left(client, scripts):
    answer = await scripts.reserve(
        ORG,
        reservation(
            "0190a8b2-7c3e-7abc-8def-0123456789ab",
            rates=[rate(METER_REQUESTS, 10, 1), rate(METER_PROMPT, 6000, 600)],
            leases=[lease(2)],
            budgets=[budget(1000, 400)],
        ),
    )
    # 1 of 10 a minute comes back in 6 s; 600 of 6000 also in 6 s.
    assert answer == Reserved((9, 5400), (6000, 6000))
    assert await budget_of(client) == (0, 400)
    assert await client.zrange(keys.open_reservations(ORG), 0, -1, withscores=True) == [
        (b"org_acme/0190a8b2-7c3e-7abc-8def-0123456789ab", NOW + 600_000)
    ]
    assert await client.zcard(keys.concurrency_leases(ORG, "key", "key_1")) == 1


@pytest.mark.parametrize(
    ("limits", "hit"),
    [
        # 6 more than is there of 60 a minute: one a second
        ({"rates": [rate(METER_REQUESTS, 10, 1), rate(METER_PROMPT, 60, 46)]}, LimitHit("rate", 1, 6000, 40)),
        ({"rates": [rate(METER_PROMPT, 60, 61)]}, LimitHit("rate", 0, None, 40)),  # waiting never helps
        ({"leases": [lease(1)]}, LimitHit("lease", 0, 1000, 0)),
        ({"budgets": [budget(1000, 801)]}, LimitHit("budget", 0, None, 800)),
    ],
)
async def test_one_limit_that_is_hit_leaves_all_others_untouched(client, scripts, limits, hit):
    first = reservation(rates=[rate(METER_PROMPT, 60, 20)], leases=[lease(5)], budgets=[budget(1000, 200)])
    assert isinstance(await scripts.reserve(ORG, first), Reserved)
    before = await snapshot(client)
    all_limits = {
        "rates": [rate(METER_REQUESTS, 10, 1)],
        "leases": [lease(5)],
        "budgets": [budget(1000, 1)],
    } | limits
    assert bare(await scripts.reserve(ORG, reservation(**all_limits))) == hit
    assert await snapshot(client) == before


async def test_a_bucket_refills_evenly_and_never_above_its_limit(client, scripts):
    async def take(amount, later_ms):
        return await scripts.reserve(ORG, reservation(now=NOW + later_ms, rates=[rate(METER_PROMPT, 600, amount)]))

    assert await take(600, 0) == Reserved((0,), (60_000,))
    # 10 a second: 5 of 600 after half one, the rest in 59.5 s
    assert await take(6, 500) == LimitHit("rate", 0, 100, 5, (5,), (59_500,))
    assert await take(6, 600) == Reserved((0,), (60_000,))
    assert await take(600, 3_600_000) == Reserved((0,), (60_000,)), "an hour later it is full, not fuller"


@pytest.mark.parametrize(
    ("stored", "answer"),
    [
        (None, KeyStateDiffers(None)),
        ("active:2", KeyStateDiffers("active:2")),
        ("revoked:2", KeyStateDiffers("revoked:2")),
    ],
)
async def test_a_key_whose_state_changed_reserves_nothing(client, scripts, stored, answer):
    await client.delete(keys.key_states(ORG))
    if stored:
        await client.hset(keys.key_states(ORG), "key_1", stored)
    before = await snapshot(client)
    assert await scripts.reserve(ORG, reservation(budgets=[budget(10, 1)])) == answer
    assert await snapshot(client) == before


async def test_a_request_id_is_reserved_once(client, scripts):
    once = reservation(budgets=[budget(1000, 10)])
    assert isinstance(await scripts.reserve(ORG, once), Reserved)
    assert await scripts.reserve(ORG, once) == Duplicate()
    assert await budget_of(client) == (0, 10)


async def test_reservations_at_once_never_exceed_any_limit(client, scripts):
    granted = []

    async def reserve(number):
        answer = await scripts.reserve(
            ORG, reservation(rates=[rate(METER_TOKENS, 1000, 30)], leases=[lease(20)], budgets=[budget(500, 33)])
        )
        if isinstance(answer, Reserved):
            granted.append(number)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        for number in range(100):
            tasks.create_task(reserve(number))
    assert len(granted) == 15, "500 // 33"
    assert await budget_of(client) == (0, 15 * 33)
    assert await client.zcard(keys.concurrency_leases(ORG, "key", "key_1")) == 15
    assert await client.zcard(keys.open_reservations(ORG)) == 15


async def test_a_short_request_does_not_end_a_longer_ones_lease(client, scripts):
    await scripts.reserve(ORG, reservation(leases=[lease(2)], deadline_ms=NOW + 600_000))
    await scripts.reserve(ORG, reservation(leases=[lease(2)], deadline_ms=NOW + 1_000))
    assert await client.pexpiretime(keys.concurrency_leases(ORG, "key", "key_1")) == NOW + 660_000


async def test_settling_refunds_to_the_actuals_and_emits_one_event(client, scripts):
    rid = new_rid(now_ms())
    now = now_ms()
    await scripts.reserve(
        ORG,
        reservation(
            rid,
            now=now,
            rates=[
                rate(METER_REQUESTS, 1, 1),
                rate(METER_PROMPT, 1_000, 130),
                rate(METER_UNCACHED, 1_000, 130),
                rate(METER_GENERATED, 1_000, 500),
                rate(METER_TOKENS, 1_000, 630),
            ],
            leases=[lease(2)],
            budgets=[budget(10**9, 200_000), budget(10**9, 200_000, scope="project")],
        ),
    )
    # Freeze the refill, so that what the buckets hold is what was taken and given back.
    far = now + 10**9
    for meter in (METER_REQUESTS, METER_PROMPT, METER_UNCACHED, METER_GENERATED, METER_TOKENS):
        await client.hset(keys.rate_bucket(ORG, "org", ORG, meter), "at", far)
    event = usage_event(rid=rid)
    assert await scripts.settle(event, actual_usage(event)) is Settled.NOW
    assert await level(client, METER_REQUESTS) == 0, "no actual given: stays as reserved"
    assert await level(client, METER_PROMPT) == 1_000 - 130
    assert await level(client, METER_UNCACHED) == 1_000 - 100, "30 were cached"
    assert await level(client, METER_GENERATED) == 1_000 - 50
    assert await level(client, METER_TOKENS) == 1_000 - 180
    assert await budget_of(client) == (event.cost, 0)
    assert await client.zcard(keys.concurrency_leases(ORG, "key", "key_1")) == 0
    assert await client.zcard(keys.open_reservations(ORG)) == 0
    assert await client.exists(keys.reservation(ORG, rid)) == 0
    ((_, fields),) = await client.xrange(keys.usage_stream(shard_of(ORG)))
    assert msgspec.msgpack.decode(fields[FIELD.encode()], type=UsageEvent) == event
    assert await client.get(keys.settled_request(ORG, rid)) == fields[FIELD.encode()]


async def test_settling_twice_or_at_once_from_many_sides_counts_once(client, scripts):
    rid = new_rid(now_ms())
    await scripts.reserve(ORG, reservation(rid, now=now_ms(), budgets=[budget(10**9, 100_000)]))
    sides = [
        usage_event(rid=rid),
        *(usage_event(rid=rid, outcome=Outcome.LOST, settled_by="billing") for _ in range(9)),
    ]
    won = []

    async def settle(event):
        if await scripts.settle(event, actual_usage(event)):
            won.append(event)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        for event in sides:
            tasks.create_task(settle(event))
    assert len(won) == 1
    assert await client.xlen(keys.usage_stream(shard_of(ORG))) == 1
    assert await budget_of(client) == (won[0].cost, 0)
    after = await snapshot(client)
    assert await scripts.settle(sides[0], actual_usage(sides[0])) is Settled.BEFORE
    assert await snapshot(client) == after


async def test_a_budget_that_was_set_while_a_request_ran_is_charged_when_it_ends(client, scripts):
    rid = new_rid(now_ms())
    await scripts.reserve(ORG, reservation(rid, now=now_ms(), budgets=[budget(10**9, 200_000)]))
    event = usage_event(rid=rid)
    for scope, scope_id in (("key", event.key_id), ("credit", ORG)):
        await client.hset(keys.budget(ORG, scope, scope_id), "limit", 10**9)
    await client.hset(keys.budget(ORG, "project", event.project), "ends_ms", 10**14)  # a soft one: no limit
    assert await scripts.settle(event, {}) is Settled.NOW
    assert await budget_of(client) == (event.cost, 0), "charged once"
    for scope, scope_id in (("key", event.key_id), ("credit", ORG)):
        assert int(await client.hget(keys.budget(ORG, scope, scope_id), "spent")) == event.cost
    assert await client.hget(keys.budget(ORG, "project", event.project), "spent") is None


async def test_a_request_that_was_refused_and_never_reserved_leaves_nothing(client, scripts):
    before = await snapshot(client)
    event = usage_event(outcome=Outcome.REFUSED)
    assert await scripts.settle(event, actual_usage(event)) is Settled.BEFORE
    assert await snapshot(client) == before


async def test_a_request_whose_reservation_redis_lost_while_it_ran_is_settled_once_all_the_same(client, scripts):
    event = usage_event()
    key = keys.budget(ORG, "org", ORG)
    await client.hset(key, mapping={"limit": 10**9, "spent": 5, "reserved": 7})  # rebuilt without it
    assert await scripts.settle(event, actual_usage(event)) is Settled.UNRESERVED
    assert await budget_of(client) == (5 + event.cost, 7)
    ((_, fields),) = await client.xrange(keys.usage_stream(shard_of(ORG)))
    assert msgspec.msgpack.decode(fields[FIELD.encode()], type=UsageEvent) == event
    after = await snapshot(client)
    assert await scripts.settle(event, actual_usage(event)) is Settled.BEFORE
    assert await snapshot(client) == after


async def test_money_beyond_what_a_double_holds_is_refused_and_the_last_exact_unit_is_not(client, scripts):
    with pytest.raises(ValueError, match="exactly"):
        await scripts.reserve(ORG, reservation(budgets=[budget(2**60, MAX_EXACT_NANO + 1)]))
    await client.hset(keys.budget(ORG, "org", ORG), "spent", MAX_EXACT_NANO - 1)
    hit = await scripts.reserve(ORG, reservation(budgets=[budget(2**60, 2)]))
    assert (hit.kind, hit.index) == ("budget", 0)
    rid = new_rid(NOW)
    assert isinstance(await scripts.reserve(ORG, reservation(rid, budgets=[budget(2**60, 1)])), Reserved)
    event = usage_event(rid=rid, cost=1)
    assert await scripts.settle(event, {}) is Settled.NOW
    assert await budget_of(client) == (MAX_EXACT_NANO, 0)


STEPS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.booleans()), max_size=12)


@settings(max_examples=30, deadline=None)
@given(STEPS, st.integers(0, 1000))
def test_a_budget_is_never_overspent_and_what_is_reserved_comes_back(valkey_url, steps, limit):
    """Each step reserves an estimate and asks for more; what is granted settles now or at the end, within both."""

    async def run():
        client = redis_client(valkey_url)
        await client.flushall()
        await client.hset(keys.key_states(ORG), "key_1", "active:1")
        scripts = SettlementScripts(client)
        spent, open_events, reserved = 0, [], 0
        for estimate, actual, at_once in steps:
            rid = new_rid(NOW)
            answer = await scripts.reserve(ORG, reservation(rid, budgets=[budget(limit, estimate)]))
            assert isinstance(answer, Reserved) == (spent + reserved + estimate <= limit)
            if not isinstance(answer, Reserved):
                continue
            more, paid = actual + 1, estimate
            added = await scripts.extend(ORG, rid, more)
            assert (added is None) == (spent + reserved + estimate + more <= limit)
            if added is None:
                paid += more
            event = usage_event(rid=rid, cost=min(actual * 2, paid))
            if at_once:
                await scripts.settle(event, {})
                spent += event.cost
            else:
                open_events.append(event)
                reserved += paid
            assert await budget_of(client) == (spent, reserved)
        for event in open_events:
            await scripts.settle(event, {})
            spent += event.cost
        assert await budget_of(client) == (spent, 0)
        assert spent <= limit
        await client.aclose()

    asyncio.run(run())


def test_what_a_request_that_never_ran_leaves_charged_is_nothing():
    event = usage_event(outcome=Outcome.LOST, tokens=Tokens())
    assert set(actual_usage(event).values()) == {0}


async def test_a_budget_whose_period_is_over_begins_the_next_one_with_nothing_spent(client, scripts):
    key = keys.budget(ORG, "org", ORG)
    fields = {"limit": 1000, "spent": 900, "reserved": 50, "ends_ms": NOW + 10, "next_ends_ms": NOW + 20}
    await client.hset(key, mapping=fields)
    wanted = [Budget(key=key, limit=None, amount=100, required=True)]
    before = await scripts.reserve(ORG, reservation(now=NOW + 9, budgets=wanted))
    assert bare(before) == LimitHit("budget", 0, None, 50)
    assert isinstance(await scripts.reserve(ORG, reservation(now=NOW + 10, budgets=wanted)), Reserved)
    assert await client.hgetall(key) == {
        b"limit": b"1000",
        b"spent": b"0",
        b"reserved": b"150",
        b"ends_ms": str(NOW + 20).encode(),
    }


async def test_a_required_budget_without_a_limit_is_unknown_and_a_limit_in_the_hash_wins(client, scripts):
    key = keys.budget(ORG, "org", ORG)
    wanted = [Budget(key=key, limit=10_000, amount=500, required=True)]
    assert await scripts.reserve(ORG, reservation(budgets=wanted)) == BudgetUnknown(0)
    await client.hset(key, "limit", 499)
    assert bare(await scripts.reserve(ORG, reservation(budgets=wanted))) == LimitHit("budget", 0, None, 499)
    await client.hset(key, "limit", 500)
    assert isinstance(await scripts.reserve(ORG, reservation(budgets=wanted)), Reserved)


async def test_money_that_is_added_while_a_request_runs_comes_back_with_the_rest(client, scripts):
    event = usage_event(cost=700)
    first = reservation(event.rid, budgets=[budget(1000, 400)])
    assert isinstance(await scripts.reserve(ORG, first), Reserved)
    assert await scripts.extend(ORG, event.rid, 500) is None
    assert await budget_of(client) == (0, 900)
    assert await scripts.extend(ORG, event.rid, 101) == NotExtended(100)
    assert await budget_of(client) == (0, 900)
    assert await scripts.settle(event, actual_usage(event)) is Settled.NOW
    assert await budget_of(client) == (700, 0)
    assert await scripts.extend(ORG, event.rid, 1) is None  # settled: nothing to pay for
    assert await budget_of(client) == (700, 0)
    assert not await client.exists(keys.reservation_added(ORG, event.rid))


async def test_what_was_let_in_without_a_reservation_is_charged_once(client, scripts):
    event = usage_event(cost=700)
    unreserved = Unreserved(rates=[rate(METER_PROMPT, 6000, 600)], budgets=[budget(1000, 400)])
    assert await scripts.settle(event, actual_usage(event), unreserved=unreserved) is Settled.NOW
    assert await scripts.settle(event, actual_usage(event), unreserved=unreserved) is Settled.BEFORE
    assert await budget_of(client) == (700, 0)
    assert await level(client, METER_PROMPT) == 6000 - event.tokens.prompt
    assert await client.xlen(keys.usage_stream(shard_of(ORG))) == 1


async def test_gateways_whose_clocks_differ_do_not_refill_a_bucket_twice(client, scripts):
    async def take(clock_ms):
        return await scripts.reserve(ORG, reservation(now=NOW + clock_ms, rates=[rate(METER_REQUESTS, 60, 1)]))

    for _ in range(60):
        assert isinstance(await take(0), Reserved)
    # One gateway is 10 s ahead: that minute's ten requests are given out once, however often both ask.
    granted = [await take(clock_ms) for _ in range(20) for clock_ms in (10_000, 0)]
    assert sum(isinstance(answer, Reserved) for answer in granted) == 10
