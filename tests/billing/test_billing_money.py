"""Credits, re-ratings, invoices and SLO credits, with the sums worked out by hand."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from billing_rig import now_ms, usage_event
from sqlalchemy import text

from billing import invoices
from billing.credits import (
    CreditError,
    NewGrant,
    apply_credits,
    expire_credits,
    funding,
    grant,
    grants_of,
    owed,
    use_credits,
)
from billing.invoice_book import InvoiceError, State, find_invoice
from billing.invoice_lines import cents
from billing.ledger import balance
from billing.periods import month_of
from billing.prices import Terms, list_prices, set_price
from billing.profiles import Profile, Seller, set_profile, set_seller
from billing.queries import price_in_force
from billing.rerating import RerateError, Rerating, preview, rerate
from billing.slo_credits import Promise, promise
from contracts.rating import CacheScope, Meter, Tokens, cost
from contracts.usage import Outcome

ORG = "org_acme"
CENT = 10_000_000
EURO = 100 * CENT
# 1,000,000 decode tokens cost 0.40 euro in the test catalogue
MILLION = Tokens(decode=1_000_000)
NOW = datetime.now(UTC)
MONTH = month_of(NOW)
AFTER = MONTH.end + timedelta(hours=3)


def event(euro_cents, **changes):
    """A request that costs so many cents: 25,000 decode tokens each."""
    return usage_event(tokens=Tokens(decode=25_000 * euro_cents), **changes)


async def begin(rig, call, *words, **names):
    async with rig.engine.begin() as conn:
        return await call(conn, *words, **names)


async def give(rig, amount, kind="paid", key=None, **terms):
    new = NewGrant(kind=kind, amount=amount, idempotency=key or str(uuid.uuid4()), **terms)
    return await begin(rig, grant, ORG, new, at=NOW)


async def close(rig, now=AFTER, period=MONTH, org=ORG):
    return await begin(rig, invoices.close_period, org, period, currency="EUR", now=now)


async def the_ledger_balances(rig):
    assert await rig.scalar("SELECT coalesce(sum(amount), 0) FROM billing.ledger_entry") == 0


async def receivable(rig, org=ORG):
    return await begin(rig, balance, f"receivable:{org}")


# -- credits ---------------------------------------------------------------------------------------------


async def test_a_top_up_with_the_same_key_is_granted_once_also_at_the_same_time(rig):
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(give(rig, 5 * EURO, key="pi_123")) for _ in range(5)]
    assert len({task.result()[0] for task in made}) == 1
    assert sorted(task.result()[1] for task in made) == [False] * 4 + [True]
    assert await begin(rig, balance, "cash") == 5 * EURO
    with pytest.raises(CreditError, match="was used for paid credit"):
        await give(rig, 6 * EURO, key="pi_123")


async def test_credit_is_used_by_priority_then_expiry_and_paid_credit_is_deferred_revenue(rig):
    late, soon = NOW + timedelta(days=60), NOW + timedelta(days=30)
    paid, _ = await give(rig, 3 * EURO, priority=200)
    later, _ = await give(rig, EURO, kind="promotional", expires_at=late)
    sooner, _ = await give(rig, EURO, kind="promotional", expires_at=soon)
    await rig.bill(event(150))
    assert await begin(rig, apply_credits, ORG, now=NOW) == 150 * CENT
    left = {one.id: one.left for one in await begin(rig, grants_of, ORG)}
    assert left == {sooner: 0, later: 50 * CENT, paid: 3 * EURO}
    assert await begin(rig, balance, "promotion_used") == 150 * CENT
    assert await begin(rig, balance, "promotion_open") == 50 * CENT
    assert await begin(rig, balance, f"credit:{paid}") == -3 * EURO, "earned only when it is used"
    assert await rig.scalar("SELECT kind FROM billing.account WHERE code = :code", code=f"credit:{paid}") == "deferred"
    assert await begin(rig, apply_credits, ORG, now=NOW) == 0, "again: nothing is owed"
    assert await begin(rig, owed, ORG) == await receivable(rig) == 0
    await the_ledger_balances(rig)


async def test_what_expires_is_breakage_if_it_was_paid_and_taken_back_if_not(rig):
    end = NOW + timedelta(days=1)
    await give(rig, 2 * EURO, expires_at=end, priority=2)
    await give(rig, EURO, kind="promotional", expires_at=end, priority=1)
    await rig.bill(event(50))
    await begin(rig, use_credits, ORG, now=end)  # what was used before is covered first, from what was given
    assert await begin(rig, balance, "breakage") == -2 * EURO
    assert await receivable(rig) == 0
    assert await begin(rig, balance, "promotion_open") == 0
    assert await begin(rig, expire_credits, ORG, now=end) == 0
    assert await begin(rig, funding, ORG) == 50 * CENT, "a prepaid organisation can use what did not expire"
    await the_ledger_balances(rig)


# -- re-rating -------------------------------------------------------------------------------------------


def rerating(version, **changes):
    fields = {
        "id": uuid.uuid4(),
        "model": "tiny",
        "price_version": version,
        "from_at": MONTH.start,
        "to_at": MONTH.end,
        "reason": "agreed discount",
    }
    return Rerating(**fields | changes)


async def new_price(rig, decode, **terms):
    async with rig.engine.begin() as conn:
        meters = {Meter.PREFILL_COMPUTED: 100_000_000, Meter.PREFILL_CACHED: 20_000_000, Meter.DECODE: decode}
        return (await set_price(conn, model="tiny", meters=meters, terms=Terms(**terms))).price.version


async def test_re_rating_posts_the_difference_once_with_an_audit_trail_and_the_next_one_starts_from_it(rig):
    await rig.bill(event(40), event(60), usage_event(outcome=Outcome.INTERRUPTED, tokens=MILLION))
    half, third = await new_price(rig, 200_000_000), await new_price(rig, 300_000_000)
    first = rerating(half)
    seen = await begin(rig, preview, first)
    changes = await begin(rig, rerate, first, now=NOW)
    assert changes == seen
    assert [(c.meter, c.requests, c.old_cost, c.new_cost) for c in changes] == [("decode", 2, EURO, 50 * CENT)]
    assert await receivable(rig) == 50 * CENT
    assert await begin(rig, rerate, first, now=NOW) == (), "the same id again"
    (second,) = await begin(rig, rerate, rerating(third), now=NOW)
    assert (second.old_cost, second.new_cost) == (50 * CENT, 75 * CENT)
    assert await receivable(rig) == 75 * CENT
    assert await begin(rig, balance, "revenue:decode") == -EURO, "what was posted stays"
    assert await begin(rig, balance, "adjustment:decode") == 25 * CENT
    rows = await rig.rows("SELECT old_cost, new_cost FROM billing.rerating_line ORDER BY old_cost, new_cost")
    assert len(rows) == 4
    audit = await rig.rows("SELECT reason, requests, delta FROM billing.rerating ORDER BY delta")
    assert [tuple(row) for row in audit] == [
        ("agreed discount", 2, -50 * CENT),
        ("agreed discount", 2, 25 * CENT),
    ]
    await the_ledger_balances(rig)


async def test_re_rating_in_sql_is_the_rating_of_contracts(rig):
    """Discount, shared scope and minimum: what the re-rating says is what the rating would have said."""
    events = [
        usage_event(
            batch=n % 2 == 0, cache_scope="shared" if n % 3 == 0 else "own",
            tokens=Tokens(prefill_computed=n, prefill_cached=7 * n, decode=3 * n),
        )
        for n in range(30)
    ]  # fmt: skip
    await rig.bill(*events)
    version = await new_price(rig, 333_333_333, batch_ppm=499_999, prefill_shared=44_444_444, minimum=20_000)
    await begin(rig, rerate, rerating(version), now=NOW)
    async with rig.engine.begin() as conn:
        price = next(v.price for v in await list_prices(conn, "tiny") if v.price.version == version)
    right = sum(cost(one.tokens, price, batch=one.batch, scope=CacheScope(one.cache_scope)) for one in events)
    assert await receivable(rig) == right


async def test_a_re_rating_that_names_no_version_or_another_ones_price_is_refused(rig):
    async with rig.engine.begin() as conn:
        own = await set_price(conn, model="tiny", meters=dict.fromkeys(Meter, 1), organisation="org_other")
    for wanted, words in (
        (rerating(99), "no price version 99"),
        (rerating(own.price.version), "org_other's own"),
        (rerating(1, to_at=MONTH.start), "must end"),
    ):
        with pytest.raises(RerateError, match=words):
            await begin(rig, rerate, wanted, now=NOW)


# -- invoices --------------------------------------------------------------------------------------------


async def test_an_invoice_has_a_line_per_project_model_meter_and_version_and_asks_for_what_the_ledger_says(rig):
    await begin(
        rig, set_seller, Seller(legal_name="pdgate GmbH", country="DE", tax_id="DE1", address="Weg 1", email="")
    )
    await begin(
        rig, set_profile,
        Profile(organisation=ORG, legal_name="Acme SA", country="FR", tax_id="FR2", tax_name="VAT", tax_ppm=190_000),
    )  # fmt: skip
    await rig.bill(event(100), event(50, project="proj_b"), usage_event(tokens=Tokens(prefill_computed=1)))
    second = await new_price(rig, 800_000_000)
    async with rig.engine.begin() as conn:
        price = await price_in_force(conn, "tiny", now_ms() + 1000, ORG)
    assert price.version == second
    await rig.bill(usage_event(tokens=Tokens(decode=125_000), price=price, cost=10 * CENT, at_ms=now_ms() + 1000))
    made = await close(rig)
    lines = [(line.project, line.meter, line.price_version, line.amount_cents) for line in made.lines]
    assert lines == [
        ("proj_b", "decode", 1, 50),
        ("proj_web", "prefill_computed", 1, 0),  # 100 nano-units
        ("proj_web", "decode", 1, 100),
        ("proj_web", "decode", 2, 10),
    ]
    assert (made.subtotal_cents, made.tax_cents, made.total_cents, made.due_cents) == (160, 30, 190, 190)  # 30.4
    assert (made.seller["legal_name"], made.buyer["tax_id"], made.state) == ("pdgate GmbH", "FR2", State.DRAFT)
    assert await receivable(rig) == 190 * CENT, "to the nano-unit"
    assert await begin(rig, balance, "rounding") == 100, "100 nano-units that no cent asks for"
    assert await begin(rig, owed, ORG) == 0
    assert await close(rig) == made, "closing again"
    await the_ledger_balances(rig)


@pytest.mark.parametrize(
    ("nano", "whole"),
    [
        *((0, 0), (4_999_999, 0), (5_000_000, 0), (15_000_000, 2), (15_000_001, 2), (25_000_000, 2)),
        *((-5_000_000, 0), (-15_000_000, -2), (-5_000_001, -1)),
    ],
)
def test_a_line_is_rounded_half_to_even(nano, whole):
    assert cents(nano) == whole


async def test_numbers_have_no_gaps_whoever_issues_at_once_or_fails_in_between(rig):
    orgs = [f"org_{n}" for n in range(8)]
    await rig.bill(*(event(10, org=org) for org in orgs))
    made = [await close(rig, org=org) for org in orgs]

    async def die_before_the_commit():
        async with rig.engine.begin() as conn:
            await invoices.issue(conn, orgs[0], made[0].id, now=AFTER)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await die_before_the_commit()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        issued = [
            tasks.create_task(begin(rig, invoices.issue, org, one.id, now=AFTER))
            for org, one in zip(orgs, made, strict=True)
        ]
    numbers = sorted(task.result().number for task in issued)
    assert numbers == [f"INV-{AFTER.year}-{n:06d}" for n in range(1, 9)]
    again = await begin(rig, invoices.issue, orgs[0], made[0].id, now=AFTER)
    assert again.number == issued[0].result().number


async def test_a_month_is_not_closed_before_its_cut_off_nor_after_a_later_one(rig):
    await rig.bill(event(10))
    with pytest.raises(InvoiceError, match="closes at"):
        await close(rig, now=MONTH.end + timedelta(hours=1))
    await close(rig)
    earlier = month_of(MONTH.start - timedelta(days=1))
    with pytest.raises(InvoiceError, match="a month after"):
        await close(rig, period=earlier)


async def test_usage_that_comes_after_its_months_invoice_is_on_the_next_one_and_so_is_a_re_rating(rig):
    next_month = month_of(MONTH.end)
    await rig.bill(event(100))
    first = await close(rig)
    await rig.bill(event(7))  # settled late, of the closed month
    version = await new_price(rig, 200_000_000)
    await begin(rig, rerate, rerating(version, reason="too dear"), now=next_month.start + timedelta(days=2))
    assert await close(rig) == first
    second = await close(rig, period=next_month, now=next_month.end + timedelta(hours=3))
    assert [(line.kind, line.amount_cents, line.description) for line in second.lines] == [
        ("late", 7, f"Usage of {MONTH.name} that came after its invoice"),
        ("adjustment", -54, "Re-rated: too dear"),  # half of 107 cents: -53.5, to even
    ]
    assert await begin(rig, owed, ORG) == 0
    assert await receivable(rig) == (first.due_cents + second.due_cents) * CENT
    await the_ledger_balances(rig)


async def test_credit_covers_the_invoice_and_what_exceeds_it_is_credit_again(rig):
    await give(rig, 30 * CENT)
    await rig.bill(event(100))
    await begin(rig, use_credits, ORG, now=datetime.now(UTC))
    await give(rig, 20 * CENT, kind="promotional")
    made = await close(rig)
    assert (made.total_cents, made.credits_cents, made.due_cents) == (100, 50, 50)
    assert await receivable(rig) == 50 * CENT
    issued = await begin(rig, invoices.issue, ORG, made.id, now=AFTER)
    assert issued.state is State.ISSUED
    paid = await begin(
        rig, invoices.pay, ORG, made.id, provider="manual", reference="bank 1", amount_cents=60, now=AFTER
    )
    assert paid.state is State.PAID
    assert await receivable(rig) == 0
    assert sum(one.left for one in await begin(rig, grants_of, ORG)) == 10 * CENT, "ten cents too much"
    again = await begin(
        rig, invoices.pay, ORG, made.id, provider="manual", reference="bank 1", amount_cents=60, now=AFTER
    )
    assert again == paid
    assert await begin(rig, balance, "cash") == (30 + 60) * CENT
    assert await begin(rig, owed, ORG) == 0
    await the_ledger_balances(rig)


async def test_an_invoice_with_nothing_due_is_paid_when_issued(rig):
    await give(rig, EURO)
    await rig.bill(event(10))
    made = await close(rig)
    assert (made.due_cents, made.credits_cents) == (0, 10)
    assert (await begin(rig, invoices.issue, ORG, made.id, now=AFTER)).state is State.PAID


async def test_a_credit_note_reduces_what_is_due_with_its_tax_and_of_a_paid_invoice_becomes_credit(rig):
    await begin(rig, set_profile, Profile(organisation=ORG, tax_ppm=200_000))
    await rig.bill(event(100))
    made = await close(rig)
    with pytest.raises(InvoiceError, match="draft"):
        await note(rig, made, 10)
    await begin(rig, invoices.issue, ORG, made.id, now=AFTER)
    first = await note(rig, made, 50)
    assert (first.number, first.total_cents, first.due_cents) == (f"CN-{AFTER.year}-000001", 60, 60)
    assert await note(rig, made, 50) == first, "the same key again"
    assert await receivable(rig) == 60 * CENT
    await begin(rig, invoices.pay, ORG, made.id, provider="manual", reference="b", amount_cents=60, now=AFTER)
    second = await note(rig, made, 25, key="second")
    assert (second.total_cents, second.due_cents, second.credits_cents) == (30, 0, 30)
    assert await receivable(rig) == 0
    assert sum(one.left for one in await begin(rig, grants_of, ORG)) == 30 * CENT
    with pytest.raises(InvoiceError, match="at most 25 cents"):
        await note(rig, made, 26, key="third")
    assert await begin(rig, balance, "tax") == -(20 - 10 - 5) * CENT
    assert await begin(rig, owed, ORG) == 0
    await the_ledger_balances(rig)


async def note(rig, made, amount, key="first"):
    return await begin(
        rig, invoices.credit_note, ORG, made.id, amount_cents=amount, reason="outage", idempotency=key, now=AFTER
    )


async def test_states_move_only_as_the_table_says(rig):
    await rig.bill(event(10))
    made = await close(rig)
    with pytest.raises(InvoiceError, match="cannot become void"):
        await begin(rig, invoices.write_off, ORG, made.id, now=AFTER)
    await begin(rig, invoices.issue, ORG, made.id, now=AFTER)
    void = await begin(rig, invoices.write_off, ORG, made.id, now=AFTER)
    assert void.state is State.VOID
    assert await receivable(rig) == 0
    assert await begin(rig, balance, "written_off") == 10 * CENT
    with pytest.raises(InvoiceError, match="cannot be paid on a void invoice"):
        await begin(rig, invoices.pay, ORG, made.id, provider="manual", reference="x", amount_cents=1, now=AFTER)
    assert await begin(rig, find_invoice, "org_other", made.id) is None


# -- SLO credits -----------------------------------------------------------------------------------------


async def test_a_tier_that_misses_its_promise_gives_credit_with_the_missed_requests_behind_it(rig):
    async with rig.engine.begin() as conn:
        await promise(conn, Promise(model="tiny", tier="default", effective_from=MONTH.start - timedelta(days=9),
                                    attainment_ppm=900_000, credit_ppm=100_000))  # fmt: skip
    good = [event(10) for _ in range(8)]
    missed = [event(10, slo_met=False), usage_event(outcome=Outcome.INTERRUPTED, slo_met=False, tokens=MILLION)]
    unknown = usage_event(outcome=Outcome.CLIENT_LEFT, slo_met=None, tokens=Tokens())
    await rig.bill(*good, *missed, unknown)
    made = await close(rig)
    # 8 of 10 is under 90 %: a tenth of the 90 cents that the tier cost comes back
    assert [(line.kind, line.amount_cents) for line in made.lines if line.kind != "usage"] == [("slo_credit", -9)]
    assert "80.00 % of targets met, 90.00 % promised" in made.lines[-1].description
    assert made.total_cents == 81
    listed = {str(row.request_id) for row in await rig.rows("SELECT request_id FROM billing.slo_missed")}
    assert listed == {one.rid for one in missed}
    assert await begin(rig, balance, "slo_credits") == 9 * CENT
    await the_ledger_balances(rig)


async def test_a_promise_that_is_kept_gives_nothing(rig):
    async with rig.engine.begin() as conn:
        await promise(conn, Promise(model="tiny", tier="default", effective_from=MONTH.start - timedelta(days=9),
                                    attainment_ppm=500_000, credit_ppm=100_000))  # fmt: skip
    await rig.bill(event(10), event(10, slo_met=False))
    assert [(line.kind, line.amount_cents) for line in (await close(rig)).lines] == [("usage", 20)]
    assert await rig.scalar("SELECT count(*) FROM billing.slo_credit") == 0


@pytest.mark.parametrize("table", ["credit_grant", "invoice_line", "rerating_line", "payment", "slo_missed"])
async def test_what_records_money_only_appends(rig, table):
    async with rig.engine.begin() as conn:
        with pytest.raises(Exception, match="only appends"):
            await conn.execute(text(f"DELETE FROM billing.{table}"))
