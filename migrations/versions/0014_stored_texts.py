"""Prompts and answers of organisations that want them stored."""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        ALTER TABLE tenancy.organisation ADD texts_since timestamptz,
            ADD texts_days integer NOT NULL DEFAULT 30 CONSTRAINT ck_organisation_texts_days CHECK (texts_days > 0)
        """
    )
    op.execute(
        """
        CREATE TABLE tenancy.stored_text (
            organisation_id text NOT NULL
                CONSTRAINT fk_stored_text_organisation_id REFERENCES tenancy.organisation (id),
            request_id uuid NOT NULL,
            at timestamptz NOT NULL,
            asked_with uuid NOT NULL,
            prompt bytea NOT NULL,
            prompt_cut boolean NOT NULL,
            answer bytea NOT NULL,
            answer_cut boolean NOT NULL,
            broken text NOT NULL,
            CONSTRAINT pk_stored_text PRIMARY KEY (organisation_id, request_id)
        )
        """
    )
    op.execute("CREATE INDEX ix_stored_text_organisation_id_at ON tenancy.stored_text (organisation_id, at)")
    op.execute("GRANT SELECT ON tenancy.stored_text TO pdgate_tenant")
    op.execute("ALTER TABLE tenancy.stored_text ENABLE ROW LEVEL SECURITY")
    # Who withdraws the consent, or shortens the time, is obeyed at once; the rows are deleted after that.
    op.execute(
        """
        CREATE POLICY own_rows ON tenancy.stored_text FOR SELECT USING (
            organisation_id = current_setting('pdgate.tenant', true)
            AND EXISTS (
                SELECT FROM tenancy.organisation o
                WHERE o.id = stored_text.organisation_id AND stored_text.at >= o.texts_since
                    AND stored_text.at >= now() - make_interval(days => o.texts_days)
            )
        )
        """
    )


def downgrade() -> None:
    op.execute("DROP TABLE tenancy.stored_text")
    op.execute("ALTER TABLE tenancy.organisation DROP texts_since, DROP texts_days")
