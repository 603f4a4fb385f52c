"""Share groups: organisations that let each other's requests hit their cached prefixes, by consent of each.

Consent is a line that only appends: who, for which organisation, yes or no. The last one counts. A group is in force
for an organisation when it consents and at least one other does; then its cached tokens have the scope `shared`.
"""

import secrets
from collections.abc import Sequence
from datetime import datetime

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import money_tables as m


class SharingError(ValueError):
    """A consent that cannot be given; the message says why."""


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """The last word of an organisation about a group."""

    group_id: str
    organisation: str
    consents: bool
    by: str
    at: datetime


async def create_group(conn: AsyncConnection, *, name: str, by: str) -> str:
    """Create a share group and return its id. Nobody is in it yet."""
    group_id = f"share_{secrets.token_hex(10)}"
    await conn.execute(m.share_group.insert().values(id=group_id, name=name, created_by=by))
    return group_id


async def say(conn: AsyncConnection, tenant: str, group_id: str, *, consents: bool, by: str) -> None:
    """Record that an organisation joins or leaves. Raises SharingError: no such group, or it is in another one."""
    if (await conn.execute(sa.select(m.share_group.c.id).where(m.share_group.c.id == group_id))).first() is None:
        raise SharingError(f"there is no share group {group_id!r}")
    await conn.execute(sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 1))"), {"name": tenant})
    others = [one.group_id for one in await consents_of(conn, tenant) if one.consents and one.group_id != group_id]
    if consents and others:
        raise SharingError(f"{tenant} is in {others[0]}: leave it first")
    await conn.execute(
        m.share_consent.insert().values(group_id=group_id, organisation=tenant, consents=consents, by=by)
    )


async def consents_of(conn: AsyncConnection, tenant: str) -> Sequence[Consent]:
    """Return an organisation's last word about each group."""
    return await _last_words(conn, m.share_consent.c.organisation == tenant)


async def members_of_across_tenants(conn: AsyncConnection, group_id: str) -> Sequence[Consent]:
    """Return the last word of every organisation about a group."""
    return await _last_words(conn, m.share_consent.c.group_id == group_id)


async def _last_words(conn: AsyncConnection, where: sa.ColumnElement[bool]) -> Sequence[Consent]:
    c = m.share_consent.c
    query = (
        sa.select(c.group_id, c.organisation, c.consents, c.by, c.at)
        .ext(distinct_on(c.group_id, c.organisation))
        .where(where)
        .order_by(c.group_id, c.organisation, c.id.desc())
    )
    return [Consent(**row) for row in (await conn.execute(query)).mappings()]
