"""Files that expire."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE tenancy.file ADD COLUMN expires_at timestamptz")
    op.execute("CREATE INDEX ix_file_expires_at ON tenancy.file (expires_at) WHERE expires_at IS NOT NULL")


def downgrade() -> None:
    op.execute("DROP INDEX tenancy.ix_file_expires_at")
    op.execute("ALTER TABLE tenancy.file DROP COLUMN expires_at")
