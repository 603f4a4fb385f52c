"""Invoices and credit notes at a payment provider: what was asked, what it answered."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

CUSTOMER = """
CREATE TABLE billing.payment_customer (
    organisation text NOT NULL,
    provider text NOT NULL,
    reference text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_payment_customer PRIMARY KEY (organisation, provider)
)
"""
COLLECTION = """
CREATE TABLE billing.collection (
    invoice_id uuid NOT NULL CONSTRAINT pk_collection PRIMARY KEY
        CONSTRAINT fk_collection_invoice_id REFERENCES billing.invoice (id),
    provider text NOT NULL,
    state text NOT NULL,
    amount_cents bigint NOT NULL,
    reference text NOT NULL DEFAULT '',
    url text NOT NULL DEFAULT '',
    reason text NOT NULL DEFAULT '',
    tries integer NOT NULL DEFAULT 0,
    declines integer NOT NULL DEFAULT 0,
    next_at timestamptz NOT NULL DEFAULT now(),
    asked_at timestamptz NOT NULL DEFAULT now(),
    said_at timestamptz
)
"""
MINE = "current_setting('pdgate.tenant', true)"


def upgrade() -> None:
    op.execute(CUSTOMER)
    op.execute(COLLECTION)
    op.execute("CREATE INDEX ix_collection_next_at ON billing.collection (next_at) WHERE state = 'asked'")
    op.execute("GRANT SELECT ON billing.collection TO pdgate_tenant")
    op.execute("ALTER TABLE billing.collection ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"""
        CREATE POLICY own_rows ON billing.collection FOR SELECT USING (
            EXISTS (SELECT FROM billing.invoice i WHERE i.id = collection.invoice_id AND i.organisation = {MINE})
        )
        """  # noqa: S608 - our own constant
    )


def downgrade() -> None:
    op.execute("DROP TABLE billing.collection")
    op.execute("DROP TABLE billing.payment_customer")
