"""Scopes of keys and projects, overlapping rotation, imported keys, holds, and the record of changes.

A change is written in the transaction that makes it: it is the audit log, and what is not yet published is the outbox.
"""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

CHANGES = (
    "ALTER TABLE tenancy.project ADD scopes jsonb NOT NULL DEFAULT '{}'",
    """
    ALTER TABLE tenancy.api_key
        ADD scopes jsonb NOT NULL DEFAULT '{}',
        ADD imported boolean NOT NULL DEFAULT false,
        ADD old_hash bytea CONSTRAINT uq_api_key_old_hash UNIQUE,
        ADD old_hash_until timestamptz
    """,
    """
    CREATE TABLE tenancy.hold (
        kind text NOT NULL CONSTRAINT ck_hold_kind CHECK (kind IN ('org', 'project', 'model')),
        id text NOT NULL,
        mode text NOT NULL CONSTRAINT ck_hold_mode CHECK (mode IN ('suspended', 'read_only')),
        drain boolean NOT NULL,
        reason text NOT NULL,
        actor text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT pk_hold PRIMARY KEY (kind, id)
    )
    """,
    """
    CREATE TABLE tenancy.change (
        id bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_change PRIMARY KEY,
        at timestamptz NOT NULL DEFAULT now(),
        actor text NOT NULL,
        action text NOT NULL,
        kind text NOT NULL,
        subject text NOT NULL,
        organisation_id text,
        detail jsonb NOT NULL DEFAULT '{}',
        published_at timestamptz
    )
    """,
    "CREATE INDEX ix_change_organisation_id ON tenancy.change (organisation_id, id)",
    "CREATE INDEX ix_change_unpublished ON tenancy.change (id) WHERE published_at IS NULL",
)


def upgrade() -> None:
    for change in CHANGES:
        op.execute(change)


def downgrade() -> None:
    op.execute("DROP TABLE tenancy.change")
    op.execute("DROP TABLE tenancy.hold")
    op.execute("ALTER TABLE tenancy.api_key DROP scopes, DROP imported, DROP old_hash, DROP old_hash_until")
    op.execute("ALTER TABLE tenancy.project DROP scopes")
