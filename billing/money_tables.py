"""Tables of what happens to money after usage is posted: profiles, credits, budgets, invoices, promises, re-ratings.

Amounts without a suffix are nano-units, `_cents` are hundredths of the currency, `_ppm` are millionths. Most of them
only append (migrations/versions/0003_money.py lists which).
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from billing.tables import METADATA, METER, ledger_transaction
from billing.tables import price as price_table

_MOMENT = sa.DateTime(timezone=True)


def _text(name: str, *, default: str | None = None) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


def _big(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _now(name: str) -> sa.Column[object]:
    return sa.Column(name, _MOMENT, nullable=False, server_default=sa.func.now())


profile = sa.Table(
    "profile",
    METADATA,
    sa.Column("organisation", sa.Text, primary_key=True),
    *(_text(name, default="") for name in ("legal_name", "address", "country", "tax_id", "tax_name")),
    sa.Column("tax_ppm", sa.Integer, nullable=False, server_default="0"),
    _text("email", default=""),
    _text("time_zone", default="UTC"),  # of its budget periods
    sa.Column("prepaid", sa.Boolean, nullable=False, server_default=sa.false()),  # served only while credit is left
    sa.Column("terms_days", sa.Integer, nullable=False, server_default="14"),
    _text("webhook_url", default=""),
    _text("webhook_secret", default=""),
    sa.CheckConstraint("tax_ppm BETWEEN 0 AND 1000000", name="tax"),
)

seller = sa.Table(
    "seller",
    METADATA,
    sa.Column("singleton", sa.Boolean, primary_key=True, server_default=sa.true()),
    *(_text(name) for name in ("legal_name", "address", "country", "tax_id", "email")),
    sa.CheckConstraint("singleton", name="singleton"),
)

credit_grant = sa.Table(
    "credit_grant",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),
    _text("organisation"),
    _text("kind"),  # paid: deferred revenue | promotional: none
    _big("amount"),
    sa.Column("priority", sa.Integer, nullable=False),  # lower goes first
    _now("granted_at"),
    sa.Column("expires_at", _MOMENT),
    _text("idempotency"),
    _text("note"),
    _text("granted_by"),
    sa.UniqueConstraint("organisation", "idempotency"),
    sa.CheckConstraint("amount > 0 AND kind IN ('paid', 'promotional')", name="terms"),
)

budget = sa.Table(
    "budget",
    METADATA,
    sa.Column("organisation", sa.Text, primary_key=True),
    sa.Column("scope", sa.Text, primary_key=True),  # org | project | key
    sa.Column("scope_id", sa.Text, primary_key=True),
    _big("amount"),  # a month
    sa.Column("hard", sa.Boolean, nullable=False),  # refuses what does not fit; otherwise only told about
    sa.Column("thresholds", ARRAY(sa.Integer), nullable=False),  # percent
    _text("set_by"),
    _now("set_at"),
    sa.CheckConstraint("amount >= 0 AND scope IN ('org', 'project', 'key')", name="terms"),
)

budget_alert = sa.Table(
    "budget_alert",
    METADATA,
    sa.Column("organisation", sa.Text, primary_key=True),
    sa.Column("scope", sa.Text, primary_key=True),
    sa.Column("scope_id", sa.Text, primary_key=True),
    sa.Column("period_start", _MOMENT, primary_key=True),
    sa.Column("threshold", sa.Integer, primary_key=True, autoincrement=False),
    _big("spent"),
    _big("amount"),
    _now("at"),
)

webhook = sa.Table(
    "webhook",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),
    _text("organisation"),
    _text("url"),
    _text("body"),  # exactly what is signed and sent
    sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
    _now("next_at"),
    _now("created_at"),
    sa.Column("delivered_at", _MOMENT),
    sa.Column("given_up_at", _MOMENT),
    _text("last_error", default=""),
    sa.Index(None, "next_at", postgresql_where=sa.text("delivered_at IS NULL AND given_up_at IS NULL")),
)

invoice = sa.Table(
    "invoice",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),
    _text("organisation"),
    _text("kind"),  # invoice | credit_note
    sa.Column("number", sa.Text, unique=True),  # gapless within its series; given when issued
    _text("state"),  # billing.invoice_book.NEXT
    sa.Column("period_start", _MOMENT, nullable=False),
    sa.Column("period_end", _MOMENT, nullable=False),
    sa.Column("corrects", sa.Uuid, sa.ForeignKey("billing.invoice.id")),
    _text("currency"),
    sa.Column("seller", JSONB, nullable=False),  # as they were when it was made
    sa.Column("buyer", JSONB, nullable=False),
    *(_big(f"{name}_cents") for name in ("subtotal", "tax", "total", "credits", "due")),
    _now("created_at"),
    *(sa.Column(f"{name}_at", _MOMENT) for name in ("issued", "due", "paid", "voided")),
    sa.CheckConstraint("kind IN ('invoice', 'credit_note')", name="kind"),
    sa.CheckConstraint("state IN ('draft', 'issued', 'paid', 'void')", name="state"),
    sa.CheckConstraint("(state = 'draft') = (number IS NULL)", name="numbered"),
    sa.Index(
        "uq_invoice_organisation_period_start",
        "organisation",
        "period_start",
        unique=True,
        postgresql_where=sa.text("kind = 'invoice'"),
    ),
)

invoice_line = sa.Table(
    "invoice_line",
    METADATA,
    sa.Column("invoice_id", sa.Uuid, sa.ForeignKey(invoice.c.id), primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
    _text("kind"),  # usage | late | adjustment | slo_credit | correction
    _text("description"),
    *(sa.Column(name, sa.Text) for name in ("project", "model", "tier", "meter", "scope")),
    sa.Column("batch", sa.Boolean),
    sa.Column("price_version", sa.Integer),
    *(sa.Column(name, sa.BigInteger) for name in ("price", "tokens", "requests")),
    _big("amount"),
    _big("amount_cents"),
    sa.Column("of_period", _MOMENT, nullable=False),  # start of the month that it is about
)

invoice_transaction = sa.Table(
    "invoice_transaction",
    METADATA,
    sa.Column("transaction_id", sa.Uuid, sa.ForeignKey(ledger_transaction.c.id), primary_key=True),
    sa.Column("invoice_id", sa.Uuid, sa.ForeignKey(invoice.c.id), nullable=False, index=True),
)

invoice_number = sa.Table(
    "invoice_number",
    METADATA,
    sa.Column("series", sa.Text, primary_key=True),
    _big("last"),
)

payment = sa.Table(
    "payment",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("invoice_id", sa.Uuid, sa.ForeignKey(invoice.c.id), nullable=False),
    _text("provider"),
    _text("reference"),
    _big("amount_cents"),
    _now("at"),
    _text("recorded_by"),
    sa.UniqueConstraint("provider", "reference"),
)

payment_customer = sa.Table(
    "payment_customer",
    METADATA,
    sa.Column("organisation", sa.Text, primary_key=True),
    sa.Column("provider", sa.Text, primary_key=True),
    _text("reference"),  # the provider's id of the buyer
    _now("at"),
)

collection = sa.Table(
    "collection",
    METADATA,
    sa.Column("invoice_id", sa.Uuid, sa.ForeignKey(invoice.c.id), primary_key=True),  # an invoice, or a credit note
    _text("provider"),
    _text("state"),  # billing.collection_book.Stage
    _big("amount_cents"),  # asked for; of a note: to be refunded
    _text("reference", default=""),  # the provider's id of it
    _text("url", default=""),  # where the buyer can pay
    _text("reason", default=""),
    sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
    sa.Column("declines", sa.Integer, nullable=False, server_default="0"),
    _now("next_at"),
    _now("asked_at"),
    sa.Column("said_at", _MOMENT),  # the provider's own time of what it said last
    sa.Index(None, "next_at", postgresql_where=sa.text("state = 'asked'")),
)

slo_promise = sa.Table(
    "slo_promise",
    METADATA,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("tier", sa.Text, primary_key=True),
    sa.Column("effective_from", _MOMENT, primary_key=True),
    sa.Column("attainment_ppm", sa.Integer, nullable=False),  # of the requests whose targets are known
    sa.Column("credit_ppm", sa.Integer, nullable=False),  # of what the tier cost in the period
    _text("set_by"),
    sa.CheckConstraint("attainment_ppm BETWEEN 0 AND 1000000 AND credit_ppm BETWEEN 0 AND 1000000", name="terms"),
)

slo_credit = sa.Table(
    "slo_credit",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),  # also of its ledger transaction
    _text("organisation"),
    sa.Column("period_start", _MOMENT, nullable=False),
    _text("model"),
    _text("tier"),
    _big("met"),
    _big("missed"),
    sa.Column("attainment_ppm", sa.Integer, nullable=False),  # promised
    sa.Column("credit_ppm", sa.Integer, nullable=False),
    _big("base"),
    _big("amount"),
    sa.UniqueConstraint("organisation", "period_start", "model", "tier"),
)

slo_missed = sa.Table(
    "slo_missed",
    METADATA,
    sa.Column("slo_credit_id", sa.Uuid, sa.ForeignKey(slo_credit.c.id), primary_key=True),
    sa.Column("request_id", sa.Uuid, primary_key=True),
    sa.Column("at", _MOMENT, nullable=False),
    _text("outcome"),
    sa.Column("ttft_ms", sa.Double),
    sa.Column("tpot_ms", sa.Double),
)

rerating = sa.Table(
    "rerating",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),
    _text("model"),
    sa.Column("price_version", sa.Integer, nullable=False),
    sa.Column("organisation", sa.Text),  # NULL: all
    sa.Column("from_at", _MOMENT, nullable=False),
    sa.Column("to_at", _MOMENT, nullable=False),
    _text("reason"),
    _text("made_by"),
    _now("at"),
    _big("requests"),
    _big("delta"),
    sa.ForeignKeyConstraint(
        ["model", "price_version"], [price_table.c.model, price_table.c.version], name="fk_rerating_model"
    ),
)

rerating_line = sa.Table(
    "rerating_line",
    METADATA,
    sa.Column("request_id", sa.Uuid, primary_key=True),
    sa.Column("meter", METER, primary_key=True),
    sa.Column("rerating_id", sa.Uuid, primary_key=True),
    _big("old_cost"),
    _big("new_cost"),
)

correction = sa.Table(
    "correction",
    METADATA,
    sa.Column("sequence", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    sa.Column("id", sa.Uuid, nullable=False, unique=True),
    sa.Column("request_id", sa.Uuid, nullable=False),
    sa.Column("request_at", _MOMENT, nullable=False, index=True),
    _text("organisation"),
    _text("model"),
    sa.Column("price_version", sa.Integer, nullable=False),
    *(_big(name) for name in ("prefill_computed", "prefill_cached", "decode")),
    *(_big(f"old_{name}") for name in ("prefill_computed", "prefill_cached", "decode")),
    _big("delta"),
    _text("reason"),
    _text("made_by"),
    _now("at"),
    sa.CheckConstraint("prefill_computed >= 0 AND prefill_cached >= 0 AND decode >= 0", name="not_negative"),
    sa.Index("ix_correction_request_id", "request_id", "sequence"),
)

share_group = sa.Table(
    "share_group",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    _text("name"),
    _text("created_by"),
    _now("created_at"),
)

share_consent = sa.Table(
    "share_consent",
    METADATA,
    sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    sa.Column("group_id", sa.Text, sa.ForeignKey(share_group.c.id), nullable=False),
    sa.Column("organisation", sa.Text, nullable=False, index=True),
    sa.Column("consents", sa.Boolean, nullable=False),
    _text("by"),
    sa.Column("at", _MOMENT, nullable=False, server_default=sa.func.clock_timestamp()),
)
