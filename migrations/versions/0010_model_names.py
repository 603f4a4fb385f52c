"""Names that operators give to models: aliases, shares of a name, and when a name ends."""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE tenancy.model_name (
            name text NOT NULL CONSTRAINT pk_model_name PRIMARY KEY,
            targets jsonb NOT NULL,
            deprecated_at timestamptz,
            sunset_at timestamptz,
            replacement text NOT NULL,
            actor text NOT NULL,
            changed_at timestamptz NOT NULL DEFAULT now()
        )
        """
    )


def downgrade() -> None:
    op.execute("DROP TABLE tenancy.model_name")
