"""The price book only grows, never changes the past, and follows the catalogue without undoing an admin."""

import asyncio

import asyncpg
import msgspec
import pytest
from billing_rig import now_ms, usage_event
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError

from billing.database import create_engine
from billing.prices import PriceCache, PriceError, Terms, list_prices, read_book, set_price, sync_catalog
from billing.queries import current_prices, price_in_force
from contracts.rating import Meter

FLAT = dict.fromkeys(Meter, 5_000_000)


def with_decode(catalog, text):
    model = catalog.models["tiny"]
    changed = msgspec.structs.replace(model, price=msgspec.structs.replace(model.price, decode=text))
    return msgspec.structs.replace(catalog, models={"tiny": changed})


async def test_a_catalogue_price_is_version_1_from_the_epoch_and_is_added_once(engine, catalog):
    async with engine.begin() as conn:
        (added,) = await sync_catalog(conn, catalog)
        assert await sync_catalog(conn, catalog) == []
        assert (added.price.version, added.from_ms, added.to_ms, added.source) == (1, 0, None, "catalogue")
        # "0.10" units per million tokens = 0.10 x 10^9 nano-units per million tokens
        assert (added.price.prefill_computed, added.price.prefill_cached, added.price.decode) == (
            100_000_000,
            20_000_000,
            400_000_000,
        )
        assert await list_prices(conn) == [added]


async def test_a_changed_file_takes_effect_now_and_an_unchanged_one_does_not_undo_an_admin(engine, catalog):
    dearer = with_decode(catalog, "0.50")
    async with engine.begin() as conn:
        await sync_catalog(conn, catalog)
        before = now_ms()
        (second,) = await sync_catalog(conn, dearer)
        assert second.price.version == 2
        assert second.from_ms >= before - 1
        third = await set_price(conn, model="tiny", meters=FLAT, set_by="admin@example.org")
        assert await sync_catalog(conn, dearer) == [], "the file did not change since"
        assert (await price_in_force(conn, "tiny", third.from_ms)) == third.price
        (fourth,) = await sync_catalog(conn, catalog)
        assert fourth.price.version == 4


async def test_a_model_that_only_an_admin_priced_is_left_alone(engine, catalog):
    async with engine.begin() as conn:
        await set_price(conn, model="tiny", meters=FLAT, from_ms=0)
        assert await sync_catalog(conn, catalog) == []


async def test_a_price_may_not_start_in_the_past_once_the_model_is_priced(engine, catalog):
    async with engine.begin() as conn:
        await sync_catalog(conn, catalog)
        with pytest.raises(PriceError, match="cannot start in the past"):
            await set_price(conn, model="tiny", meters=FLAT, from_ms=now_ms() - 60_000)
        with pytest.raises(PriceError, match="cannot start in the past"):
            await set_price(conn, model="tiny", meters=FLAT, from_ms=0, organisation="org_acme")
        with pytest.raises(PriceError, match="must end"):
            await set_price(conn, model="tiny", meters=FLAT, from_ms=now_ms() + 9000, to_ms=now_ms() + 8000)
        with pytest.raises(PriceError, match="needs prefill_computed"):
            await set_price(conn, model="tiny", meters={Meter.DECODE: 1})


async def test_versions_cannot_be_changed_or_deleted(engine, catalog):
    async with engine.begin() as conn:
        await sync_catalog(conn, catalog)
    for statement in ("UPDATE billing.price SET decode = 0", "DELETE FROM billing.price"):
        with pytest.raises(DBAPIError, match="price only appends"):
            async with engine.begin() as conn:
                await conn.exec_driver_sql(statement)


async def test_the_prices_of_today_are_the_newest_that_started_and_did_not_end(engine, catalog):
    async with engine.begin() as conn:
        await sync_catalog(conn, catalog)
        await set_price(conn, model="tiny", meters=FLAT, from_ms=now_ms() + 3_600_000)
        await set_price(conn, model="tiny", meters=FLAT, organisation="org_acme")
        await set_price(conn, model="other", meters=FLAT, from_ms=0)
        found = await current_prices(conn)
    assert {model: price.version for model, price in found.items()} == {"tiny": 1, "other": 1}


