"""Credits, budgets, invoices, SLO credits, re-ratings and share groups; prices per tier with discounts and minimums.

What records money only appends, like the ledger. Invoices move through their states; their lines never change.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

CHANGES = (
    "ALTER TYPE billing.meter ADD VALUE IF NOT EXISTS 'minimum_charge'",
    """
    ALTER TABLE billing.price
        ADD tier text,
        ADD prefill_shared bigint,
        ADD batch_ppm integer NOT NULL DEFAULT 1000000,
        ADD minimum bigint NOT NULL DEFAULT 0,
        ADD CONSTRAINT ck_price_terms
            CHECK (coalesce(prefill_shared, 0) >= 0 AND batch_ppm BETWEEN 0 AND 1000000 AND minimum >= 0)
    """,
    """
    ALTER TABLE billing.request
        ADD itl_p99_ms double precision,
        ADD end_user text,
        ADD safety_identifier text,
        ADD reference text,
        ADD tags text,
        ADD cache_scope text NOT NULL DEFAULT 'own'
    """,
    "ALTER TABLE billing.usage_record ADD scope text NOT NULL DEFAULT 'own'",
    "ALTER TABLE billing.usage_hourly ADD price_version integer NOT NULL DEFAULT 0",
    "ALTER TABLE billing.usage_hourly ADD scope text NOT NULL DEFAULT 'own'",
    "ALTER TABLE billing.usage_hourly DROP CONSTRAINT pk_usage_hourly",
    """
    ALTER TABLE billing.usage_hourly ADD CONSTRAINT pk_usage_hourly PRIMARY KEY
        (organisation, hour, project, key_id, model, tier, batch, billable, meter, price_version, scope)
    """,
    """
    ALTER TABLE billing.attempt_cost
        ADD worker_ms double precision NOT NULL DEFAULT 0,
        ADD kv_byte_s double precision NOT NULL DEFAULT 0
    """,
    # Everything but usage is rare and read by organisation.
    """
    CREATE INDEX ix_ledger_transaction_organisation_at ON billing.ledger_transaction (organisation, at)
        WHERE kind <> 'usage'
    """,
)

TABLES = (
    """
    CREATE TABLE billing.profile (
        organisation text CONSTRAINT pk_profile PRIMARY KEY,
        legal_name text NOT NULL DEFAULT '',
        address text NOT NULL DEFAULT '',
        country text NOT NULL DEFAULT '',
        tax_id text NOT NULL DEFAULT '',
        tax_name text NOT NULL DEFAULT '',
        tax_ppm integer NOT NULL DEFAULT 0,
        email text NOT NULL DEFAULT '',
        time_zone text NOT NULL DEFAULT 'UTC',
        prepaid boolean NOT NULL DEFAULT false,
        terms_days integer NOT NULL DEFAULT 14,
        webhook_url text NOT NULL DEFAULT '',
        webhook_secret text NOT NULL DEFAULT '',
        CONSTRAINT ck_profile_tax CHECK (tax_ppm BETWEEN 0 AND 1000000)
    )
    """,
    """
    CREATE TABLE billing.seller (
        singleton boolean NOT NULL DEFAULT true CONSTRAINT pk_seller PRIMARY KEY,
        legal_name text NOT NULL,
        address text NOT NULL,
        country text NOT NULL,
        tax_id text NOT NULL,
        email text NOT NULL,
        CONSTRAINT ck_seller_singleton CHECK (singleton)
    )
    """,
    """
    CREATE TABLE billing.credit_grant (
        id uuid CONSTRAINT pk_credit_grant PRIMARY KEY,
        organisation text NOT NULL,
        kind text NOT NULL,
        amount bigint NOT NULL,
        priority integer NOT NULL,
        granted_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz,
        idempotency text NOT NULL,
        note text NOT NULL,
        granted_by text NOT NULL,
        CONSTRAINT uq_credit_grant_organisation_idempotency UNIQUE (organisation, idempotency),
        CONSTRAINT ck_credit_grant_terms CHECK (amount > 0 AND kind IN ('paid', 'promotional'))
    )
    """,
    """
    CREATE TABLE billing.budget (
        organisation text NOT NULL,
        scope text NOT NULL,
        scope_id text NOT NULL,
        amount bigint NOT NULL,
        hard boolean NOT NULL,
        thresholds integer[] NOT NULL,
        set_by text NOT NULL,
        set_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT pk_budget PRIMARY KEY (organisation, scope, scope_id),
        CONSTRAINT ck_budget_terms CHECK (amount >= 0 AND scope IN ('org', 'project', 'key'))
    )
    """,
    """
    CREATE TABLE billing.budget_alert (
        organisation text NOT NULL,
        scope text NOT NULL,
        scope_id text NOT NULL,
        period_start timestamptz NOT NULL,
        threshold integer NOT NULL,
        spent bigint NOT NULL,
        amount bigint NOT NULL,
        at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT pk_budget_alert PRIMARY KEY (organisation, scope, scope_id, period_start, threshold)
    )
    """,
    """
    CREATE TABLE billing.webhook (
        id uuid CONSTRAINT pk_webhook PRIMARY KEY,
        organisation text NOT NULL,
        url text NOT NULL,
        body text NOT NULL,
        tries integer NOT NULL DEFAULT 0,
        next_at timestamptz NOT NULL DEFAULT now(),
        created_at timestamptz NOT NULL DEFAULT now(),
        delivered_at timestamptz,
        given_up_at timestamptz,
        last_error text NOT NULL DEFAULT ''
    )
    """,
    """
    CREATE INDEX ix_webhook_next_at ON billing.webhook (next_at)
        WHERE delivered_at IS NULL AND given_up_at IS NULL
    """,
    """
    CREATE TABLE billing.invoice (
        id uuid CONSTRAINT pk_invoice PRIMARY KEY,
        organisation text NOT NULL,
        kind text NOT NULL,
        number text CONSTRAINT uq_invoice_number UNIQUE,
        state text NOT NULL,
        period_start timestamptz NOT NULL,
        period_end timestamptz NOT NULL,
        corrects uuid CONSTRAINT fk_invoice_corrects REFERENCES billing.invoice (id),
        currency text NOT NULL,
        seller jsonb NOT NULL,
        buyer jsonb NOT NULL,
        subtotal_cents bigint NOT NULL,
        tax_cents bigint NOT NULL,
        total_cents bigint NOT NULL,
        credits_cents bigint NOT NULL,
        due_cents bigint NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        issued_at timestamptz,
        due_at timestamptz,
        paid_at timestamptz,
        voided_at timestamptz,
        CONSTRAINT ck_invoice_kind CHECK (kind IN ('invoice', 'credit_note')),
        CONSTRAINT ck_invoice_state CHECK (state IN ('draft', 'issued', 'paid', 'void')),
        CONSTRAINT ck_invoice_numbered CHECK ((state = 'draft') = (number IS NULL))
    )
    """,
    """
    CREATE UNIQUE INDEX uq_invoice_organisation_period_start ON billing.invoice (organisation, period_start)
        WHERE kind = 'invoice'
    """,
    """
    CREATE TABLE billing.invoice_line (
        invoice_id uuid NOT NULL CONSTRAINT fk_invoice_line_invoice_id REFERENCES billing.invoice (id),
        position integer NOT NULL,
        kind text NOT NULL,
        description text NOT NULL,
        project text,
        model text,
        tier text,
        meter text,
        scope text,
        batch boolean,
        price_version integer,
        price bigint,
        tokens bigint,
        requests bigint,
        amount bigint NOT NULL,
        amount_cents bigint NOT NULL,
        of_period timestamptz NOT NULL,
        CONSTRAINT pk_invoice_line PRIMARY KEY (invoice_id, position)
    )
    """,
    """
    CREATE TABLE billing.invoice_transaction (
        transaction_id uuid CONSTRAINT pk_invoice_transaction PRIMARY KEY
            CONSTRAINT fk_invoice_transaction_transaction_id REFERENCES billing.ledger_transaction (id),
        invoice_id uuid NOT NULL CONSTRAINT fk_invoice_transaction_invoice_id REFERENCES billing.invoice (id)
    )
    """,
    "CREATE INDEX ix_invoice_transaction_invoice_id ON billing.invoice_transaction (invoice_id)",
    """
    CREATE TABLE billing.invoice_number (
        series text CONSTRAINT pk_invoice_number PRIMARY KEY,
        last bigint NOT NULL
    )
    """,
    """
    CREATE TABLE billing.payment (
        id uuid CONSTRAINT pk_payment PRIMARY KEY,
        invoice_id uuid NOT NULL CONSTRAINT fk_payment_invoice_id REFERENCES billing.invoice (id),
        provider text NOT NULL,
        reference text NOT NULL,
        amount_cents bigint NOT NULL,
        at timestamptz NOT NULL DEFAULT now(),
        recorded_by text NOT NULL,
        CONSTRAINT uq_payment_provider_reference UNIQUE (provider, reference)
    )
    """,
    """
    CREATE TABLE billing.slo_promise (
        model text NOT NULL,
        tier text NOT NULL,
        effective_from timestamptz NOT NULL,
        attainment_ppm integer NOT NULL,
        credit_ppm integer NOT NULL,
        set_by text NOT NULL,
        CONSTRAINT pk_slo_promise PRIMARY KEY (model, tier, effective_from),
        CONSTRAINT ck_slo_promise_terms
            CHECK (attainment_ppm BETWEEN 0 AND 1000000 AND credit_ppm BETWEEN 0 AND 1000000)
    )
    """,
    """
    CREATE TABLE billing.slo_credit (
        id uuid CONSTRAINT pk_slo_credit PRIMARY KEY,
        organisation text NOT NULL,
        period_start timestamptz NOT NULL,
        model text NOT NULL,
        tier text NOT NULL,
        met bigint NOT NULL,
        missed bigint NOT NULL,
        attainment_ppm integer NOT NULL,
        credit_ppm integer NOT NULL,
        base bigint NOT NULL,
        amount bigint NOT NULL,
        CONSTRAINT uq_slo_credit_organisation_period_start_model_tier UNIQUE (organisation, period_start, model, tier)
    )
    """,
    """
    CREATE TABLE billing.slo_missed (
        slo_credit_id uuid NOT NULL CONSTRAINT fk_slo_missed_slo_credit_id REFERENCES billing.slo_credit (id),
        request_id uuid NOT NULL,
        at timestamptz NOT NULL,
        outcome text NOT NULL,
        ttft_ms double precision,
        tpot_ms double precision,
        CONSTRAINT pk_slo_missed PRIMARY KEY (slo_credit_id, request_id)
    )
    """,
    """
    CREATE TABLE billing.rerating (
        id uuid CONSTRAINT pk_rerating PRIMARY KEY,
        model text NOT NULL,
        price_version integer NOT NULL,
        organisation text,
        from_at timestamptz NOT NULL,
        to_at timestamptz NOT NULL,
        reason text NOT NULL,
        made_by text NOT NULL,
        at timestamptz NOT NULL DEFAULT now(),
        requests bigint NOT NULL,
        delta bigint NOT NULL,
        CONSTRAINT fk_rerating_model FOREIGN KEY (model, price_version) REFERENCES billing.price (model, version)
    )
    """,
    """
    CREATE TABLE billing.rerating_line (
        rerating_id uuid NOT NULL,
        request_id uuid NOT NULL,
        meter billing.meter NOT NULL,
        old_cost bigint NOT NULL,
        new_cost bigint NOT NULL,
        CONSTRAINT pk_rerating_line PRIMARY KEY (request_id, meter, rerating_id)
    )
    """,
    """
    CREATE TABLE billing.share_group (
        id text CONSTRAINT pk_share_group PRIMARY KEY,
        name text NOT NULL,
        created_by text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now()
    )
    """,
    """
    CREATE TABLE billing.share_consent (
        id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_share_consent PRIMARY KEY,
        group_id text NOT NULL CONSTRAINT fk_share_consent_group_id REFERENCES billing.share_group (id),
        organisation text NOT NULL,
        consents boolean NOT NULL,
        by text NOT NULL,
        at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    "CREATE INDEX ix_share_consent_organisation ON billing.share_consent (organisation)",
)
APPEND_ONLY = (
    "credit_grant",
    "budget_alert",
    "invoice_line",
    "invoice_transaction",
    "payment",
    "slo_promise",
    "slo_credit",
    "slo_missed",
    "rerating",
    "rerating_line",
    "share_group",
    "share_consent",
)
DROPPED = (
    "share_consent",
    "share_group",
    "rerating_line",
    "rerating",
    "slo_missed",
    "slo_credit",
    "slo_promise",
    "payment",
    "invoice_number",
    "invoice_transaction",
    "invoice_line",
    "invoice",
    "webhook",
    "budget_alert",
    "budget",
    "credit_grant",
    "seller",
    "profile",
)


