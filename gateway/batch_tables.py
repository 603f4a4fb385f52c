"""Tables of files and batches, in the schema `tenancy`. Owned by the gateway."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from gateway.tables import METADATA, organisation, project

file = sa.Table(
    "file",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),  # file-...
    sa.Column("organisation_id", sa.Text, sa.ForeignKey(organisation.c.id), nullable=False),
    sa.Column("project_id", sa.Text, sa.ForeignKey(project.c.id), nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),  # batch | batch_output
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("expires_at", sa.DateTime(timezone=True)),  # NULL: kept until somebody deletes it
    sa.Index("ix_file_organisation_id_created_at", "organisation_id", "created_at", "id"),
    sa.Index("ix_file_expires_at", "expires_at", postgresql_where=sa.text("expires_at IS NOT NULL")),
)

file_part = sa.Table(  # a file's bytes in pieces, so that nobody holds a whole file
    "file_part",
    METADATA,
    sa.Column("file_id", sa.Text, sa.ForeignKey(file.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column("part", sa.Integer, primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

batch = sa.Table(
    "batch",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),  # batch_...
    sa.Column("organisation_id", sa.Text, sa.ForeignKey(organisation.c.id), nullable=False),
    sa.Column("project_id", sa.Text, sa.ForeignKey(project.c.id), nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),  # whose limits its lines count against
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("input_file_id", sa.Text, nullable=False),
    sa.Column("output_file_id", sa.Text),
    sa.Column("error_file_id", sa.Text),
    sa.Column("status", sa.Text, nullable=False, server_default="validating"),
    sa.Column("errors", JSONB, nullable=False, server_default="[]"),
    sa.Column("metadata", JSONB, nullable=False, server_default="{}"),
    sa.Column("total", sa.Integer, nullable=False, server_default="0"),
    sa.Column("completed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("failed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("in_progress_at", sa.DateTime(timezone=True)),
    sa.Column("finalizing_at", sa.DateTime(timezone=True)),
    sa.Column("cancelling_at", sa.DateTime(timezone=True)),
    sa.Column("ended_at", sa.DateTime(timezone=True)),
    sa.Column("runner", sa.Text),  # the gateway that runs it, until `runner_until`
    sa.Column("runner_until", sa.DateTime(timezone=True)),
    sa.CheckConstraint(
        "status IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling',"
        " 'cancelled')",
        name="status",
    ),
    sa.Index("ix_batch_organisation_id_created_at", "organisation_id", "created_at", "id"),
    sa.Index("ix_batch_status", "status"),
)

batch_line = sa.Table(  # only while the batch runs; then its files hold everything
    "batch_line",
    METADATA,
    sa.Column("batch_id", sa.Text, sa.ForeignKey(batch.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column("line", sa.Integer, primary_key=True),  # 1, 2, ...
    sa.Column("custom_id", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),  # JSON
    sa.Column("state", sa.Text, nullable=False, server_default="waiting"),  # waiting | running | done | failed
    sa.Column("rid", sa.Text, nullable=False, server_default=""),
    sa.Column("http_status", sa.Integer, nullable=False, server_default="0"),
    sa.Column("answer", sa.LargeBinary),  # JSON
    sa.Index("ix_batch_line_batch_id_state", "batch_id", "state", "line"),
)