async def test_a_book_read_while_a_price_is_being_set_waits_for_it(engine, catalog):
    async with engine.begin() as conn:
        await sync_catalog(conn, catalog)
    cache = PriceCache(engine)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        async with engine.begin() as conn:
            second = await set_price(conn, model="tiny", meters=FLAT)
            reading = tasks.create_task(cache.fresh())
        book = await reading
    assert book.read_at_ms >= second.from_ms
    assert book.in_force("tiny", second.from_ms) == second.price


async def test_a_request_after_a_price_change_is_rated_by_it_although_the_book_was_read_before(rig):
    await rig.bill(usage_event())
    async with rig.engine.begin() as conn:
        second = await set_price(conn, model="tiny", meters=FLAT)
    old, new = usage_event(at_ms=second.from_ms - 1), usage_event(at_ms=second.from_ms, price=second.price)
    delivery = rig.consumer()
    await rig.emit(old, new)
    await rig.consume(delivery, 2)
    versions = {str(row.request_id): row.price_version for row in await rig.rows("SELECT * FROM billing.request")}
    assert (versions[old.rid], versions[new.rid]) == (1, 2)


MOMENTS = st.integers(0, 6)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(MOMENTS, st.none() | MOMENTS, st.sampled_from([None, "org_acme"])), max_size=5),
    MOMENTS,
    st.sampled_from([None, "org_acme", "org_other"]),
)
def test_book_and_query_agree_on_every_price(postgres_url, versions, moment, organisation):
    async def compare():
        connection = await asyncpg.connect(postgres_url)
        await connection.execute("TRUNCATE billing.price CASCADE")
        start = now_ms() + 60_000
        engine = create_engine(postgres_url)
        try:
            async with engine.begin() as conn:
                for number, (first, length, payer) in enumerate(versions, 1):
                    to_ms = None if length is None else start + first + length + 1
                    await set_price(
                        conn,
                        model="tiny",
                        meters=dict.fromkeys(Meter, number),
                        from_ms=start + first,
                        to_ms=to_ms,
                        organisation=payer,
                    )
                book = await read_book(conn)
                at = start + moment
                assert book.in_force("tiny", at, organisation) == await price_in_force(conn, "tiny", at, organisation)
        finally:
            await engine.dispose()
            await connection.execute("TRUNCATE billing.price CASCADE")
            await connection.close()

    asyncio.run(compare())


async def test_a_gateway_with_a_price_of_seconds_ago_and_billing_charge_the_same(rig):
    """The gateway's copy of the book is up to seconds old: what it told the client is what is charged."""
    async with rig.engine.begin() as conn:
        second = await set_price(conn, model="tiny", meters=FLAT)
    told = usage_event(at_ms=second.from_ms + 2_000)  # answered by version 1
    await rig.bill(told)
    row = await rig.one("SELECT price_version, cost, answered_cost FROM billing.request")
    assert (row.price_version, row.cost, row.answered_cost) == (1, told.cost, told.cost)


async def test_a_tiers_and_an_organisations_price_go_before_the_list_price(engine, catalog):
    async with engine.begin() as conn:
        await sync_catalog(conn, catalog)
        fast = await set_price(conn, model="tiny", meters=FLAT, terms=Terms(tier="fast"))
        acme = await set_price(conn, model="tiny", meters=FLAT, organisation="org_acme")
        both = await set_price(conn, model="tiny", meters=FLAT, organisation="org_acme", terms=Terms(tier="fast"))
        book = await read_book(conn)
        cases = {
            ("org_x", "default"): 1,
            ("org_x", "fast"): fast.price.version,
            ("org_acme", "default"): acme.price.version,
            ("org_acme", "fast"): both.price.version,
        }
        for (org, tier), version in cases.items():
            asked = await price_in_force(conn, "tiny", book.read_at_ms, org, tier)
            assert asked == book.in_force("tiny", book.read_at_ms, org, tier)
            assert asked.version == version
        assert (await current_prices(conn))["tiny"].version == 1
        with pytest.raises(PriceError, match="batch_ppm"):
            await set_price(conn, model="tiny", meters=FLAT, terms=Terms(batch_ppm=1_000_001))
