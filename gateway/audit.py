"""The record of changes, written in the transaction of the change: audit log and outbox in one (`tenancy.change`)."""

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
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


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One change, as it was recorded."""

    id: int
    at: dt.datetime
    actor: str
    action: str
    kind: str
    subject: str
    organisation_id: str | None
    detail: Mapping[str, Any]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which changes; empty = all."""

    actor: str = ""
    action: str = ""
    kind: str = ""
    subject: str = ""
    before: int | None = None  # id


async def changes_of(db: AsyncConnection, tenant: str, wanted: Wanted, *, limit: int) -> Sequence[Recorded]:
    """Return what was changed of one organisation, the newest first."""
    return await _changes(db, wanted, limit, change.c.organisation_id == tenant)


async def changes_across_tenants(db: AsyncConnection, wanted: Wanted, *, limit: int) -> Sequence[Recorded]:
    """Return what was changed at all, the newest first."""
    return await _changes(db, wanted, limit)


async def _changes(
    db: AsyncConnection, wanted: Wanted, limit: int, *where: sa.ColumnElement[bool]
) -> Sequence[Recorded]:
    query = sa.select(*(change.c[name] for name in Recorded.__struct_fields__)).where(*where)
    for name in ("actor", "action", "kind", "subject"):
        if value := getattr(wanted, name):
            query = query.where(change.c[name] == value)
    if wanted.before is not None:
        query = query.where(change.c.id < wanted.before)
    rows = (await db.execute(query.order_by(change.c.id.desc()).limit(limit))).mappings()
    return [Recorded(**row) for row in rows]
