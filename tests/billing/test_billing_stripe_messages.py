"""What Stripe tells of invoices, and what goes back through it: in any order, more than once, forged, of others."""

import asyncio
import itertools
import json
import time
import uuid

import pytest
from stripe_server import signed
from stripe_shop import CENT, ORG, Shop

from billing.collection_book import Stage
from billing.credits import grants_of
from billing.invoice_book import State
from billing.ledger import balance
from billing.payments import BadEvent
from contracts.v1 import billing_pb2 as pb


async def test_a_declined_card_leaves_the_invoice_open_until_a_message_says_that_it_is_paid(shop, server):
    server.declines = 1
    made = await shop.issue(300)
    row = await shop.row(made)
    assert await shop.state(made) == (State.ISSUED, Stage.DECLINED)
    assert (row.reason, row.url, row.declines) == ("card_declined", "https://pay.example/in_0", 1)
    await shop.later(days=1)
    assert server.charges == [], "Stripe asks the bank again, not we"
    server.charge(server.invoices["in_0"])
    assert await shop.told("invoice.paid")
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    assert await shop.payments() == [("stripe", 300)]


async def test_a_message_that_is_faster_than_the_answer_and_the_answer_record_one_payment(rig, server):
    shop = Shop(rig, server)
    server.fail("/pay", "held")
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        issuing = tasks.create_task(shop.issue(300))
        await server.acted.wait()
        assert await shop.told("invoice.paid")
        assert await shop.payments() == [("stripe", 300)]
        server.released.set()
    made = issuing.result()
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    assert await shop.payments() == [("stripe", 300)]
    assert await shop.balances() == [300, 0]


async def test_a_message_about_an_invoice_whose_making_was_not_confirmed_yet_is_recorded(shop, server):
    server.fail("/v1/invoices", "lost", times=3)
    with shop.impatient():
        made = await shop.issue(300)
    about = server.invoices["in_0"] | {"total": 300, "amount_due": 300, "amount_paid": 300, "status": "paid"}
    server.invoices["in_0"] = about
    assert await shop.told("invoice.paid")
    await shop.later(minutes=2)
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    assert (server.charges, await shop.payments()) == ([], [("stripe", 300)])


async def test_messages_in_any_order_and_more_than_once_end_the_same(shop, server):
    server.declines = 1
    made = await shop.issue(300)
    about = server.charge(server.invoices["in_0"])
    now = int(time.time())
    messages = [
        ("invoice.payment_failed", now - 20, {"status": "open", "amount_paid": 0}),
        ("invoice.payment_failed", now - 10, {"status": "open", "amount_paid": 0}),
        ("invoice.paid", now, {}),
    ]
    for order in itertools.permutations(messages):
        for kind, at_s, changes in (*order, *order):
            await shop.told(kind, about, at_s=at_s, **changes)
        assert await shop.state(made) == (State.PAID, Stage.PAID)
        assert await shop.payments() == [("stripe", 300)]
    assert await shop.balances() == [300, 0]


async def test_an_older_refusal_does_not_hide_a_newer_one(shop, server):
    server.declines = 1
    made = await shop.issue(300)
    now = int(time.time())
    await shop.told("invoice.marked_uncollectible", at_s=now)
    await shop.told("invoice.payment_failed", at_s=now - 60)
    assert (await shop.row(made)).reason == "marked uncollectible"


async def test_what_stripe_voids_is_written_off_and_what_we_write_off_is_voided_there(shop, server):
    server.declines = 2
    first = await shop.issue(300)
    about = server.invoices["in_0"] | {"status": "void"}
    await shop.told("invoice.voided", about)
    await shop.told("invoice.voided", about)
    assert await shop.state(first) == (State.VOID, Stage.WITHDRAWN)
    assert await shop.balances() == [0, 0]


@pytest.mark.parametrize("changes", [{"amount_paid": 299}, {"currency": "usd"}])
async def test_a_message_with_another_amount_or_currency_records_nothing_and_says_so(shop, server, changes):
    server.declines = 1
    made = await shop.issue(300)
    assert await shop.told("invoice.paid", None, **{"status": "paid", "amount_paid": 300, **changes})
    assert await shop.state(made) == (State.ISSUED, Stage.MISMATCH)
    assert "300 cents EUR" in (await shop.row(made)).reason
    assert await shop.payments() == []
    assert await shop.told("invoice.paid", None, status="paid", amount_paid=300), "the right one still counts"
    assert await shop.state(made) == (State.PAID, Stage.PAID)


