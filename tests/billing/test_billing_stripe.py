"""Invoices paid by Stripe, against its API as stripe_server.py has it: once, whatever fails on the way."""

import logging
from datetime import timedelta

import pytest
from sqlalchemy import text
from stripe_server import API_KEY, WEBHOOK_SECRET, signed
from stripe_shop import CENT, ORG, Shop
from structlog.testing import capture_logs

from billing import invoices
from billing.collection_book import Stage, find_collection
from billing.credits import grants_of
from billing.currencies import cents_text
from billing.invoice_book import InvoiceError, State
from billing.ledger import balance
from billing.payments import BadEvent
from billing.stripe_payments import cents_of, minor_units
from contracts.v1 import billing_pb2 as pb


async def test_an_issued_invoice_is_charged_once_under_keys_of_its_number(shop, server):
    made = await shop.issue(300)
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    assert server.charges == [("in_0", 300)]
    assert await shop.payments() == [("stripe", 300)]
    number = (await shop.invoice(made)).number
    posts = [key for method, _, key in server.calls if method == "POST"]
    assert posts == [
        f"pdgate-customer-{ORG}", *(f"pdgate-{number}-{step}" for step in ("draft", "line", "finalise", "pay-0"))
    ]  # fmt: skip
    assert server.invoices["in_0"]["metadata"] == {
        "pdgate_invoice": str(made), "pdgate_organisation": ORG, "pdgate_number": number,
    }  # fmt: skip
    await shop.admin.Issue(pb.InvoiceRef(organisation=ORG, id=str(made)), None)
    await shop.later(days=2)
    assert len(server.charges) == 1
    assert await shop.balances() == [300, 0]


@pytest.mark.parametrize("path", ["/v1/customers", "/v1/invoices", "/finalize", "/pay"])
async def test_a_call_whose_answer_is_lost_every_time_is_made_again_later_and_charges_once(shop, server, path):
    server.fail(path, "lost", times=3)  # the first call and the library's two repeats
    with shop.impatient():
        made = await shop.issue(300)
    assert await shop.state(made) == (State.ISSUED, Stage.ASKED)
    await shop.later(minutes=2)
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    assert len(set(server.keys_of(path)) - {""}) == 1, "always the same key"
    assert server.charges == [("in_0", 300)]
    assert list(server.invoices) == ["in_0"]
    assert await shop.payments() == [("stripe", 300)]


async def test_after_a_day_when_stripe_has_forgotten_the_keys_the_invoice_is_found_and_not_made_again(shop, server):
    server.fail("/v1/invoices", "lost", times=3)
    with shop.impatient():
        made = await shop.issue(300)
    server._kept.clear()
    await shop.later(hours=30)
    assert list(server.invoices) == ["in_0"]
    assert await shop.state(made) == (State.PAID, Stage.PAID)


@pytest.mark.parametrize("status", [429, 500])
async def test_what_stripe_cannot_do_now_is_repeated_with_the_same_key(shop, server, status):
    server.fail("/pay", status, times=2)
    made = await shop.issue(300)
    keys = server.keys_of("/pay")
    assert (len(keys), len(set(keys))) == (3, 1)
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    assert len(server.charges) == 1


async def test_while_stripe_is_away_invoices_are_issued_all_the_same_and_charged_when_it_is_back(shop, server):
    server.fail("", 503, times=1000)
    made = await shop.issue(300)
    assert await shop.state(made) == (State.ISSUED, Stage.ASKED)
    before = len(server.calls)
    await shop.later(seconds=1)
    assert len(server.calls) == before, "not before its pause is over"
    server.faults.clear()
    await shop.later(minutes=2)
    assert await shop.state(made) == (State.PAID, Stage.PAID)


async def test_asked_again_by_a_person_a_declined_invoice_is_tried_under_another_key(shop, server):
    server.declines = 1
    made = await shop.issue(300)
    await shop.admin.Issue(pb.InvoiceRef(organisation=ORG, id=str(made)), None)
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    assert len(set(server.keys_of("/pay"))) == 2
    assert len(server.charges) == 1


async def test_a_buyer_without_a_card_is_sent_to_stripes_page(shop, server):
    server.no_card = True
    made = await shop.issue(300)
    assert await shop.state(made) == (State.ISSUED, Stage.DECLINED)
    assert (await shop.row(made)).url == "https://pay.example/in_0"


async def test_an_invoice_that_is_written_off_is_voided_at_stripe_and_money_that_comes_all_the_same_is_credit(
    shop, server
):
    server.declines = 1
    made = await shop.issue(300)
    about = dict(server.invoices["in_0"])
    await shop.admin.WriteOff(pb.InvoiceRef(organisation=ORG, id=str(made)), None)
    assert server.invoices["in_0"]["status"] == "void"
    assert await shop.state(made) == (State.VOID, Stage.WITHDRAWN)
    for _ in range(2):
        await shop.told("invoice.paid", about, status="paid", amount_paid=300)
    assert [one.left for one in await shop.begin(grants_of, ORG)] == [300 * CENT]
    assert await shop.balances() == [300, 0]


