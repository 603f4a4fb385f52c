"""Tables of people in the schema `tenancy`: who may sign in, by what, where they are members, one-time links."""

import sqlalchemy as sa

from gateway.tables import METADATA, organisation, project

_MOMENT = sa.DateTime(timezone=True)

person = sa.Table(
    "person",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),  # person_...
    sa.Column("email", sa.Text, nullable=False, unique=True),  # as gateway.portal.people.normal_email writes it
    sa.Column("name", sa.Text, nullable=False, server_default=""),
    sa.Column("password_hash", sa.Text),  # argon2id; NULL = signs in elsewhere, or not yet
    sa.Column("is_operator", sa.Boolean, nullable=False, server_default=sa.false()),  # runs the fleet, sees all tenants
    sa.Column("time_zone", sa.Text, nullable=False, server_default=""),  # IANA name; empty = the browser's
    sa.Column("created_at", _MOMENT, nullable=False, server_default=sa.func.now()),
    sa.Column("signed_in_at", _MOMENT),
    sa.Column("disabled_at", _MOMENT),
)

identity = sa.Table(  # a person at an OpenID provider
    "identity",
    METADATA,
    sa.Column("issuer", sa.Text, primary_key=True),
    sa.Column("subject", sa.Text, primary_key=True),
    sa.Column("person_id", sa.Text, sa.ForeignKey(person.c.id), nullable=False, index=True),
    sa.Column("created_at", _MOMENT, nullable=False, server_default=sa.func.now()),
)

second_factor = sa.Table(  # one-time codes of a person's app; in force once it is confirmed
    "second_factor",
    METADATA,
    sa.Column("person_id", sa.Text, sa.ForeignKey(person.c.id), primary_key=True),
    sa.Column("secret", sa.Text, nullable=False),  # base32
    sa.Column("last_step", sa.BigInteger, nullable=False, server_default="0"),  # newest period of 30 s that was used
    sa.Column("created_at", _MOMENT, nullable=False, server_default=sa.func.now()),
    sa.Column("confirmed_at", _MOMENT),
)

recovery_code = sa.Table(
    "recovery_code",
    METADATA,
    sa.Column("person_id", sa.Text, sa.ForeignKey(second_factor.c.person_id, ondelete="CASCADE"), primary_key=True),
    sa.Column("code_hash", sa.LargeBinary, primary_key=True),  # gateway.portal.factors
    sa.Column("used_at", _MOMENT),
)

membership = sa.Table(
    "membership",
    METADATA,
    sa.Column("organisation_id", sa.Text, sa.ForeignKey(organisation.c.id), primary_key=True),
    sa.Column("person_id", sa.Text, sa.ForeignKey(person.c.id), primary_key=True, index=True),
    sa.Column("role", sa.Text, nullable=False),  # gateway.portal.roles.Role
    sa.Column("created_at", _MOMENT, nullable=False, server_default=sa.func.now()),
    sa.CheckConstraint("role IN ('owner', 'admin', 'developer', 'billing', 'viewer')", name="role"),
)

link = sa.Table(  # works once, until it expires; shown to its issuer, stored as a hash
    "link",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),  # link_...
    sa.Column("kind", sa.Text, nullable=False),  # invite | reset | sign_in
    sa.Column("token_hash", sa.LargeBinary, nullable=False, unique=True),  # SHA-256 of 256 random bits
    sa.Column("email", sa.Text, nullable=False, server_default=""),  # of an invite
    sa.Column("organisation_id", sa.Text, sa.ForeignKey(organisation.c.id), index=True),  # NULL: to the fleet
    sa.Column("role", sa.Text),  # of an invite; operator without an organisation
    sa.Column("person_id", sa.Text, sa.ForeignKey(person.c.id), index=True),  # of a reset or a sign-in
    sa.Column("issued_by", sa.Text, nullable=False),
    sa.Column("created_at", _MOMENT, nullable=False, server_default=sa.func.now()),
    sa.Column("expires_at", _MOMENT, nullable=False),
    sa.Column("used_at", _MOMENT),
    sa.Column("withdrawn_at", _MOMENT),
    sa.CheckConstraint("kind IN ('invite', 'reset', 'sign_in')", name="kind"),
    sa.CheckConstraint("(kind = 'invite') = (role IS NOT NULL)", name="role"),
)

service_account = sa.Table(  # a member that is no person; owns keys
    "service_account",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),  # sa_...
    sa.Column("organisation_id", sa.Text, sa.ForeignKey(organisation.c.id), nullable=False, index=True),
    sa.Column("project_id", sa.Text, sa.ForeignKey(project.c.id), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("created_at", _MOMENT, nullable=False, server_default=sa.func.now()),
    sa.Column("removed_at", _MOMENT),
)
