"""People, memberships, one-time links and service accounts; the record of changes only appends."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

CHANGES = (
    """
    CREATE TABLE tenancy.person (
        id text CONSTRAINT pk_person PRIMARY KEY,
        email text NOT NULL CONSTRAINT uq_person_email UNIQUE,
        name text NOT NULL DEFAULT '',
        password_hash text,
        is_operator boolean NOT NULL DEFAULT false,
        time_zone text NOT NULL DEFAULT '',
        created_at timestamptz NOT NULL DEFAULT now(),
        signed_in_at timestamptz,
        disabled_at timestamptz
    )
    """,
    """
    CREATE TABLE tenancy.identity (
        issuer text NOT NULL,
        subject text NOT NULL,
        person_id text NOT NULL CONSTRAINT fk_identity_person_id REFERENCES tenancy.person (id),
        created_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT pk_identity PRIMARY KEY (issuer, subject)
    )
    """,
    "CREATE INDEX ix_identity_person_id ON tenancy.identity (person_id)",
    """
    CREATE TABLE tenancy.membership (
        organisation_id text NOT NULL CONSTRAINT fk_membership_organisation_id REFERENCES tenancy.organisation (id),
        person_id text NOT NULL CONSTRAINT fk_membership_person_id REFERENCES tenancy.person (id),
        role text NOT NULL
            CONSTRAINT ck_membership_role CHECK (role IN ('owner', 'admin', 'developer', 'billing', 'viewer')),
        created_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT pk_membership PRIMARY KEY (organisation_id, person_id)
    )
    """,
    "CREATE INDEX ix_membership_person_id ON tenancy.membership (person_id)",
    """
    CREATE TABLE tenancy.link (
        id text CONSTRAINT pk_link PRIMARY KEY,
        kind text NOT NULL CONSTRAINT ck_link_kind CHECK (kind IN ('invite', 'reset', 'sign_in')),
        token_hash bytea NOT NULL CONSTRAINT uq_link_token_hash UNIQUE,
        email text NOT NULL DEFAULT '',
        organisation_id text CONSTRAINT fk_link_organisation_id REFERENCES tenancy.organisation (id),
        role text,
        person_id text CONSTRAINT fk_link_person_id REFERENCES tenancy.person (id),
        issued_by text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        used_at timestamptz,
        withdrawn_at timestamptz,
        CONSTRAINT ck_link_role CHECK ((kind = 'invite') = (role IS NOT NULL))
    )
    """,
    "CREATE INDEX ix_link_organisation_id ON tenancy.link (organisation_id)",
    "CREATE INDEX ix_link_person_id ON tenancy.link (person_id)",
    """
    CREATE TABLE tenancy.service_account (
        id text CONSTRAINT pk_service_account PRIMARY KEY,
        organisation_id text NOT NULL
            CONSTRAINT fk_service_account_organisation_id REFERENCES tenancy.organisation (id),
        project_id text NOT NULL CONSTRAINT fk_service_account_project_id REFERENCES tenancy.project (id),
        name text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        removed_at timestamptz
    )
    """,
    "CREATE INDEX ix_service_account_organisation_id ON tenancy.service_account (organisation_id)",
    "CREATE INDEX ix_service_account_project_id ON tenancy.service_account (project_id)",
    "ALTER TABLE tenancy.organisation ADD runs_fleet boolean NOT NULL DEFAULT false",
    "ALTER TABLE tenancy.api_key ADD owner text NOT NULL DEFAULT ''",
    """
    CREATE FUNCTION tenancy.refuse_change_of_record() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'UPDATE' AND OLD.published_at IS NULL AND NEW.published_at IS NOT NULL
            AND (to_jsonb(NEW) - 'published_at') = (to_jsonb(OLD) - 'published_at') THEN
            RETURN NEW;
        END IF;
        RAISE EXCEPTION 'tenancy.change only appends' USING ERRCODE = 'restrict_violation';
    END $$
    """,
    """
    CREATE TRIGGER only_appends BEFORE UPDATE OR DELETE ON tenancy.change
        FOR EACH ROW EXECUTE FUNCTION tenancy.refuse_change_of_record()
    """,
)


def upgrade() -> None:
    for change in CHANGES:
        op.execute(change)


def downgrade() -> None:
    op.execute("DROP TRIGGER only_appends ON tenancy.change")
    op.execute("DROP FUNCTION tenancy.refuse_change_of_record()")
    op.execute("ALTER TABLE tenancy.api_key DROP owner")
    op.execute("ALTER TABLE tenancy.organisation DROP runs_fleet")
    for table in ("service_account", "link", "membership", "identity", "person"):
        op.execute(f"DROP TABLE tenancy.{table}")