async def test_an_invoice_that_was_paid_by_transfer_is_no_longer_collected_by_stripe(shop, server):
    server.declines = 1
    made = await shop.issue(300)
    bank = pb.Payment(organisation=ORG, id=str(made), reference="bank 7", amount_cents=300)
    await shop.admin.Pay(bank, None)
    assert server.invoices["in_0"]["status"] == "void"
    await shop.told("invoice.voided")
    assert (server.charges, await shop.payments()) == ([], [("manual", 300)])
    assert await shop.state(made) == (State.PAID, Stage.WITHDRAWN)


async def test_a_buyer_that_stripe_knows_is_charged_as_that_one(shop, server):
    await shop.admin.SetPaymentCustomer(pb.PaymentCustomer(organisation=ORG, reference="cus_known"), None)
    await shop.issue(300)
    assert server.invoices["in_0"]["customer"] == "cus_known"
    assert server.customers == {}


async def test_another_amount_in_stripes_answer_is_not_recorded(shop, server):
    server.fail("/v1/invoices", "lost", times=3)
    with shop.impatient():
        made = await shop.issue(300)
    server.invoices["in_0"] |= {"status": "paid", "total": 200, "amount_due": 200, "amount_paid": 200}
    await shop.later(minutes=2)
    assert await shop.state(made) == (State.ISSUED, Stage.MISMATCH)
    assert await shop.payments() == []


@pytest.mark.parametrize(
    ("currency", "cents", "minor"),
    [("EUR", 1234, 1234), ("usd", 1, 1), ("JPY", 123_400, 1234), ("KRW", 100, 1), ("KWD", 1234, 12_340),
     ("ISK", 500, 500), ("UGX", 700, 700)],
)  # fmt: skip
def test_amounts_are_in_the_coins_that_stripe_counts(currency, cents, minor):
    assert minor_units(cents, currency) == minor
    assert cents_of(minor, currency) == cents


@pytest.mark.parametrize("currency", ["JPY", "ISK"])
def test_there_is_no_part_of_a_yen_or_a_krona(currency):
    with pytest.raises(ValueError, match="has no cents"):
        minor_units(123_450, currency)
    assert cents_text(123_400, currency) == "1234"


async def test_an_invoice_in_yen_asks_for_whole_yen_and_the_rest_is_rounding(rig, server):
    shop = Shop(rig, server, currency="JPY")
    made = await shop.issue(12_345)  # 123.45 yen
    found = await shop.invoice(made)
    assert (found.due_cents, [line.amount_cents for line in found.lines]) == (12_300, [12_300])
    assert server.charges == [("in_0", 123)]
    assert await shop.payments() == [("stripe", 12_300)]
    assert await shop.begin(balance, "rounding") == 45 * CENT
    assert await shop.balances() == [12_300, 0]
    with pytest.raises(InvoiceError, match="JPY has no cents"):
        await shop.begin(
            invoices.credit_note, ORG, made, amount_cents=150, reason="x", idempotency="x", now=shop.now
        )  # fmt: skip


# -- secrets ---------------------------------------------------------------------------------------------


async def test_neither_logs_nor_errors_nor_the_database_show_the_key_or_the_secret(rig, server, caplog):
    caplog.set_level(logging.DEBUG)
    with capture_logs() as logs:
        shop = Shop(rig, server, api_key="sk_test_wrongandsecret")
        made = await shop.issue(300)  # refused, and Stripe's own words repeat the key
        with pytest.raises(BadEvent) as refused:
            await shop.collector.told(b"{}", signed(b"{}", secret="whsec_guessed"))
        right = Shop(rig, server)
        right.now += timedelta(minutes=2)
        await right.collector.settle(ORG, made)
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    stored = [tuple(row) for row in await rig.rows("SELECT * FROM billing.collection")]
    everything = f"{logs} {caplog.text} {refused.value} {stored}"
    for secret in (API_KEY, "sk_test_wrongandsecret", WEBHOOK_SECRET, "whsec_guessed", "whsec_older"):
        assert secret not in everything
    assert "does not take our key (401)" in str(logs)


async def test_a_tenant_sees_the_payment_of_its_own_invoices_alone(shop, rig):
    made = await shop.issue(300)
    for tenant, seen in ((ORG, 1), ("org_other", 0)):
        async with rig.engine.begin() as conn:
            await conn.execute(
                text("SELECT set_config('role', 'pdgate_tenant', true), set_config('pdgate.tenant', :tenant, true)"),
                {"tenant": tenant},
            )
            assert bool(await find_collection(conn, made)) == bool(seen)
