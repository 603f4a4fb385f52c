"""Models that operators add beside the catalogue's file."""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE tenancy.model (
            name text NOT NULL CONSTRAINT pk_model PRIMARY KEY,
            definition jsonb NOT NULL,
            actor text NOT NULL,
            added_at timestamptz NOT NULL DEFAULT now()
        )
        """
    )


def downgrade() -> None:
    op.execute("DROP TABLE tenancy.model")
