"""What billing lets a key's requests do: expressions for the one query in which a gateway finds a key.

Arguments are values, or columns of that query: it is a round trip for each key every half minute, and not three.
"""

from typing import TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, distinct_on

from billing import money_tables as m

Text: TypeAlias = str | sa.ColumnElement[str]


def budgeted_scopes(tenant: Text, project: Text, key_id: Text) -> sa.ColumnElement[list[str]]:
    """Return which hard budgets a key's requests must fit: of `org`, `project`, `key`, and `credit` if prepaid."""
    b = m.budget.c
    of_key = sa.or_(
        b.scope == "org",
        sa.and_(b.scope == "project", b.scope_id == project),
        sa.and_(b.scope == "key", b.scope_id == key_id),
    )
    query = sa.union(
        sa.select(b.scope).where(b.organisation == tenant, b.hard, of_key).correlate_except(m.budget),
        sa.select(sa.literal("credit"))
        .where(m.profile.c.organisation == tenant, m.profile.c.prepaid)
        .correlate_except(m.profile),
    )
    return sa.func.array(query.scalar_subquery(), type_=ARRAY(sa.Text))


def share_group(tenant: Text) -> sa.ColumnElement[str]:
    """Return the share group in force for an organisation: it consents, and so does another one. Empty = none."""
    c = m.share_consent.c
    own = m.share_consent.alias()
    groups = sa.select(own.c.group_id).where(own.c.organisation == tenant).correlate_except(own)
    last = (
        sa.select(c.group_id, c.organisation, c.consents)
        .ext(distinct_on(c.group_id, c.organisation))
        .where(c.group_id.in_(groups))
        .order_by(c.group_id, c.organisation, c.id.desc())
        .subquery()
    )
    query = (
        sa.select(last.c.group_id)
        .where(last.c.consents)
        .group_by(last.c.group_id)
        .having(sa.func.count() > 1, sa.func.bool_or(last.c.organisation == tenant))
        .limit(1)
        .correlate_except(last)
    )
    return sa.func.coalesce(query.scalar_subquery(), "")
