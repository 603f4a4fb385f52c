"""Writing a change in the transaction that makes it: a row of `tenancy.change`, audit log and outbox in one."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.tables import change


async def record(
    db: AsyncConnection,
    *,
    actor: str,
    action: str,
    kind: str,
    subject: str,
    org: str | None,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Write who did what to which key, organisation, project or model. `org` owns it; None for a model."""
    values = {"actor": actor, "action": action, "kind": kind, "subject": subject, "organisation_id": org}
    await db.execute(sa.insert(change).values(**values, detail=dict(detail or {})))
