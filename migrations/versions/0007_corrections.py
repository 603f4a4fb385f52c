"""Corrections of single requests: the counts that hold from then on, beside the ones that were billed."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLE = """
CREATE TABLE billing.correction (
    sequence bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_correction PRIMARY KEY,
    id uuid NOT NULL CONSTRAINT uq_correction_id UNIQUE,
    request_id uuid NOT NULL,
    request_at timestamptz NOT NULL,
    organisation text NOT NULL,
    model text NOT NULL,
    price_version integer NOT NULL,
    prefill_computed bigint NOT NULL,
    prefill_cached bigint NOT NULL,
    decode bigint NOT NULL,
    old_prefill_computed bigint NOT NULL,
    old_prefill_cached bigint NOT NULL,
    old_decode bigint NOT NULL,
    delta bigint NOT NULL,
    reason text NOT NULL,
    made_by text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT ck_correction_not_negative CHECK (prefill_computed >= 0 AND prefill_cached >= 0 AND decode >= 0)
)
"""


def upgrade() -> None:
    op.execute(TABLE)
    op.execute("CREATE INDEX ix_correction_request_at ON billing.correction (request_at)")
    op.execute("CREATE INDEX ix_correction_request_id ON billing.correction (request_id, sequence)")
    op.execute(
        "CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON billing.correction"
        " FOR EACH STATEMENT EXECUTE FUNCTION billing.refuse_change()"
    )


def downgrade() -> None:
    op.execute("DROP TABLE billing.correction")
