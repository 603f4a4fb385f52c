"""Budgets: limits and what was spent in Redis, periods in the tenant's zone, alerts and their webhooks."""

import asyncio
import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import sqlalchemy as sa
from billing_rig import now_ms, usage_event
from hypothesis import given
from hypothesis import strategies as st

from billing.alerts import raise_alerts
from billing.budgets import Budget, BudgetError, Budgets, budgets_of, remove_budget, set_budget, spent_in
from billing.credits import NewGrant, grant
from billing.partitions import ensure_partitions
from billing.periods import month_after, month_named, month_of
from billing.profiles import Profile, set_profile
from billing.queries import budgeted_scopes
from billing.webhooks import MAX_TRIES, Webhooks
from contracts import keys
from contracts.rating import Tokens

ORG = "org_acme"
CENT = 10_000_000
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Pacific/Auckland", "America/Havana"]


def event(cents, **changes):
    return usage_event(tokens=Tokens(decode=25_000 * cents), **changes)


async def begin(rig, call, *words, **names):
    async with rig.engine.begin() as conn:
        return await call(conn, *words, **names)


async def hard_budgets(rig, project, key_id):
    async with rig.engine.begin() as conn:
        return set(await conn.scalar(sa.select(budgeted_scopes(ORG, project, key_id))))


async def budget(rig, cents, scope="org", scope_id=ORG, **terms):
    await begin(rig, set_budget, Budget(organisation=ORG, scope=scope, scope_id=scope_id, amount=cents * CENT, **terms))


def now():
    return datetime.now(UTC)


async def hash_of(rig, scope="org", scope_id=ORG):
    raw = await rig.redis.hgetall(keys.budget(ORG, scope, scope_id))
    return {name.decode(): int(value) for name, value in raw.items()}


# -- periods ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zone", "at", "start", "end"),
    [
        ("UTC", "2026-03-15T00:00Z", "2026-03-01T00:00Z", "2026-04-01T00:00Z"),
        # Berlin's March begins at UTC+1 and ends at UTC+2: clocks go forward on the 29th.
        ("Europe/Berlin", "2026-03-31T22:30Z", "2026-03-31T22:00Z", "2026-04-30T22:00Z"),
        ("Europe/Berlin", "2026-03-31T21:30Z", "2026-02-28T23:00Z", "2026-03-31T22:00Z"),
        # New York's November has 721 hours.
        ("America/New_York", "2026-11-15T12:00Z", "2026-11-01T04:00Z", "2026-12-01T05:00Z"),
        ("Asia/Kolkata", "2026-05-31T18:29Z", "2026-04-30T18:30Z", "2026-05-31T18:30Z"),
        ("Asia/Kolkata", "2026-05-31T18:30Z", "2026-05-31T18:30Z", "2026-06-30T18:30Z"),
    ],
)
def test_a_month_goes_from_local_midnight_to_local_midnight(zone, at, start, end):
    month = month_of(datetime.fromisoformat(at), zone)
    assert (month.start, month.end) == (datetime.fromisoformat(start), datetime.fromisoformat(end))


@given(st.integers(946_684_800, 2_208_988_800), st.sampled_from(ZONES))
def test_months_follow_each_other_without_gap_or_overlap_in_every_zone(at, zone):
    at = datetime.fromtimestamp(at, UTC)
    month = month_of(at, zone)
    assert month.start <= at < month.end
    assert month_of(month.start, zone) == month
    assert month_after(month, zone).start == month.end
    assert timedelta(days=27, hours=22) < month.end - month.start < timedelta(days=31, hours=2)


def test_a_month_or_zone_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no month"):
        month_named("2026-13")
    with pytest.raises(ValueError, match="no time zone"):
        month_of(now(), "Mars/Olympus")


# -- limits and spent ------------------------------------------------------------------------------------


