"""Events reach Postgres exactly once, whatever fails in between."""

import asyncio

import pytest
from billing_rig import DEADLINE_S, Counted, now_ms, usage_event

from billing.consumer import UsageSink
from billing.ledger import Ledger
from contracts import keys
from contracts.identity import new_rid, shard_of
from contracts.rating import Tokens
from contracts.wire import FIELD, encode

EVERYTHING = """
SELECT (SELECT count(*) FROM billing.request), (SELECT count(*) FROM billing.usage_record),
    (SELECT coalesce(sum(tokens), 0) FROM billing.usage_hourly),
    (SELECT coalesce(sum(requests), 0) FROM billing.usage_hourly),
    (SELECT count(*) FROM billing.ledger_transaction),
    (SELECT coalesce(sum(amount), 0) FROM billing.ledger_entry WHERE amount > 0)
"""
# 100 x 0.10 + 30 x 0.02 + 50 x 0.40 per million, in nano-units: 10,000 + 600 + 20,000
COST = 30_600


async def test_one_event_becomes_three_records_a_rollup_and_a_balanced_posting(rig):
    event = usage_event()
    assert await rig.bill(event) == {"posted": 1, "repeated": 0, "dead_letter": 0}
    records = await rig.rows("SELECT meter, tokens, price, cost, worker FROM billing.usage_record ORDER BY meter")
    assert [tuple(row) for row in records] == [
        ("prefill_computed", 100, 100_000_000, 10_000, "prefill-1"),
        ("prefill_cached", 30, 20_000_000, 600, "prefill-1"),
        ("decode", 50, 400_000_000, 20_000, "decode-1"),
    ]
    entries = await rig.rows(
        "SELECT code, amount FROM billing.ledger_entry JOIN billing.account ON id = account_id"
        " WHERE transaction_id = CAST(:rid AS uuid) ORDER BY code",
        rid=event.rid,
    )
    assert [tuple(row) for row in entries] == [
        ("receivable:org_acme", COST),
        ("revenue:decode", -20_000),
        ("revenue:prefill_cached", -600),
        ("revenue:prefill_computed", -10_000),
    ]
    row = await rig.one("SELECT * FROM billing.request")
    assert (row.path, row.hand_off, row.outcome, row.cost, row.answered_cost) == (
        "pd",
        "direct",
        "finished",
        COST,
        COST,
    )
    assert (row.ttft_ms, row.slo_met, row.price_version, row.settled_by) == (120.5, True, 1, "gateway")
    assert await rig.backlog() == (0, 0), "acknowledged and deleted"


async def test_delivering_everything_again_posts_nothing(rig):
    events = [usage_event(org=f"org_{n % 7}", tokens=Tokens(prefill_computed=n, decode=n)) for n in range(40)]
    await rig.bill(*events)
    before = await rig.one(EVERYTHING)
    assert await rig.bill(*events, *events) == {"posted": 0, "repeated": 80, "dead_letter": 0}
    assert await rig.one(EVERYTHING) == before
    assert before[0] == 40


async def test_an_event_twice_in_one_batch_is_posted_once(rig):
    event = usage_event()
    assert await rig.bill(event, event) == {"posted": 1, "repeated": 1, "dead_letter": 0}
    assert tuple(await rig.one(EVERYTHING)) == (1, 3, 180, 3, 1, COST)


class KilledAfterCommit(Exception):
    """Stands for kill -9 at one point of the program."""


async def test_a_consumer_killed_between_commit_and_acknowledge_leaves_work_that_changes_nothing(rig):
    events = [usage_event() for _ in range(20)]
    await rig.emit(*events)
    reader = rig.reader("killed")

    async def die(entries):
        raise KilledAfterCommit

    reader.acknowledge = die
    with pytest.raises(ExceptionGroup) as died:
        await rig.consume(rig.consumer("killed", reader=reader), 20)
    assert died.group_contains(KilledAfterCommit)
    committed = await rig.one(EVERYTHING)
    assert (committed[0], (await rig.backlog())[0]) == (20, 20), "committed, and still in Redis"

    heir = rig.consumer("heir", claim_idle_ms=1)  # so the dead consumer's entries count as abandoned
    await rig.consume(heir, 20)
    assert heir._count.results == {"posted": 0, "repeated": 20, "dead_letter": 0}
    assert await rig.one(EVERYTHING) == committed
    assert await rig.backlog() == (0, 0)


async def test_a_consumer_cancelled_inside_its_transaction_posts_nothing_and_the_next_one_posts_all(rig):
    events = [usage_event() for _ in range(30)]
    await rig.emit(*events)
    inside = asyncio.Event()

    class Stuck(Ledger):
        async def post_usage(self, connection, requests):
            await super().post_usage(connection, requests)
            inside.set()
            await asyncio.Event().wait()

    sink = UsageSink(rig.engine, rig.partitions)
    sink._ledger = Stuck()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rig.consumer("stuck", sink=sink).run())
        await inside.wait()
        task.cancel()
    assert (await rig.one(EVERYTHING))[0] == 0
    await rig.consume(rig.consumer("next", claim_idle_ms=1), 30)
    assert tuple(await rig.one(EVERYTHING)) == (30, 90, 30 * 180, 90, 30, 30 * COST)


