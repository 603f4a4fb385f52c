"""The demo week: rated and posted as any traffic, and in nobody's way."""

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial

from billing_rig import Rig, now_ms, usage_event

from billing.invoice_book import tenants_to_invoice_across_tenants
from billing.partitions import ensure_partitions
from billing.periods import month_of
from billing.queries import recent_requests_across_tenants, usage_totals, usage_totals_across_tenants
from billing.reconcile import reconcile
from contracts.catalog import Catalog
from contracts.demo import DEMO_WEEK_ORG
from contracts.identity import at_ms
from contracts.rating import Price
from contracts.slo import SloTarget
from contracts.units import NanoPerMillion
from contracts.usage import Outcome
from gateway.tenants import Tenants
from pdgate.demo_traffic import KEYS, WEEK_S, DemoKey, Week, played
from pdgate.demo_week import play_week
from tests.processes import until

WEEK_MS = WEEK_S * 1000
SHARE = 0.05
UNSERVED = 5
"""Interrupted ones, at most: no worker writes a record of those."""


def a_week(end_ms: int, **changes: object) -> Week:
    price = Price(
        version=1, model="tiny", prefill_computed=NanoPerMillion(100), prefill_cached=NanoPerMillion(20),
        decode=NanoPerMillion(400),
    )  # fmt: skip
    owners = {key: DemoKey(project=project, key_id=key) for project, names in KEYS.items() for key in names}
    fields = {
        "end_unix_ms": end_ms, "model": "tiny", "pool": "tiny", "price": price, "context_tokens": 2048,
        "target": SloTarget(ttft_ms=4000, tpot_ms=400), "owners": owners, "share": 0.1,
    } | changes  # fmt: skip
    return Week(**fields)


def test_the_week_is_the_same_each_time_lies_in_its_days_and_fits_the_model() -> None:
    end_ms = 1_795_000_000_000
    requests = played(a_week(end_ms))
    assert requests == played(a_week(end_ms))
    events = [one.event for one in requests]
    assert all(end_ms - WEEK_MS <= at_ms(event.rid) <= end_ms for event in events)
    assert all(event.tokens.prompt + event.tokens.decode <= 2048 for event in events)
    assert len({event.rid for event in events}) == len(events) > 100
    assert all(sum(record.completion_tokens for record in one.records) == one.event.tokens.decode
               for one in requests if one.event.outcome is Outcome.FINISHED)  # fmt: skip


async def test_a_played_week_is_billed_once_and_reconciles_and_others_never_see_it(rig: Rig, catalog: Catalog) -> None:
    end_ms = now_ms() - 60_000
    today = datetime.now(UTC).date()
    async with rig.engine.begin() as conn:
        await ensure_partitions(conn, today - timedelta(days=8), 12)

    async def recorded(at_least: int) -> bool:
        found: int = await rig.scalar("SELECT count(DISTINCT request_id) FROM billing.attempt_cost")
        return found >= at_least

    async def play() -> int:
        async with asyncio.TaskGroup() as tasks:
            billing = [tasks.create_task(rig.consumer().run()), tasks.create_task(rig.attempt_consumer().run())]
            number = await play_week(rig.engine, rig.redis, catalog, end_ms, share=SHARE)
            await until(partial(recorded, number - UNSERVED), 30)
            for task in billing:
                task.cancel()
        return number

    number = await play()
    cost = await rig.scalar("SELECT sum(cost) FROM billing.request")
    await rig.bill(usage_event())
    assert await play() == number
    assert await rig.scalar("SELECT count(*) FROM billing.request") == number + 1
    demo_cost = await rig.scalar(
        "SELECT sum(cost) FROM billing.usage_hourly WHERE organisation = :demo", demo=DEMO_WEEK_ORG
    )
    assert demo_cost == cost > 0

    async def agrees(organisation: str | None) -> tuple[set[str], bool]:
        async with rig.engine.connect() as conn:
            found = await reconcile(
                conn, from_day=today - timedelta(days=8), to_day=today, now_ms=now_ms(), organisation=organisation,
                grace_s=0 if organisation else 600,
            )  # fmt: skip
        return {day.organisation for day in found.days}, found.drift

    assert await agrees(None) == ({"org_acme"}, False)
    assert await agrees(DEMO_WEEK_ORG) == ({DEMO_WEEK_ORG}, False)
    async with rig.engine.connect() as conn:
        since_ms = end_ms - WEEK_MS - 3_600_000
        assert {one.organisation for one in await usage_totals_across_tenants(conn, since_ms)} == {"org_acme"}
        assert len(await recent_requests_across_tenants(conn, since_ms)) == 1
        (decode,) = [one for one in await usage_totals(conn, DEMO_WEEK_ORG, since_ms) if one.meter == "decode"]
        assert decode.requests == number
        assert await tenants_to_invoice_across_tenants(conn, month_of(datetime.now(UTC))) == ["org_acme"]
    organisation = await Tenants(rig.engine).find_organisation(DEMO_WEEK_ORG)
    assert organisation is not None
    assert organisation.is_demo