async def test_a_budgets_limit_period_and_what_was_spent_reach_redis(rig):
    await rig.bill(event(10), event(5, project="proj_b"), event(3, key_id="key_2"))
    await budget(rig, 100)
    await budget(rig, 50, "project", "proj_web")
    await budget(rig, 20, "key", "key_1")
    await Budgets(rig.engine, rig.redis).sync(now=now())
    month = month_of(now())
    seen = await hash_of(rig)
    assert (seen["limit"], seen["spent"]) == (100 * CENT, 18 * CENT)
    assert seen["ends_ms"] == int(month.end.timestamp() * 1000)
    assert seen["next_ends_ms"] == int(month_after(month).end.timestamp() * 1000)
    assert (await hash_of(rig, "project", "proj_web"))["spent"] == 13 * CENT
    assert (await hash_of(rig, "key", "key_1"))["spent"] == 15 * CENT
    found = await hard_budgets(rig, "proj_web", "key_2")
    assert found == {"org", "project"}


async def test_after_a_loss_of_redis_data_spent_is_what_is_posted_plus_what_waits_in_the_stream(rig):
    await budget(rig, 100)
    await rig.bill(event(10), event(20))
    budgets = Budgets(rig.engine, rig.redis)
    await budgets.sync(now=now())
    await rig.redis.flushall()
    posted_again = event(7)
    await rig.bill(posted_again)
    await rig.emit(posted_again, event(4))  # one is in the stream and posted, one waits
    assert await budgets.sync(now=now()) == 41 * CENT
    assert (await hash_of(rig))["spent"] == 41 * CENT
    assert await budgets.sync(now=now()) == 0


async def test_spent_that_nobody_settled_is_taken_back_and_what_is_settled_meanwhile_stays(rig):
    await budget(rig, 100)
    budgets = Budgets(rig.engine, rig.redis)
    await rig.bill(event(10))
    await budgets.sync(now=now())
    await rig.redis.hincrby(keys.budget(ORG, "org", ORG), "spent", 5 * CENT)
    read = budgets._waiting

    async def settle_meanwhile(shard):
        found = await read(shard)
        one = event(3)
        await rig.emit(one)
        await rig.redis.hincrby(keys.budget(ORG, "org", ORG), "spent", one.cost)
        return found

    budgets._waiting = settle_meanwhile
    assert await budgets.sync(now=now()) == 5 * CENT
    assert (await hash_of(rig))["spent"] == 13 * CENT


async def test_a_month_ends_at_the_tenants_midnight_and_nothing_of_it_is_spent_in_the_next(rig):
    zone = "Asia/Kolkata"
    await begin(rig, set_profile, Profile(organisation=ORG, time_zone=zone))
    month = month_of(now(), zone)
    await budget(rig, 100)
    budgets = Budgets(rig.engine, rig.redis)
    last = int(month.end.timestamp() * 1000) - 1
    async with rig.engine.begin() as conn:
        await ensure_partitions(conn, month.end.date() - timedelta(days=1), 3)
    await rig.bill(event(10, at_ms=last), event(5, at_ms=last + 1))
    await budgets.sync(now=month.end - timedelta(seconds=1))
    assert (await hash_of(rig))["spent"] == 10 * CENT
    await budgets.sync(now=month.end)
    assert (await hash_of(rig))["spent"] == 5 * CENT
    spent = await begin(rig, spent_in, ORG, scope="org", scope_id=ORG, period=month)
    assert spent == 10 * CENT, "the hour that midnight cuts is split"


async def test_a_soft_budget_limits_nothing_and_a_removed_one_neither(rig):
    await budget(rig, 100, hard=False)
    budgets = Budgets(rig.engine, rig.redis)
    await budgets.sync(now=now())
    assert "limit" not in await hash_of(rig)
    assert await hard_budgets(rig, "p", "k") == set()
    await budget(rig, 100)
    await budgets.sync(now=now())
    assert (await hash_of(rig))["limit"] == 100 * CENT
    assert await begin(rig, remove_budget, ORG, "org", ORG)
    await budgets.drop(ORG, "org", ORG)
    assert "limit" not in await hash_of(rig)
    assert await begin(rig, budgets_of, ORG) == []


async def test_a_prepaid_organisation_may_use_what_it_was_granted(rig):
    await begin(rig, set_profile, Profile(organisation=ORG, prepaid=True))
    await begin(rig, grant, ORG, NewGrant(kind="paid", amount=50 * CENT, idempotency="a"), at=now())
    await rig.bill(event(20))
    await Budgets(rig.engine, rig.redis).sync(now=now())
    seen = await hash_of(rig, "credit")
    assert (seen["limit"], seen["spent"]) == (50 * CENT, 20 * CENT)
    assert "ends_ms" not in seen
    assert await hard_budgets(rig, "p", "k") == {"credit"}


