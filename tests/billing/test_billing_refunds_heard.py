"""Refunds that somebody begins in Stripe itself: a credit note here, once, whatever else goes back and in any order."""

import uuid

import pytest
from billing_rig import usage_event
from stripe_shop import AFTER, CENT, MONTH, ORG, Shop
from test_billing_stripe_messages import give_back

from billing import invoices
from billing.collection_book import Stage
from billing.credits import grants_of
from billing.invoice_book import State, find_invoice
from billing.ledger import balance
from billing.payments import PaymentUnavailable
from billing.profiles import Profile, set_profile
from contracts.rating import Tokens
from contracts.v1 import billing_pb2 as pb


async def notes(shop, made):
    rows = await shop.rig.rows(
        "SELECT subtotal_cents, tax_cents, credits_cents FROM billing.invoice WHERE corrects = :made ORDER BY number",
        made=made,
    )
    return [tuple(row) for row in rows]


async def test_a_refund_begun_in_stripe_becomes_a_credit_note_once(shop, server):
    made = await shop.issue(300)
    about = server.invoices["in_0"]
    first = server.refund(about, 100)
    second = server.refund(about, 50)
    for charge in (second, first, second):  # they say what went back in all, so the order does not matter
        assert await shop.told("charge.refunded", charge)
    assert await notes(shop, made) == [(150, 0, 150)]
    assert await shop.balances() == [150, 0]
    assert await shop.begin(balance, "refunds_due") == 0
    assert await shop.begin(balance, "credit_notes") == 150 * CENT
    assert await shop.begin(grants_of, ORG) == [], "the money is back where it came from; it is no credit"
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    assert len(server.refunds) == 2, "nothing more is asked of Stripe"
    await shop.later(minutes=5)
    assert len(server.refunds) == 2


async def test_a_refund_begun_here_and_one_begun_there_are_two_notes_and_no_more(shop, server):
    made = await shop.issue(300)
    about = server.invoices["in_0"]
    await give_back(shop, made, 100, refund=True)
    assert await shop.told("charge.refunded", server.charge_of(about)), "the message about our own says nothing new"
    assert await notes(shop, made) == [(100, 0, 100)]
    assert await shop.told("charge.refunded", server.refund(about, 30))
    assert await notes(shop, made) == [(100, 0, 100), (30, 0, 30)]
    assert await shop.balances() == [170, 0]
    with pytest.raises(invoices.InvoiceError, match="at most 170 cents"):
        await shop.begin(
            invoices.credit_note, ORG, made, amount_cents=171, reason="x", idempotency="more", now=AFTER
        )  # fmt: skip


async def test_a_refund_with_tax_gives_the_tax_back_to_the_last_cent(rig, server):
    shop = Shop(rig, server)
    async with rig.engine.begin() as conn:
        await set_profile(conn, Profile(organisation=ORG, tax_ppm=190_000))
    await rig.bill(usage_event(tokens=Tokens(decode=25_000 * 100)))
    made = (await shop.begin(invoices.close_period, ORG, MONTH, currency="EUR", now=AFTER)).id
    await shop.admin.Issue(pb.InvoiceRef(organisation=ORG, id=str(made)), None)
    about = server.invoices["in_0"]
    assert about["amount_paid"] == 119
    for part in (39, 40, 40):
        assert await shop.told("charge.refunded", server.refund(about, part))
    # 19/119 of 39 is 6.2, of 40 is 6.4; the last takes what rounding left of 100 and 19.
    assert await notes(shop, made) == [(33, 6, 39), (34, 6, 40), (33, 7, 40)]
    assert await shop.balances() == [0, 0]
    assert await shop.begin(balance, "tax") == 0


async def test_more_than_is_left_of_an_invoice_is_said_and_records_nothing(shop, server):
    """What was given back as credit already is refunded as well: somebody has to decide."""
    made = await shop.issue(300)
    await give_back(shop, made, 250, refund=False)
    assert await shop.told("charge.refunded", server.refund(server.invoices["in_0"], 100))
    assert await shop.state(made) == (State.PAID, Stage.MISMATCH)
    assert (await shop.row(made)).reason == "refunded by stripe: at most 50 cents can go back; 100 did"
    assert await shop.balances() == [300, 0]


async def test_a_refund_that_is_heard_before_the_payment_is_told_again(shop, server):
    server.declines = 1
    made = await shop.issue(300)
    server.charge(server.invoices["in_0"])
    charge = server.refund(server.invoices["in_0"], 300)
    with pytest.raises(PaymentUnavailable):
        await shop.told("charge.refunded", charge)
    assert await shop.told("invoice.paid")
    assert await shop.told("charge.refunded", charge)
    assert await shop.balances() == [0, 0]
    assert (await shop.begin(find_invoice, ORG, made)).state is State.PAID


async def test_refunds_of_other_payments_are_not_ours(shop, server):
    await shop.issue(300)
    charge = server.charge_of(server.invoices["in_0"])
    assert not await shop.told("charge.refunded", charge | {"payment_intent": None, "amount_refunded": 5})
    assert not await shop.told("charge.refunded", charge | {"payment_intent": "pi_in_9", "amount_refunded": 5})
    server.invoices["in_0"]["metadata"] = {"pdgate_invoice": str(uuid.uuid4())}
    assert not await shop.told("charge.refunded", charge | {"amount_refunded": 5})
