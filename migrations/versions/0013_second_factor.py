"""One-time codes beside the password, codes for when the phone is lost, and organisations that ask for them."""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE tenancy.second_factor (
            person_id text CONSTRAINT pk_second_factor PRIMARY KEY
                CONSTRAINT fk_second_factor_person_id REFERENCES tenancy.person (id),
            secret text NOT NULL,
            last_step bigint NOT NULL DEFAULT 0,
            created_at timestamptz NOT NULL DEFAULT now(),
            confirmed_at timestamptz
        )
        """
    )
    op.execute(
        """
        CREATE TABLE tenancy.recovery_code (
            person_id text NOT NULL CONSTRAINT fk_recovery_code_person_id REFERENCES tenancy.second_factor (person_id)
                ON DELETE CASCADE,
            code_hash bytea NOT NULL,
            used_at timestamptz,
            CONSTRAINT pk_recovery_code PRIMARY KEY (person_id, code_hash)
        )
        """
    )
    op.execute("ALTER TABLE tenancy.organisation ADD needs_second_factor boolean NOT NULL DEFAULT false")


def downgrade() -> None:
    op.execute("ALTER TABLE tenancy.organisation DROP needs_second_factor")
    op.execute("DROP TABLE tenancy.recovery_code")
    op.execute("DROP TABLE tenancy.second_factor")
