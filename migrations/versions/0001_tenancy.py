"""Organisations, projects and keys."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE SCHEMA tenancy")
    op.execute(
        """
        CREATE TABLE tenancy.organisation (
            id text CONSTRAINT pk_organisation PRIMARY KEY,
            name text NOT NULL,
            is_demo boolean NOT NULL DEFAULT false,
            limits jsonb NOT NULL DEFAULT '{}',
            created_at timestamptz NOT NULL DEFAULT now()
        )
        """
    )
    op.execute(
        """
        CREATE TABLE tenancy.project (
            id text CONSTRAINT pk_project PRIMARY KEY,
            organisation_id text NOT NULL
                CONSTRAINT fk_project_organisation_id REFERENCES tenancy.organisation (id),
            name text NOT NULL,
            limits jsonb NOT NULL DEFAULT '{}',
            created_at timestamptz NOT NULL DEFAULT now()
        )
        """
    )
    op.execute("CREATE INDEX ix_project_organisation_id ON tenancy.project (organisation_id)")
    op.execute(
        """
        CREATE TABLE tenancy.api_key (
            id text CONSTRAINT pk_api_key PRIMARY KEY,
            organisation_id text NOT NULL
                CONSTRAINT fk_api_key_organisation_id REFERENCES tenancy.organisation (id),
            project_id text NOT NULL CONSTRAINT fk_api_key_project_id REFERENCES tenancy.project (id),
            name text NOT NULL,
            prefix text NOT NULL,
            hash bytea NOT NULL CONSTRAINT uq_api_key_hash UNIQUE,
            state text NOT NULL DEFAULT 'active' CONSTRAINT ck_api_key_state CHECK (state IN ('active', 'revoked')),
            version integer NOT NULL DEFAULT 1,
            is_admin boolean NOT NULL DEFAULT false,
            limits jsonb NOT NULL DEFAULT '{}',
            created_at timestamptz NOT NULL DEFAULT now(),
            expires_at timestamptz
        )
        """
    )
    op.execute("CREATE INDEX ix_api_key_organisation_id ON tenancy.api_key (organisation_id)")
    op.execute("CREATE INDEX ix_api_key_project_id ON tenancy.api_key (project_id)")


def downgrade() -> None:
    op.execute("DROP SCHEMA tenancy CASCADE")