async def test_consumers_that_share_the_streams_post_each_event_once(rig):
    events = [usage_event(org=f"org_{n % 11}") for n in range(300)]
    await rig.emit(*events[:200])
    count = Counted()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        # A claim time of 1 ms lets them take each other's entries while they work.
        running = [
            tasks.create_task(rig.consumer(f"c{n}", count, batch_size=7, claim_idle_ms=1).run()) for n in range(3)
        ]
        await rig.emit(*events[200:])
        while count.results["posted"] < 300 or (await rig.backlog())[0]:
            await count.more()
        for task in running:
            task.cancel()
    assert count.results["posted"] == 300
    assert count.results["dead_letter"] == 0
    assert tuple(await rig.one(EVERYTHING)) == (300, 900, 300 * 180, 900, 300, 300 * COST)


async def test_poison_is_buried_with_its_reason_and_does_not_hold_up_its_batch(rig):
    stream = keys.usage_stream(shard_of("org_acme"))
    for raw in (b"\xc1 not msgpack", encode(usage_event(rid="0190a8b2-7c3e-4abc-8def-0123456789ab")), b""):
        await rig.redis.xadd(stream, {FIELD: raw})
    await rig.redis.xadd(stream, {"other": b"field"})
    await rig.emit(usage_event(model="unpriced"), usage_event(tokens=Tokens(decode=-1), cost=0), usage_event())
    delivery = rig.consumer()
    await rig.consume(delivery, 7)
    assert delivery._count.results == {"posted": 1, "repeated": 0, "dead_letter": 6}
    buried = await rig.redis.xrange(keys.dead_letters(shard_of("org_acme")))
    reasons = [fields[b"reason"].decode().split(":")[0] for _, fields in buried]
    assert sorted(reasons) == ["bad_request_id", "negative_tokens", "no_price", *["undecodable"] * 3]
    assert buried[0][1][b"d"] == b"\xc1 not msgpack", "kept as it came, to be looked at and driven again"
    assert await rig.backlog() == (0, 6)


async def test_values_that_postgres_refuses_are_buried_alone(rig):
    good = [usage_event() for _ in range(9)]
    bad = [usage_event(project="nul \x00 byte"), usage_event(reasoning_tokens=2**63 - 1 + 2**40)]
    await rig.emit(*good[:4], bad[0], *good[4:8], bad[1], good[8])
    delivery = rig.consumer()
    await rig.consume(delivery, 11)
    assert delivery._count.results == {"posted": 9, "repeated": 0, "dead_letter": 2}
    assert (await rig.one(EVERYTHING))[0] == 9
    for _, fields in await rig.redis.xrange(keys.dead_letters(shard_of("org_acme"))):
        assert fields[b"reason"].startswith(b"refused_by_database: ")


async def test_an_event_outside_the_partitions_is_buried_and_its_batch_posted(rig):
    long_ago = usage_event(rid=new_rid(1_500_000_000_000))
    await rig.emit(usage_event(), long_ago, usage_event())
    delivery = rig.consumer()
    await rig.consume(delivery, 3)
    assert delivery._count.results == {"posted": 2, "repeated": 0, "dead_letter": 1}
    ((_, fields),) = await rig.redis.xrange(keys.dead_letters(shard_of("org_acme")))
    assert fields[b"reason"].startswith(b"outside_partitions: ")


async def test_a_consumer_whose_connections_are_cut_goes_on(rig):
    await rig.bill(usage_event())
    async with rig.engine.connect() as conn:
        await conn.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND usename = 'pdgate'"
        )
    assert (await rig.bill(usage_event()))["posted"] == 1


async def test_streams_that_lost_all_data_are_read_again(rig):
    delivery = rig.consumer()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(delivery.run())
        await rig.emit(usage_event())
        await delivery._count.reach(1)
        await rig.redis.flushall()
        await rig.emit(usage_event())
        await delivery._count.reach(2)
        task.cancel()
    assert delivery._count.results["posted"] == 2


async def test_the_first_price_of_a_model_is_found_although_the_book_was_read_before(rig):
    from billing.prices import set_price
    from contracts.rating import Meter

    delivery = rig.consumer()
    await rig.emit(usage_event())
    await rig.consume(delivery, 1)
    event = usage_event(model="new", at_ms=now_ms() - 5000)
    async with rig.engine.begin() as conn:
        await set_price(conn, model="new", meters=dict.fromkeys(Meter, 1_000_000), from_ms=0)
    await rig.emit(event)
    await rig.consume(delivery, 2)
    assert delivery._count.results == {"posted": 2, "repeated": 0, "dead_letter": 0}


async def test_a_consumer_takes_little_at_a_time_although_many_streams_are_busy(rig):
    await rig.emit(*(usage_event(org=f"org_{n % 40}") for n in range(400)))
    reader = rig.reader()
    taken = []
    read = reader.read

    async def watched(**options):
        entries = await read(**options)
        taken.append(len(entries))
        return entries

    reader.read = watched
    await rig.consume(rig.consumer(reader=reader, batch_size=8), 400)
    assert sum(taken) == 400
    assert max(taken) <= 64, "one of each stream, not a batch of each"


async def test_a_fault_of_ours_buries_the_entry_at_fault_and_posts_the_others(rig):
    good, bad = [usage_event() for _ in range(7)], usage_event()

    class Faulty(UsageSink):
        async def write(self, things):
            if any(one.event.rid == bad.rid for one in things):
                raise KeyError("not an error of data or network")
            return await super().write(things)

    await rig.emit(*good[:3], bad, *good[3:])
    delivery = rig.consumer(sink=Faulty(rig.engine, rig.partitions))
    await rig.consume(delivery, 8)
    assert delivery._count.results == {"posted": 7, "repeated": 0, "dead_letter": 1}
    ((_, fields),) = await rig.redis.xrange(keys.dead_letters(shard_of(bad.org)))
    assert fields[b"reason"].startswith(b"unexpected: KeyError")
