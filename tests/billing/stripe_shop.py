"""Billing with Stripe beside it, against its API as stripe_server.py has it."""

from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from billing_rig import usage_event
from stripe_server import API_KEY, WEBHOOK_SECRET, signed

from billing import invoices
from billing.admin import Admin
from billing.budgets import Budgets
from billing.collection import Collector
from billing.collection_book import find_collection
from billing.invoice_book import find_invoice
from billing.ledger import balance
from billing.moments import unix_ms
from billing.periods import month_of
from billing.stripe_payments import Stripe, stripe_client
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