def upgrade() -> None:
    for statement in (*CHANGES, *TABLES):
        op.execute(statement)
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON billing.{table}"
            " FOR EACH STATEMENT EXECUTE FUNCTION billing.refuse_change()"
        )


def downgrade() -> None:
    op.execute(f"DROP TABLE {', '.join(f'billing.{table}' for table in DROPPED)}")
    op.execute("DROP INDEX billing.ix_ledger_transaction_organisation_at")
    op.execute("ALTER TABLE billing.attempt_cost DROP worker_ms, DROP kv_byte_s")
    op.execute("ALTER TABLE billing.usage_hourly DROP CONSTRAINT pk_usage_hourly, DROP price_version, DROP scope")
    op.execute(
        "ALTER TABLE billing.usage_hourly ADD CONSTRAINT pk_usage_hourly"
        " PRIMARY KEY (organisation, hour, project, key_id, model, tier, batch, billable, meter)"
    )
    op.execute("ALTER TABLE billing.usage_record DROP scope")
    op.execute(
        "ALTER TABLE billing.request DROP itl_p99_ms, DROP end_user, DROP safety_identifier, DROP reference, DROP tags,"
        " DROP cache_scope"
    )
    op.execute(
        "ALTER TABLE billing.price DROP CONSTRAINT ck_price_terms, DROP tier, DROP prefill_shared, DROP batch_ppm,"
        " DROP minimum"
    )
