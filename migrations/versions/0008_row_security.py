"""Row-level security, the second line between tenants.

Who reads as the role `pdgate_tenant` sees the rows of one organisation, the one in the setting `pdgate.tenant`, and no
table that is not listed here. The services themselves read as the owner of the tables, whom policies do not bind: they
become `pdgate_tenant` for one transaction when they answer one tenant (gateway.tenant_read).
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

MINE = "current_setting('pdgate.tenant', true)"

POLICIES = {
    "tenancy.organisation": f"id = {MINE}",
    **{
        f"tenancy.{name}": f"organisation_id = {MINE}"
        for name in (*("project", "api_key", "membership", "link", "service_account", "change", "file", "batch"),)
    },
    "tenancy.person": f"""
        EXISTS (SELECT FROM tenancy.membership m WHERE m.person_id = person.id AND m.organisation_id = {MINE})
    """,
    "tenancy.hold": f"""
        (kind = 'org' AND hold.id = {MINE}) OR (
            kind = 'project'
            AND EXISTS (SELECT FROM tenancy.project p WHERE p.id = hold.id AND p.organisation_id = {MINE})
        )
    """,
    "tenancy.file_part": f"""
        EXISTS (SELECT FROM tenancy.file f WHERE f.id = file_part.file_id AND f.organisation_id = {MINE})
    """,
    "tenancy.batch_line": f"""
        EXISTS (SELECT FROM tenancy.batch b WHERE b.id = batch_line.batch_id AND b.organisation_id = {MINE})
    """,
    **{
        f"billing.{name}": f"organisation = {MINE}"
        for name in (
            *("request", "usage_record", "usage_hourly", "ledger_transaction", "profile", "credit_grant", "budget"),
            *("budget_alert", "webhook", "invoice", "slo_credit", "share_consent", "correction"),
        )
    },
    # List prices, and accounts that belong to nobody, are everybody's to read.
    **{f"billing.{name}": f"organisation IS NULL OR organisation = {MINE}" for name in ("price", "account")},
    "billing.ledger_entry": f"""
        EXISTS (
            SELECT FROM billing.ledger_transaction t
            WHERE t.id = ledger_entry.transaction_id AND t.organisation = {MINE}
        )
    """,
    **{
        f"billing.{name}": f"""
        EXISTS (SELECT FROM billing.invoice i WHERE i.id = {name}.invoice_id AND i.organisation = {MINE})
    """
        for name in ("invoice_line", "invoice_transaction", "payment")
    },
    "billing.attempt_cost": f"""
        EXISTS (
            SELECT FROM billing.request r
            WHERE r.request_id = attempt_cost.request_id AND r.at = attempt_cost.at AND r.organisation = {MINE}
        )
    """,
    "billing.slo_missed": f"""
        EXISTS (SELECT FROM billing.slo_credit c WHERE c.id = slo_missed.slo_credit_id AND c.organisation = {MINE})
    """,
}

OPEN = ("billing.slo_promise",)  # the same for everybody

COLUMNS = {  # of tables that hold what opens something
    "tenancy.person": "id, email, name, is_operator, time_zone, created_at, signed_in_at, disabled_at",
    "tenancy.link": (
        "id, kind, email, organisation_id, role, person_id, issued_by, created_at, expires_at, used_at, withdrawn_at"
    ),
}

ROLE = """
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'pdgate_tenant') THEN
        CREATE ROLE pdgate_tenant NOLOGIN;
    END IF;
    EXECUTE format('GRANT pdgate_tenant TO %I', current_user);
END $$
"""


def upgrade() -> None:
    op.execute(ROLE)
    op.execute("GRANT USAGE ON SCHEMA tenancy, billing TO pdgate_tenant")
    for table, condition in POLICIES.items():
        columns = f" ({COLUMNS[table]})" if table in COLUMNS else ""
        op.execute(f"GRANT SELECT{columns} ON {table} TO pdgate_tenant")
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY own_rows ON {table} FOR SELECT USING ({condition})")
    for table in OPEN:
        op.execute(f"GRANT SELECT ON {table} TO pdgate_tenant")


def downgrade() -> None:
    for table in POLICIES:
        op.execute(f"DROP POLICY own_rows ON {table}")
        op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    op.execute("DROP OWNED BY pdgate_tenant")  # its rights here; the role may serve other databases
