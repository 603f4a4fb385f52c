"""A price is played on usage of the past before it is set: what it says is what setting it and re-rating then does."""

import asyncio
import json
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from billing_rig import now_ms, usage_event
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sqlalchemy import text
from typer.testing import CliRunner

from billing.corrections import Wanted, correct
from billing.moments import moment
from billing.partitions import ensure_partitions
from billing.periods import month_before, month_of
from billing.price_preview import Proposal, preview_price
from billing.prices import PriceError, Terms, list_prices, price_of, set_price
from billing.rerating import Rerating, rerate
from contracts.rating import CacheScope, Meter, Tokens, cost
from contracts.usage import Outcome
from pdgate.cli import app

NOW = datetime.now(UTC)
MONTH = month_of(NOW)
ACME, OWN = "org_acme", "org_own_price"
EURO = 1_000_000_000


def meters(computed, cached, decode):
    return dict(zip(Meter, (computed, cached, decode), strict=True))


def proposal(prices, *, organisation=None, **terms):
    # An hour beyond: requests of the tests may be dated a little after now.
    return Proposal(
        price=price_of("tiny", prices, Terms(**terms), version=0), organisation=organisation,
        from_at=NOW - timedelta(days=1), to_at=NOW + timedelta(hours=1),
    )  # fmt: skip


async def seen(rig, proposed):
    async with rig.engine.connect() as conn:
        await conn.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        return await preview_price(conn, proposed)


async def own_price(rig, organisation, prices, **terms):
    """A price in force since before every request of the tests."""
    async with rig.engine.begin() as conn:
        made = await set_price(conn, model="tiny", meters=prices, organisation=organisation, terms=Terms(**terms))
        await conn.execute(text("ALTER TABLE billing.price DISABLE TRIGGER USER"))
        await conn.execute(
            text("UPDATE billing.price SET effective_from = :at WHERE version = :version AND model = 'tiny'"),
            {"at": NOW - timedelta(days=30), "version": made.price.version},
        )
        await conn.execute(text("ALTER TABLE billing.price ENABLE TRIGGER USER"))
    return made.price


