"""Invoices paid by Stripe, against its API as stripe_server.py has it: once, whatever fails on the way."""

import asyncio
import itertools
import json
import logging
import time
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
import stripe
from billing_rig import usage_event
from sqlalchemy import text
from stripe_server import API_KEY, WEBHOOK_SECRET, running_stripe, signed
from structlog.testing import capture_logs

from billing import invoices
from billing.admin import Admin
from billing.budgets import Budgets
from billing.collection import Collector
from billing.collection_book import Stage, find_collection
from billing.credits import grants_of
from billing.currencies import cents_text
from billing.invoice_book import InvoiceError, State, find_invoice
from billing.ledger import balance
from billing.moments import unix_ms
from billing.payments import BadEvent
from billing.periods import month_of
from billing.stripe_payments import Stripe, cents_of, minor_units, stripe_client
from contracts.rating import Tokens
from contracts.v1 import billing_pb2 as pb

ORG = "org_acme"
CENT = 10_000_000
MONTH = month_of(datetime.now(UTC))
AFTER = MONTH.end + timedelta(hours=3)


class Shop:
    """Billing with Stripe beside it, whose clock is after the month's end and can be moved on."""

    def __init__(self, rig, server, *, api_key=API_KEY, currency="EUR"):
        self.rig = rig
        self.server = server
        self.now = AFTER
        self.currency = currency
        client = stripe_client(api_key, api_base=server.url)
        self.provider = Stripe(client, webhook_secrets=[WEBHOOK_SECRET, "whsec_older"], busy_pause_s=0.001)
        self.collector = Collector(rig.engine, self.provider, now_ms=self.now_ms)
        self.admin = Admin(
            rig.engine, Budgets(rig.engine, rig.redis), currency=currency, collector=self.collector,
            now_ms=self.now_ms,
        )  # fmt: skip

    def now_ms(self):
        return unix_ms(self.now)

    @contextmanager
    def impatient(self):
        """Inside, a call is given up so soon that a lost answer costs no time; afterwards nothing is lost any more."""
        patient = self.provider._api
        self.provider._api = stripe_client(API_KEY, api_base=self.server.url, timeout_s=0.15).v1
        yield
        self.provider._api = patient
        self.server.faults.clear()

    async def begin(self, call, *words, **names):
        async with self.rig.engine.begin() as conn:
            return await call(conn, *words, **names)

    async def issue(self, euro_cents=300):
        """Bill a month, close and issue it; return the invoice's id."""
        await self.rig.bill(usage_event(tokens=Tokens(decode=25_000 * euro_cents)))
        made = await self.begin(invoices.close_period, ORG, MONTH, currency=self.currency, now=self.now)
        await self.admin.Issue(pb.InvoiceRef(organisation=ORG, id=str(made.id)), None)
        return made.id

    async def later(self, **delta):
        """The job's next round, so much later."""
        self.now += timedelta(**delta)
        await self.collector.settle_due()

    async def invoice(self, invoice_id):
        return await self.begin(find_invoice, ORG, invoice_id)

    async def row(self, invoice_id):
        return await self.begin(find_collection, invoice_id)

    async def state(self, invoice_id):
        return (await self.invoice(invoice_id)).state, (await self.row(invoice_id)).state

    async def told(self, kind, about=None, *, at_s=None, **changes):
        """A signed message about the only invoice that Stripe has."""
        about = about or next(iter(self.server.invoices.values()))
        body = self.server.event(kind, about, at_s=at_s, **changes)
        return await self.collector.told(body, signed(body))

    async def payments(self):
        return [tuple(row) for row in await self.rig.rows("SELECT provider, amount_cents FROM billing.payment")]

    async def balances(self):
        """Cash and what is owed, in cents; everything sums to zero."""
        assert await self.rig.scalar("SELECT coalesce(sum(amount), 0) FROM billing.ledger_entry") == 0
        return [await self.begin(balance, name) // CENT for name in ("cash", f"receivable:{ORG}")]


@pytest.fixture
def quick(monkeypatch):
    """The library's own pauses between tries, a hundredth of them."""
    monkeypatch.setattr(stripe.HTTPClient, "INITIAL_DELAY", 0.005)
    monkeypatch.setattr(stripe.HTTPClient, "MAX_DELAY", 0.02)


@pytest.fixture
async def server(quick):
    async with running_stripe() as running:
        yield running


@pytest.fixture
async def shop(rig, server):
    return Shop(rig, server)


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