@pytest.mark.parametrize(
    "terms",
    [{"scope": "team"}, {"amount": -1}, {"amount": 2**53 + 1}, {"scope_id": "org_other"}, {"thresholds": (0,)}],
)
async def test_a_budget_that_makes_no_sense_is_refused(rig, terms):
    fields = {"organisation": ORG, "scope": "org", "scope_id": ORG, "amount": 1} | terms
    with pytest.raises(BudgetError):
        await begin(rig, set_budget, Budget(**fields))


# -- alerts ----------------------------------------------------------------------------------------------


class Receiver:
    """A server for webhooks, in process: fails so often, then takes them."""

    def __init__(self, fail=0):
        self.fail = fail
        self.got = []

    def __call__(self, request):
        self.got.append(request)
        return httpx.Response(500 if len(self.got) <= self.fail else 200)


def webhooks(rig, receiver, clock):
    client = httpx.AsyncClient(transport=httpx.MockTransport(receiver))
    return Webhooks(rig.engine, client, now_ms=lambda: clock[0])


async def test_each_threshold_is_told_once_a_month_signed_and_tried_again(rig):
    secret = "whsec"
    await begin(
        rig, set_profile, Profile(organisation=ORG, webhook_url="https://acme.example/hook", webhook_secret=secret)
    )
    await budget(rig, 100)
    await rig.bill(event(49))
    assert await begin(rig, raise_alerts, now=now()) == []
    await rig.bill(event(40))
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        raised = [tasks.create_task(begin(rig, raise_alerts, now=now())) for _ in range(3)]
    assert sorted(alert.threshold for task in raised for alert in task.result()) == [50, 80]
    receiver, clock = Receiver(fail=1), [now_ms() + 60_000]
    sender = webhooks(rig, receiver, clock)
    assert await sender.send_due() == 1
    assert await sender.send_due() == 0, "the one that failed waits"
    clock[0] += 31_000
    assert await sender.send_due() == 1
    clock[0] += 10**9
    assert await sender.send_due() == 0
    ids = [request.headers["pdgate-webhook-id"] for request in receiver.got]
    assert (len(ids), len(set(ids))) == (3, 2), "the receiver can tell the repeat"
    for request in receiver.got:
        stamp, mac = (part.partition("=")[2] for part in request.headers["pdgate-signature"].split(","))
        right = hmac.new(secret.encode(), f"{stamp}.".encode() + request.content, hashlib.sha256).hexdigest()
        assert mac == right
    bodies = [json.loads(request.content) for request in receiver.got]
    assert {body["data"]["threshold"] for body in bodies} == {50, 80}
    assert {body["data"]["spent_nano"] for body in bodies} == {89 * CENT}
    await rig.bill(event(20))
    assert [alert.threshold for alert in await begin(rig, raise_alerts, now=now())] == [100]


async def test_a_receiver_that_never_answers_is_given_up_after_twelve_tries(rig):
    await begin(rig, set_profile, Profile(organisation=ORG, webhook_url="https://a.example", webhook_secret="s"))
    await budget(rig, 1, thresholds=(100,))
    await rig.bill(event(1))
    await begin(rig, raise_alerts, now=now())
    receiver, clock = Receiver(fail=100), [now_ms() + 60_000]
    sender = webhooks(rig, receiver, clock)
    for _ in range(20):
        assert await sender.send_due() == 0
        clock[0] += 10**8
    assert len(receiver.got) == MAX_TRIES
    row = await rig.one("SELECT * FROM billing.webhook")
    assert (row.delivered_at, row.last_error) == (None, "HTTP 500")
    assert row.given_up_at is not None


async def test_a_webhook_without_a_secret_or_a_zone_that_does_not_exist_is_refused(rig):
    for profile in (
        Profile(organisation=ORG, webhook_url="https://a.example"),
        Profile(organisation=ORG, webhook_url="ftp://a.example", webhook_secret="s"),
        Profile(organisation=ORG, time_zone="Nowhere"),
        Profile(organisation=ORG, tax_ppm=1_000_001),
    ):
        with pytest.raises(ValueError, match=r"webhook|zone|tax_ppm"):
            await begin(rig, set_profile, profile)
