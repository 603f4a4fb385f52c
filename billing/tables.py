"""Tables of the schema `billing`. Owned by the billing process; everybody else reads through billing.queries.

Money is BIGINT nano-units of the installation's currency. `request`, `usage_record` and `attempt_cost`
are partitioned by UTC day on `at`, the time inside the request id, so a row's partition does not depend
on who wrote it or when. Ledger and prices only append: triggers refuse UPDATE and DELETE.
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ENUM

from contracts.rating import MINIMUM_CHARGE, Meter

METADATA = sa.MetaData(
    schema="billing",
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    },
)

METER = ENUM(*(meter.value for meter in Meter), MINIMUM_CHARGE, name="meter", schema="billing", metadata=METADATA)
_MOMENT = sa.DateTime(timezone=True)

price = sa.Table(
    "price",
    METADATA,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),  # 1, 2, ... per model, overrides included
    sa.Column("organisation", sa.Text),  # NULL: the list price; otherwise this organisation's override
    sa.Column("prefill_computed", sa.BigInteger, nullable=False),  # nano-units per million tokens
    sa.Column("prefill_cached", sa.BigInteger, nullable=False),
    sa.Column("decode", sa.BigInteger, nullable=False),
    sa.Column("effective_from", _MOMENT, nullable=False),  # whole milliseconds, inclusive
    sa.Column("effective_to", _MOMENT),  # whole milliseconds, exclusive; NULL: until a later version
    sa.Column("source", sa.Text, nullable=False),  # catalogue: from models.toml | admin: set by a person
    sa.Column("set_by", sa.Text, nullable=False, server_default=""),
    sa.Column("set_at", _MOMENT, nullable=False, server_default=sa.func.now()),
    sa.Column("tier", sa.Text),  # NULL: every tier
    sa.Column("prefill_shared", sa.BigInteger),  # hits on a share group's prefixes; NULL: as prefill_cached
    sa.Column("batch_ppm", sa.Integer, nullable=False, server_default="1000000"),  # of the price, for batch requests
    sa.Column("minimum", sa.BigInteger, nullable=False, server_default="0"),  # nano per billable request with tokens
    sa.CheckConstraint("prefill_computed >= 0 AND prefill_cached >= 0 AND decode >= 0", name="not_negative"),
    sa.CheckConstraint(
        "coalesce(prefill_shared, 0) >= 0 AND batch_ppm BETWEEN 0 AND 1000000 AND minimum >= 0", name="terms"
    ),
    sa.CheckConstraint("effective_to > effective_from", name="period"),
    sa.CheckConstraint("source IN ('catalogue', 'admin')", name="source"),
)

request = sa.Table(
    "request",
    METADATA,
    sa.Column("request_id", sa.Uuid, primary_key=True),
    sa.Column("at", _MOMENT, primary_key=True),
    sa.Column("organisation", sa.Text, nullable=False),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("pool", sa.Text, nullable=False),
    sa.Column("tier", sa.Text, nullable=False),
    sa.Column("path", sa.Text),  # NULL: never placed
    sa.Column("hand_off", sa.Text),  # NULL: one worker did it all
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("batch", sa.Boolean, nullable=False),
    sa.Column("stream", sa.Boolean, nullable=False),
    sa.Column("prefill_worker", sa.Text, nullable=False),
    sa.Column("decode_worker", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("cause", sa.Text, nullable=False),
    sa.Column("finish_reason", sa.Text, nullable=False),
    sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),  # part of decode
    sa.Column("ttft_ms", sa.Double),
    sa.Column("decode_ms", sa.Double),
    sa.Column("decode_tokens", sa.BigInteger),  # as the gateway counted them for TPOT
    sa.Column("queue_ms", sa.Double),
    sa.Column("prefill_ms", sa.Double),
    sa.Column("transfer_ms", sa.Double),
    sa.Column("total_ms", sa.Double),
    sa.Column("slo_met", sa.Boolean),
    sa.Column("estimated", sa.Boolean, nullable=False),
    sa.Column("simulated", sa.Boolean, nullable=False),
    sa.Column("settled_by", sa.Text, nullable=False),
    sa.Column("billable", sa.Boolean, nullable=False),
    sa.Column("price_version", sa.Integer, nullable=False),
    sa.Column("cost", sa.BigInteger, nullable=False),  # nano; the sum of its usage records
    sa.Column("answered_cost", sa.BigInteger, nullable=False),  # nano; what the client was told
    sa.Column("recorded_at", _MOMENT, nullable=False, server_default=sa.func.now()),
    sa.Column("itl_p99_ms", sa.Double),
    *(sa.Column(name, sa.Text) for name in ("end_user", "safety_identifier", "reference")),  # contracts.dimensions
    sa.Column("tags", sa.Text),  # JSON object, as the client tagged it
    sa.Column("cache_scope", sa.Text, nullable=False, server_default="own"),
    sa.Index(None, "organisation", "at"),
    postgresql_partition_by="RANGE (at)",
)

usage_record = sa.Table(
    "usage_record",
    METADATA,
    sa.Column("request_id", sa.Uuid, primary_key=True),
    sa.Column("meter", METER, primary_key=True),
    sa.Column("at", _MOMENT, primary_key=True),
    sa.Column("organisation", sa.Text, nullable=False),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("tier", sa.Text, nullable=False),
    sa.Column("pool", sa.Text, nullable=False),
    sa.Column("worker", sa.Text, nullable=False),  # the one that did this phase
    sa.Column("path", sa.Text),
    sa.Column("hand_off", sa.Text),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("batch", sa.Boolean, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("price_version", sa.Integer, nullable=False),
    sa.Column("price", sa.BigInteger, nullable=False),  # nano per million tokens
    sa.Column("cost", sa.BigInteger, nullable=False),  # nano; 0 when not billable
    sa.Column("billable", sa.Boolean, nullable=False),
    sa.Column("scope", sa.Text, nullable=False, server_default="own"),  # own | shared, of cached prefixes
    sa.CheckConstraint("tokens >= 0 AND cost >= 0 AND (billable OR cost = 0)", name="amounts"),
    postgresql_partition_by="RANGE (at)",
)

usage_hourly = sa.Table(
    "usage_hourly",
    METADATA,
    sa.Column("organisation", sa.Text, primary_key=True),
    sa.Column("hour", _MOMENT, primary_key=True),
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("tier", sa.Text, primary_key=True),
    sa.Column("batch", sa.Boolean, primary_key=True),
    sa.Column("billable", sa.Boolean, primary_key=True),
    sa.Column("meter", METER, primary_key=True),
    sa.Column("price_version", sa.Integer, primary_key=True, autoincrement=False, server_default="0"),
    sa.Column("scope", sa.Text, primary_key=True, server_default="own"),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("cost", sa.BigInteger, nullable=False),  # nano
    sa.Column("requests", sa.BigInteger, nullable=False),  # the same on all meters of a group: read it from one
)

attempt_cost = sa.Table(
    "attempt_cost",
    METADATA,
    sa.Column("request_id", sa.Uuid, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sample", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("phase", sa.Text, primary_key=True),
    sa.Column("at", _MOMENT, primary_key=True),
    sa.Column("pool", sa.Text, nullable=False),
    sa.Column("worker", sa.Text, nullable=False),
    sa.Column("worker_epoch", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("compute_ms", sa.Double, nullable=False),
    sa.Column("ended_at", _MOMENT, nullable=False),
    sa.Column("worker_ms", sa.Double, nullable=False, server_default="0"),  # from accepted to ended
    sa.Column("kv_byte_s", sa.Double, nullable=False, server_default="0"),  # KV cache held, bytes x seconds
    postgresql_partition_by="RANGE (at)",
)

PARTITIONED = (request, usage_record, attempt_cost)

account = sa.Table(
    "account",
    METADATA,
    sa.Column("id", sa.Integer, sa.Identity(always=True), primary_key=True),
    sa.Column("code", sa.Text, nullable=False, unique=True),  # billing.accounts
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("organisation", sa.Text),
    sa.Column("meter", METER),
)

ledger_transaction = sa.Table(
    "ledger_transaction",
    METADATA,
    sa.Column("id", sa.Uuid, primary_key=True),  # of a usage posting: the request's id, so it posts once
    sa.Column("kind", sa.Text, nullable=False),  # billing.accounts.Posting
    sa.Column("organisation", sa.Text, nullable=False),
    sa.Column("at", _MOMENT, nullable=False),  # decides the period
    sa.Column("posted_at", _MOMENT, nullable=False, server_default=sa.func.now()),
    sa.Column("corrects", sa.Uuid, sa.ForeignKey("billing.ledger_transaction.id")),
    sa.Index(None, "at", postgresql_using="brin"),
    sa.Index(None, "organisation", "at", postgresql_where=sa.text("kind <> 'usage'")),
)

ledger_entry = sa.Table(
    "ledger_entry",
    METADATA,
    sa.Column("transaction_id", sa.Uuid, sa.ForeignKey(ledger_transaction.c.id), primary_key=True),
    sa.Column("account_id", sa.Integer, primary_key=True, autoincrement=False),  # of `account`; a trigger checks
    sa.Column("amount", sa.BigInteger, nullable=False),  # nano; debit > 0, credit < 0
    sa.CheckConstraint("amount <> 0", name="not_zero"),
)