async def test_messages_of_other_kinds_and_of_other_invoices_change_nothing(shop, server):
    server.declines = 1
    made = await shop.issue(300)
    assert not await shop.told("customer.created")
    assert not await shop.told("invoice.paid", None, metadata={})
    other = {"pdgate_invoice": str(uuid.uuid4()), "pdgate_organisation": ORG}
    assert not await shop.told("invoice.paid", None, metadata=other, amount_paid=300)
    stolen = {"pdgate_invoice": str(made), "pdgate_organisation": "org_other"}
    assert not await shop.told("invoice.paid", None, metadata=stolen, amount_paid=300)
    assert await shop.state(made) == (State.ISSUED, Stage.DECLINED)


async def test_a_message_that_stripe_did_not_sign_is_refused(shop, server):
    server.declines = 1
    made = await shop.issue(300)
    body = server.event("invoice.paid", server.invoices["in_0"], amount_paid=300, status="paid")
    other = json.dumps(json.loads(body) | {"id": "evt_other"}).encode()
    for wrong, header in (
        (body, signed(body, secret="whsec_guessed")),
        (other, signed(body)),
        (body, signed(body, at_s=time.time() - 301)),
        (body, ""),
        (body, "t=yesterday,v1=00"),
        (b"\xff", signed(b"\xff")),
        (b"{}", signed(b"{}")),
    ):
        with pytest.raises(BadEvent):
            await shop.collector.told(wrong, header)
    assert await shop.state(made) == (State.ISSUED, Stage.DECLINED)
    assert await shop.collector.told(body, signed(body, secret="whsec_older", at_s=time.time() - 290)), (
        "both secrets count while one replaces the other"
    )
    assert await shop.state(made) == (State.PAID, Stage.PAID)


# -- credit notes and refunds ----------------------------------------------------------------------------


async def give_back(shop, made, amount, *, refund, key="first"):
    wanted = pb.NewCreditNote(
        organisation=ORG, id=str(made), amount_cents=amount, reason="outage", idempotency=key, refund=refund
    )  # fmt: skip
    return uuid.UUID((await shop.admin.CreditNote(wanted, None)).id)


async def test_a_refund_goes_back_through_stripe_once_and_the_ledger_says_when(shop, server):
    made = await shop.issue(300)
    server.fail("/v1/credit_notes", "lost", times=3)
    with shop.impatient():
        note = await give_back(shop, made, 100, refund=True)
    assert await shop.begin(balance, "refunds_due") == -100 * CENT
    assert await give_back(shop, made, 100, refund=True) == note
    await shop.later(minutes=2)
    assert server.refunds == [("in_0", 100)]
    assert await shop.begin(balance, "refunds_due") == 0
    assert await shop.balances() == [200, 0]
    assert await shop.begin(grants_of, ORG) == []
    await give_back(shop, made, 200, refund=True, key="second")
    assert server.refunds == [("in_0", 100), ("in_0", 200)]
    assert await shop.balances() == [0, 0]


async def test_without_refund_what_was_paid_becomes_credit_and_stripe_moves_no_money(shop, server):
    made = await shop.issue(300)
    await give_back(shop, made, 100, refund=False)
    assert server.refunds == []
    assert [one.left for one in await shop.begin(grants_of, ORG)] == [100 * CENT]


async def test_a_refund_that_stripe_refuses_becomes_credit(shop, server):
    made = await shop.issue(300)
    server.refuses_refunds = True
    note = await give_back(shop, made, 100, refund=True)
    assert (await shop.row(note)).state is Stage.DECLINED
    assert await shop.begin(balance, "refunds_due") == 0
    assert [one.left for one in await shop.begin(grants_of, ORG)] == [100 * CENT]
    assert await shop.balances() == [300, 0]


async def test_a_credit_note_lowers_what_an_open_invoice_asks_for_at_stripe(shop, server):
    server.declines = 1
    made = await shop.issue(300)
    await give_back(shop, made, 120, refund=True)
    assert server.invoices["in_0"]["amount_due"] == 180
    server.charge(server.invoices["in_0"])
    await shop.told("invoice.paid")
    assert await shop.state(made) == (State.PAID, Stage.PAID)
    assert await shop.balances() == [180, 0]


# -- currencies ------------------------------------------------------------------------------------------