async def test_a_proposed_price_says_old_new_and_difference_by_organisation_and_meter_and_writes_nothing(rig):
    special = await own_price(rig, OWN, meters(1_000_000_000, 1_000_000_000, 1_000_000_000))
    tokens = Tokens(prefill_computed=1_000_000, prefill_cached=500_000, decode=1_000_000)
    await rig.bill(
        usage_event(tokens=tokens),  # 0.10 + 0.01 + 0.40
        usage_event(tokens=tokens, batch=True),
        usage_event(tokens=tokens, org=OWN, price=special),
        usage_event(tokens=tokens, outcome=Outcome.INTERRUPTED),
        usage_event(tokens=Tokens(decode=1)),
    )
    before = await rig.rows("SELECT (SELECT count(*) FROM billing.price), (SELECT count(*) FROM billing.rerating_line)")
    found = await seen(rig, proposal(meters(200_000_000, 20_000_000, 300_000_000), batch_ppm=500_000, minimum=1000))
    assert [(c.organisation, c.meter, c.requests, c.old_cost, c.new_cost) for c in found] == [
        (ACME, "decode", 3, 2 * 400_000_000 + 400, 300_000_000 + 150_000_000 + 300),
        (ACME, "minimum_charge", 1, 0, 700),  # of the one with a single token: 300 of 1000
        (ACME, "prefill_cached", 1, 2 * 10_000_000, 10_000_000 + 5_000_000),  # the batch one is cheaper
        (ACME, "prefill_computed", 1, 2 * 100_000_000, 200_000_000 + 100_000_000),  # the batch one stays as dear
        (OWN, "decode", 0, EURO, EURO),  # keeps its own price
        (OWN, "prefill_cached", 0, EURO // 2, EURO // 2),
        (OWN, "prefill_computed", 0, EURO, EURO),
    ]
    after = await rig.rows("SELECT (SELECT count(*) FROM billing.price), (SELECT count(*) FROM billing.rerating_line)")
    assert after == before


async def test_a_proposal_that_makes_no_sense_is_refused(rig):
    right = proposal(meters(1, 1, 1))
    for wrong, words in (
        (replace(right, price=price_of("nothing", meters(1, 1, 1), Terms(), version=0)), "has no price"),
        (replace(right, from_at=right.to_at, to_at=right.from_at), "must end"),
        (replace(right, from_at=right.to_at - timedelta(days=401)), "at most 400 days"),
    ):
        with pytest.raises(PriceError, match=words):
            await seen(rig, wrong)


async def test_usage_of_several_days_is_summed_whole(rig):
    days = [now_ms() - n * 86_400_000 for n in (1, 2, 3)]
    async with rig.engine.begin() as conn:
        await ensure_partitions(conn, moment(min(days)).date(), 5)
    await rig.bill(*(usage_event(at_ms=at, tokens=Tokens(decode=1_000_000)) for at in days))
    wanted = proposal(meters(100_000_000, 20_000_000, 500_000_000))
    (found,) = await seen(rig, replace(wanted, from_at=moment(min(days)), to_at=moment(max(days) + 1)))
    assert (found.requests, found.old_cost, found.new_cost) == (3, 3 * 400_000_000, 3 * 500_000_000)


async def test_a_request_that_a_narrower_price_was_in_force_for_is_not_re_rated_at_the_list_price(rig):
    special = await own_price(rig, OWN, meters(1, 1, 200_000_000))
    await rig.bill(usage_event(org=OWN, price=special, tokens=Tokens(decode=1_000_000)))
    async with rig.engine.begin() as conn:
        listed = await set_price(conn, model="tiny", meters=meters(1, 1, 900_000_000))
    wanted = {
        "model": "tiny", "price_version": listed.price.version, "from_at": NOW - timedelta(days=1),
        "to_at": NOW + timedelta(hours=1), "reason": "dearer",
    }  # fmt: skip
    async with rig.engine.begin() as conn:
        assert await rerate(conn, Rerating(id=uuid.uuid4(), **wanted), now=NOW) == []
    (rid,) = await rig.one("SELECT request_id FROM billing.request")
    async with rig.engine.begin() as conn:  # half the tokens cost half of its own price
        done = await correct(
            conn, Wanted(id=uuid.uuid4(), request_id=rid, decode=500_000, reason="counted twice"), now=NOW
        )
    assert (done.old_cost, done.new_cost) == (200_000_000, 100_000_000)
    async with rig.engine.begin() as conn:  # an agreement with the one organisation goes before its own price
        (change,) = await rerate(conn, Rerating(id=uuid.uuid4(), organisation=OWN, **wanted), now=NOW)
    assert change.new_cost == 450_000_000


prices = st.fixed_dictionaries({meter: st.integers(0, 2_000_000_000) for meter in Meter})
terms = st.fixed_dictionaries({
    "tier": st.sampled_from([None, "default", "fast"]),
    "prefill_shared": st.none() | st.integers(0, 10**9),
    "batch_ppm": st.integers(0, 1_000_000),
    "minimum": st.sampled_from([0, 1, 50_000]),
})  # fmt: skip
counts = st.integers(0, 3_000)
requests = st.lists(
    st.fixed_dictionaries({
        "org": st.sampled_from([ACME, OWN]),
        "tier": st.sampled_from(["default", "fast"]),
        "batch": st.booleans(),
        "cache_scope": st.sampled_from(list(CacheScope)),
        "outcome": st.sampled_from([Outcome.FINISHED, Outcome.FINISHED, Outcome.INTERRUPTED]),
        "tokens": st.builds(Tokens, prefill_computed=counts, prefill_cached=counts, decode=counts),
    }),
    min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    used=requests, new=prices, how=terms, payer=st.sampled_from([None, ACME, OWN]), own=st.none() | terms,
    corrected=st.booleans(),
)  # fmt: skip
async def test_setting_the_price_and_re_rating_changes_what_the_preview_said(
    rig, used, new, how, payer, own, corrected
):
    """Whatever was used, discounted, corrected, re-rated before, and whoever has a price of their own."""
    await rig.engine.dispose()
    async with rig.engine.begin() as conn:
        await conn.execute(
            text("""
            TRUNCATE billing.request, billing.usage_record, billing.usage_hourly, billing.ledger_entry,
                billing.ledger_transaction, billing.rerating, billing.rerating_line, billing.correction CASCADE""")
        )
        await conn.execute(text("ALTER TABLE billing.price DISABLE TRIGGER USER"))
        await conn.execute(text("DELETE FROM billing.price WHERE version > 1"))
        await conn.execute(text("ALTER TABLE billing.price ENABLE TRIGGER USER"))
    if own is not None:
        await own_price(rig, OWN, meters(7_000_000, 3_000_000, 11_000_000), **own)
    events = [usage_event(**one) for one in used]
    await rig.bill(*events)
    if corrected and events[0].outcome.billable and events[0].tokens != Tokens():
        async with rig.engine.begin() as conn:
            await correct(
                conn, Wanted(id=uuid.uuid4(), request_id=uuid.UUID(events[0].rid), decode=77, reason="recounted"),
                now=NOW,
            )  # fmt: skip
    proposed = proposal(new, organisation=payer, **how)
    said = await seen(rig, proposed)
    async with rig.engine.begin() as conn:
        made = await set_price(conn, model="tiny", meters=new, organisation=payer, terms=Terms(**how))
        done = await rerate(
            conn,
            Rerating(
                id=uuid.uuid4(), model="tiny", price_version=made.price.version, organisation=payer,
                from_at=proposed.from_at, to_at=proposed.to_at, reason="as previewed",
            ),
            now=NOW,
        )  # fmt: skip
    assert deltas(done) == deltas(said)
    async with rig.engine.connect() as conn:
        again = {(c.organisation, c.meter): c.old_cost for c in await preview_price(conn, proposed) if c.old_cost}
    assert again == {(c.organisation, c.meter): c.new_cost for c in said if c.new_cost}


def deltas(changes):
    return {(change.organisation, change.meter): change.delta for change in changes if change.delta}


async def test_the_first_price_of_an_untouched_model_is_previewed_as_contracts_rating_would_say(rig):
    events = [
        usage_event(batch=n % 2 == 0, tokens=Tokens(prefill_computed=n, prefill_cached=5 * n, decode=2 * n))
        for n in range(20)
    ]
    await rig.bill(*events)
    wanted = proposal(meters(123_456_789, 23_456_789, 333_333_333), batch_ppm=333_333, minimum=9_999)
    found = await seen(rig, wanted)
    assert sum(c.new_cost for c in found) == sum(cost(one.tokens, wanted.price, batch=one.batch) for one in events)
    assert sum(c.old_cost for c in found) == sum(one.cost for one in events)


async def test_the_command_line_previews_a_price_that_is_not_set(rig, database_url, catalog_file, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PDGATE_CATALOG", str(catalog_file))
    await rig.bill(usage_event(tokens=Tokens(decode=1_000_000)))
    price = ("prices", "preview", "tiny", "--computed", "0.1", "--cached", "0.02", "--decode", "0.5", "--json")
    period = ("--from", f"{NOW - timedelta(days=1):%Y-%m-%d}", "--to", f"{NOW + timedelta(days=1):%Y-%m-%d}")

    async def run(*words):
        done = await asyncio.to_thread(CliRunner().invoke, app, words)
        return done.exit_code, json.loads(done.stdout) if done.exit_code == 0 else done.output

    code, (row,) = await run(*price, *period)
    assert (code, row["organisation"], row["meter"]) == (0, ACME, "decode")
    assert (row["requests"], row["old"], row["new"], row["difference"]) == (1, "0.4", "0.5", "0.1")
    code, said = await run("prices", "preview", "tiny", "--decode", "1", *period)
    assert (code, "--version" in said) == (2, True)
    code, rows = await run(*price)
    assert (code, rows) == (0, []) or NOW.day == 1, "last month had no usage"
    async with rig.engine.connect() as conn:
        assert [one.price.version for one in await list_prices(conn, "tiny")] == [1]


def test_the_month_before_is_the_last_one_that_is_over():
    assert month_before(datetime(2026, 3, 31, 23, 59, tzinfo=UTC)).name == "2026-02"
    assert month_before(datetime(2026, 1, 1, tzinfo=UTC)).name == "2025-12"
