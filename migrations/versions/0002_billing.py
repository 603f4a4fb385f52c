"""Prices, metered requests, the hourly rollup and the ledger.

Guards that no code path can forget: prices, accounts and ledger only append, and what one statement writes
into the ledger sums to zero in each transaction. `request`, `usage_record` and `attempt_cost` have daily
partitions, which billing.partitions makes ahead.
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

PRICE = """
CREATE TABLE billing.price (
    model text NOT NULL,
    version integer NOT NULL,
    organisation text,
    prefill_computed bigint NOT NULL,
    prefill_cached bigint NOT NULL,
    decode bigint NOT NULL,
    effective_from timestamptz NOT NULL,
    effective_to timestamptz,
    source text NOT NULL,
    set_by text NOT NULL DEFAULT '',
    set_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_price PRIMARY KEY (model, version),
    CONSTRAINT ck_price_not_negative CHECK (prefill_computed >= 0 AND prefill_cached >= 0 AND decode >= 0),
    CONSTRAINT ck_price_period CHECK (effective_to > effective_from),
    CONSTRAINT ck_price_source CHECK (source IN ('catalogue', 'admin'))
)
"""

REQUEST = """
CREATE TABLE billing.request (
    request_id uuid NOT NULL,
    at timestamptz NOT NULL,
    organisation text NOT NULL,
    project text NOT NULL,
    key_id text NOT NULL,
    model text NOT NULL,
    pool text NOT NULL,
    tier text NOT NULL,
    path text,
    hand_off text,
    attempts integer NOT NULL,
    batch boolean NOT NULL,
    stream boolean NOT NULL,
    prefill_worker text NOT NULL,
    decode_worker text NOT NULL,
    outcome text NOT NULL,
    cause text NOT NULL,
    finish_reason text NOT NULL,
    reasoning_tokens bigint NOT NULL,
    ttft_ms double precision,
    decode_ms double precision,
    decode_tokens bigint,
    queue_ms double precision,
    prefill_ms double precision,
    transfer_ms double precision,
    total_ms double precision,
    slo_met boolean,
    estimated boolean NOT NULL,
    simulated boolean NOT NULL,
    settled_by text NOT NULL,
    billable boolean NOT NULL,
    price_version integer NOT NULL,
    cost bigint NOT NULL,
    answered_cost bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_request PRIMARY KEY (request_id, at)
) PARTITION BY RANGE (at)
"""

USAGE_RECORD = """
CREATE TABLE billing.usage_record (
    request_id uuid NOT NULL,
    meter billing.meter NOT NULL,
    at timestamptz NOT NULL,
    organisation text NOT NULL,
    project text NOT NULL,
    key_id text NOT NULL,
    model text NOT NULL,
    tier text NOT NULL,
    pool text NOT NULL,
    worker text NOT NULL,
    path text,
    hand_off text,
    attempts integer NOT NULL,
    batch boolean NOT NULL,
    tokens bigint NOT NULL,
    price_version integer NOT NULL,
    price bigint NOT NULL,
    cost bigint NOT NULL,
    billable boolean NOT NULL,
    CONSTRAINT pk_usage_record PRIMARY KEY (request_id, meter, at),
    CONSTRAINT ck_usage_record_amounts CHECK (tokens >= 0 AND cost >= 0 AND (billable OR cost = 0))
) PARTITION BY RANGE (at)
"""

USAGE_HOURLY = """
CREATE TABLE billing.usage_hourly (
    organisation text NOT NULL,
    hour timestamptz NOT NULL,
    project text NOT NULL,
    key_id text NOT NULL,
    model text NOT NULL,
    tier text NOT NULL,
    batch boolean NOT NULL,
    billable boolean NOT NULL,
    meter billing.meter NOT NULL,
    tokens bigint NOT NULL,
    cost bigint NOT NULL,
    requests bigint NOT NULL,
    CONSTRAINT pk_usage_hourly
        PRIMARY KEY (organisation, hour, project, key_id, model, tier, batch, billable, meter)
) WITH (fillfactor = 70)
"""

ATTEMPT_COST = """
CREATE TABLE billing.attempt_cost (
    request_id uuid NOT NULL,
    attempt integer NOT NULL,
    sample integer NOT NULL,
    phase text NOT NULL,
    at timestamptz NOT NULL,
    pool text NOT NULL,
    worker text NOT NULL,
    worker_epoch bigint NOT NULL,
    reason text NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    compute_ms double precision NOT NULL,
    ended_at timestamptz NOT NULL,
    CONSTRAINT pk_attempt_cost PRIMARY KEY (request_id, attempt, sample, phase, at)
) PARTITION BY RANGE (at)
"""

LEDGER = (
    """
    CREATE TABLE billing.account (
        id integer GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_account PRIMARY KEY,
        code text NOT NULL CONSTRAINT uq_account_code UNIQUE,
        kind text NOT NULL,
        organisation text,
        meter billing.meter
    )
    """,
    """
    CREATE TABLE billing.ledger_transaction (
        id uuid CONSTRAINT pk_ledger_transaction PRIMARY KEY,
        kind text NOT NULL,
        organisation text NOT NULL,
        at timestamptz NOT NULL,
        posted_at timestamptz NOT NULL DEFAULT now(),
        corrects uuid CONSTRAINT fk_ledger_transaction_corrects REFERENCES billing.ledger_transaction (id)
    )
    """,
    "CREATE INDEX ix_ledger_transaction_at ON billing.ledger_transaction USING brin (at)",
    """
    CREATE TABLE billing.ledger_entry (
        transaction_id uuid NOT NULL
            CONSTRAINT fk_ledger_entry_transaction_id REFERENCES billing.ledger_transaction (id),
        account_id integer NOT NULL,
        amount bigint NOT NULL CONSTRAINT ck_ledger_entry_not_zero CHECK (amount <> 0),
        CONSTRAINT pk_ledger_entry PRIMARY KEY (transaction_id, account_id)
    )
    """,
)

APPEND_ONLY = """
CREATE FUNCTION billing.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% only appends: post a correction instead', TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END
$$
"""

# One check per statement over all rows it added: measured 6 us per usage row cheaper than a deferred trigger per
# entry. It also stands in for the foreign key to `account`, which would share-lock the few revenue accounts in
# every transaction of every consumer.
CHECK_ENTRIES = """
CREATE FUNCTION billing.check_entries() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    wrong record;
BEGIN
    SELECT transaction_id, sum(amount) AS total INTO wrong
    FROM added GROUP BY transaction_id HAVING sum(amount) <> 0 LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'ledger transaction % sums to %, not 0', wrong.transaction_id, wrong.total
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    SELECT account_id INTO wrong
    FROM added WHERE NOT EXISTS (SELECT FROM billing.account WHERE id = added.account_id) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'no account %', wrong.account_id USING ERRCODE = 'foreign_key_violation';
    END IF;
    RETURN NULL;
END
$$
"""


def upgrade() -> None:
    op.execute("CREATE SCHEMA billing")
    op.execute("CREATE TYPE billing.meter AS ENUM ('prefill_computed', 'prefill_cached', 'decode')")
    for statement in (PRICE, REQUEST, USAGE_RECORD, USAGE_HOURLY, ATTEMPT_COST, *LEDGER):
        op.execute(statement)
    op.execute("CREATE INDEX ix_request_organisation_at ON billing.request (organisation, at)")
    op.execute(APPEND_ONLY)
    for table in ("price", "account", "ledger_transaction", "ledger_entry"):
        op.execute(
            f"CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON billing.{table}"
            " FOR EACH STATEMENT EXECUTE FUNCTION billing.refuse_change()"
        )
    op.execute(CHECK_ENTRIES)
    op.execute(
        "CREATE TRIGGER check_entries AFTER INSERT ON billing.ledger_entry REFERENCING NEW TABLE AS added"
        " FOR EACH STATEMENT EXECUTE FUNCTION billing.check_entries()"
    )


def downgrade() -> None:
    op.execute("DROP SCHEMA billing CASCADE")
