"""What billing does by the clock: no fault ends it, lost budgets open again, old partitions go."""

import asyncio
from datetime import UTC, date, datetime, timedelta

import httpx
from billing_rig import DEADLINE_S, now_ms, usage_event

from billing import invoices
from billing.budgets import Budget, Budgets, set_budget
from billing.consumer import usage_streams
from billing.credits import NewGrant, grant, grants_of
from billing.jobs import Job, Jobs, keep
from billing.partitions import drop_partitions, ensure_partitions, partition_days
from billing.periods import month_of
from billing.webhooks import Webhooks
from contracts import keys
from contracts.identity import new_rid
from contracts.rating import Tokens

ORG = "org_acme"


def jobs(rig, **options):
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200)))
    return Jobs(
        rig.engine, rig.redis, rig.reader("jobs", usage_streams()), budgets=Budgets(rig.engine, rig.redis),
        webhooks=Webhooks(rig.engine, client, now_ms=now_ms), **{"keep_days": None, "address": ""} | options,
    )  # fmt: skip


async def test_a_job_that_fails_is_done_again_and_ends_nothing():
    done = asyncio.Event()
    tries = 0

    async def work():
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ZeroDivisionError
        done.set()

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(keep(Job("work", 0.01, work)))
        await done.wait()
        task.cancel()


async def test_every_job_runs_on_an_empty_and_on_a_used_installation(rig):
    every = jobs(rig, keep_days=400, address="127.0.0.1:1234").all
    for job in every:
        await job.run()
    assert await rig.redis.get(keys.BILLING_ADMIN) == b"127.0.0.1:1234"
    async with rig.engine.begin() as conn:
        await grant(conn, ORG, NewGrant(kind="paid", amount=10**9, idempotency="a"), at=datetime.now(UTC))
        await set_budget(conn, Budget(organisation=ORG, scope="org", scope_id=ORG, amount=10**9))
    await rig.bill(usage_event(tokens=Tokens(decode=1_000_000)))
    for job in every:
        await job.run()
    async with rig.engine.begin() as conn:
        (one,) = await grants_of(conn, ORG)
    assert one.left == 10**9 - 400_000_000, "the credit job covered the usage"


async def test_a_budget_that_redis_lost_opens_again_with_what_was_spent(rig):
    async with rig.engine.begin() as conn:
        await set_budget(conn, Budget(organisation=ORG, scope="org", scope_id=ORG, amount=10**9))
    await rig.bill(usage_event(tokens=Tokens(decode=1_000_000)))
    await rig.redis.flushall()
    opening = next(job for job in jobs(rig).all if job.name == "budgets_open")
    await opening.run()
    raw = await rig.redis.hgetall(keys.budget(ORG, "org", ORG))
    assert (int(raw[b"limit"]), int(raw[b"spent"])) == (10**9, 400_000_000)


async def test_partitions_go_after_their_days_but_not_before_the_month_is_invoiced(rig):
    old = date(2025, 3, 10)
    async with rig.engine.begin() as conn:
        await ensure_partitions(conn, old, 2)
    at_ms = int(datetime(old.year, old.month, old.day, 12, tzinfo=UTC).timestamp() * 1000)
    await rig.bill(usage_event(rid=new_rid(at_ms)))
    async with rig.engine.begin() as conn:
        assert await drop_partitions(conn, old + timedelta(days=30)) == [], "no invoice has its usage yet"
        period = month_of(datetime(2025, 3, 1, tzinfo=UTC))
        await invoices.close_period(conn, ORG, period, currency="EUR", now=datetime.now(UTC))
    async with rig.engine.begin() as conn:
        dropped = await drop_partitions(conn, old + timedelta(days=1))
        assert sorted(dropped) == [f"billing.{name}_20250310" for name in ("attempt_cost", "request", "usage_record")]
        assert old not in await partition_days(conn)
        assert old + timedelta(days=1) in await partition_days(conn)
        await drop_partitions(conn, old + timedelta(days=30))
    assert await rig.scalar("SELECT sum(requests) FROM billing.usage_hourly") == 3, "the rollup stays"
    async with rig.engine.begin() as conn:
        await ensure_partitions(conn, datetime.now(UTC).date() - timedelta(days=1), 3)
