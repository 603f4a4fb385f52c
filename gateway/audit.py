"""Writing a change in the transaction that makes it: a row of `tenancy.change`, audit log and outbox in one."""

from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.tables import change

_HELD: Final = frozenset(("suspended", "read_only", "resumed"))


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
    """Write who did what to what. `org` owns it; None for a model and for people.

    What gateways have in memory is left to be published; the rest is for the record alone.
    """
    values = {"actor": actor, "action": action, "kind": kind, "subject": subject, "organisation_id": org}
    published_at = None if kind == "key" or action in _HELD else sa.func.now()
    await db.execute(sa.insert(change).values(**values, detail=dict(detail or {}), published_at=published_at))
