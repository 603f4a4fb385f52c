"""Files and batches."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = (
    """
    CREATE TABLE tenancy.file (
        id text CONSTRAINT pk_file PRIMARY KEY,
        organisation_id text NOT NULL
            CONSTRAINT fk_file_organisation_id REFERENCES tenancy.organisation (id),
        project_id text NOT NULL CONSTRAINT fk_file_project_id REFERENCES tenancy.project (id),
        purpose text NOT NULL,
        filename text NOT NULL,
        bytes bigint NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now()
    )
    """,
    "CREATE INDEX ix_file_organisation_id_created_at ON tenancy.file (organisation_id, created_at, id)",
    """
    CREATE TABLE tenancy.file_part (
        file_id text NOT NULL
            CONSTRAINT fk_file_part_file_id REFERENCES tenancy.file (id) ON DELETE CASCADE,
        part integer NOT NULL,
        data bytea NOT NULL,
        CONSTRAINT pk_file_part PRIMARY KEY (file_id, part)
    )
    """,
    """
    CREATE TABLE tenancy.batch (
        id text CONSTRAINT pk_batch PRIMARY KEY,
        organisation_id text NOT NULL
            CONSTRAINT fk_batch_organisation_id REFERENCES tenancy.organisation (id),
        project_id text NOT NULL CONSTRAINT fk_batch_project_id REFERENCES tenancy.project (id),
        key_id text NOT NULL,
        endpoint text NOT NULL,
        input_file_id text NOT NULL,
        output_file_id text,
        error_file_id text,
        status text NOT NULL DEFAULT 'validating' CONSTRAINT ck_batch_status CHECK (status IN (
            'validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', 'cancelled'
        )),
        errors jsonb NOT NULL DEFAULT '[]',
        metadata jsonb NOT NULL DEFAULT '{}',
        total integer NOT NULL DEFAULT 0,
        completed integer NOT NULL DEFAULT 0,
        failed integer NOT NULL DEFAULT 0,
        created_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        in_progress_at timestamptz,
        finalizing_at timestamptz,
        cancelling_at timestamptz,
        ended_at timestamptz,
        runner text,
        runner_until timestamptz
    )
    """,
    "CREATE INDEX ix_batch_organisation_id_created_at ON tenancy.batch (organisation_id, created_at, id)",
    "CREATE INDEX ix_batch_status ON tenancy.batch (status)",
    """
    CREATE TABLE tenancy.batch_line (
        batch_id text NOT NULL
            CONSTRAINT fk_batch_line_batch_id REFERENCES tenancy.batch (id) ON DELETE CASCADE,
        line integer NOT NULL,
        custom_id text NOT NULL,
        body bytea NOT NULL,
        state text NOT NULL DEFAULT 'waiting',
        rid text NOT NULL DEFAULT '',
        http_status integer NOT NULL DEFAULT 0,
        answer bytea,
        CONSTRAINT pk_batch_line PRIMARY KEY (batch_id, line)
    )
    """,
    "CREATE INDEX ix_batch_line_batch_id_state ON tenancy.batch_line (batch_id, state, line)",
)


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TABLE tenancy.batch_line, tenancy.batch, tenancy.file_part, tenancy.file")
