"""Which live keys nothing limits, for the operator's checks."""

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from contracts.demo import DEMO_WEEK_ORG
from gateway.tables import api_key, organisation, project


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """Who may call, and how much. Operators' keys are left out."""

    keys: int
    """Live ones."""
    unlimited: Sequence[str]
    """Ids of those for which neither key, project nor organisation sets a limit."""
    demos: Sequence[str]
    """Names of demo organisations with a live key."""


async def exposure_across_tenants(conn: AsyncConnection) -> Exposure:
    """Return the live keys and what limits them; not the demo week's, whose secrets nobody has."""
    query = (
        sa.select(
            api_key.c.id,
            api_key.c.limits.label("key_limits"),
            project.c.limits.label("project_limits"),
            organisation.c.limits.label("org_limits"),
            organisation.c.name,
            organisation.c.is_demo,
        )
        .join(project, project.c.id == api_key.c.project_id)
        .join(organisation, organisation.c.id == project.c.organisation_id)
        .where(api_key.c.state == "active", ~api_key.c.is_admin, organisation.c.id != DEMO_WEEK_ORG)
    )
    rows = (await conn.execute(query)).all()
    return Exposure(
        keys=len(rows),
        unlimited=sorted(row.id for row in rows if not (row.key_limits or row.project_limits or row.org_limits)),
        demos=sorted({row.name for row in rows if row.is_demo}),
    )
