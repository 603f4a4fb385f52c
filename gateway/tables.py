"""Tables of the schema `tenancy`: organisation -> project -> key. Owned by the gateway."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

METADATA = sa.MetaData(
    schema="tenancy",
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    },
)

organisation = sa.Table(
    "organisation",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),  # org_...
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("is_demo", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("limits", JSONB, nullable=False, server_default="{}"),  # gateway.limits.Limits
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("runs_fleet", sa.Boolean, nullable=False, server_default=sa.false()),  # its admin keys are the operator's
    sa.Column("needs_second_factor", sa.Boolean, nullable=False, server_default=sa.false()),  # with passwords
    sa.Column("texts_since", sa.DateTime(timezone=True)),  # prompts and answers are stored; NULL = they are not
    sa.Column("texts_days", sa.Integer, nullable=False, server_default="30"),  # for how long
    sa.CheckConstraint("texts_days > 0", name="texts_days"),
)

project = sa.Table(
    "project",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),  # proj_...
    sa.Column("organisation_id", sa.Text, sa.ForeignKey(organisation.c.id), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("limits", JSONB, nullable=False, server_default="{}"),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("scopes", JSONB, nullable=False, server_default="{}"),  # gateway.scopes.Scopes
)

api_key = sa.Table(
    "api_key",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),  # key_...
    sa.Column("organisation_id", sa.Text, sa.ForeignKey(organisation.c.id), nullable=False, index=True),
    sa.Column("project_id", sa.Text, sa.ForeignKey(project.c.id), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("prefix", sa.Text, nullable=False),  # first characters, shown in lists
    sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),  # SHA-256 of a 256-bit random key
    sa.Column("state", sa.Text, nullable=False, server_default="active"),  # active | revoked
    sa.Column("version", sa.Integer, nullable=False, server_default="1"),
    sa.Column("is_admin", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("limits", JSONB, nullable=False, server_default="{}"),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("expires_at", sa.DateTime(timezone=True)),
    sa.Column("scopes", JSONB, nullable=False, server_default="{}"),  # gateway.scopes.Scopes
    sa.Column("imported", sa.Boolean, nullable=False, server_default=sa.false()),  # made elsewhere: to be rotated
    sa.Column("old_hash", sa.LargeBinary, unique=True),  # of the secret before the last rotation
    sa.Column("old_hash_until", sa.DateTime(timezone=True)),
    sa.Column("owner", sa.Text, nullable=False, server_default=""),  # person_..., sa_... or nobody
    sa.CheckConstraint("state IN ('active', 'revoked')", name="state"),
)

hold = sa.Table(
    "hold",
    METADATA,
    sa.Column("kind", sa.Text, primary_key=True),  # org | project | model
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("mode", sa.Text, nullable=False),  # suspended | read_only
    sa.Column("drain", sa.Boolean, nullable=False),  # running streams may end by themselves
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.CheckConstraint("kind IN ('org', 'project', 'model')", name="kind"),
    sa.CheckConstraint("mode IN ('suspended', 'read_only')", name="mode"),
)

model_name = sa.Table(
    "model_name",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),  # what clients ask for
    sa.Column("targets", JSONB, nullable=False),  # gateway.names.Target, in order; empty = the model of that name
    sa.Column("deprecated_at", sa.DateTime(timezone=True)),
    sa.Column("sunset_at", sa.DateTime(timezone=True)),
    sa.Column("replacement", sa.Text, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
)

model = sa.Table(  # beside the catalogue's file
    "model",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),  # public
    sa.Column("definition", JSONB, nullable=False),  # contracts.additions.AddedModel
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("added_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
)

change = sa.Table(
    "change",
    METADATA,
    sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),  # key | org | project | model
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("organisation_id", sa.Text),
    sa.Column("detail", JSONB, nullable=False, server_default="{}"),
    sa.Column("published_at", sa.DateTime(timezone=True)),  # in Redis; NULL = still to be
    sa.Index("ix_change_organisation_id", "organisation_id", "id"),
    sa.Index("ix_change_unpublished", "id", postgresql_where=sa.text("published_at IS NULL")),
)
