"""What binds keys: limits and scopes of organisations, projects and single keys, and how they are changed.

Every change raises the version of the keys under it, so the reserve script notices at their next request, and
writes a change for each, which `gateway.changes` publishes.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit import record
from gateway.limits import Limits
from gateway.scopes import Scopes
from gateway.tables import api_key, organisation, project
from gateway.tenants import ApiKey, NoSuchTenant, limits_out, map_key, select_keys


class Bounds:
    """Repository of limits and scopes. Each call is one transaction and returns the keys that it binds."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def set_organisation(self, tenant: str, *, limits: Limits, actor: str = "") -> Sequence[ApiKey]:
        """Replace an organisation's limits. Raises NoSuchTenant."""
        async with self._engine.begin() as db:
            mine = organisation.c.id == tenant
            changed = await db.execute(sa.update(organisation).where(mine).values(limits=limits_out(limits)))
            if not changed.rowcount:
                raise NoSuchTenant(tenant)
            return await self._bind(db, tenant, api_key.c.organisation_id == tenant, actor=actor)

    async def set_project(
        self, tenant: str, project_id: str, *, limits: Limits, scopes: Scopes, actor: str = ""
    ) -> Sequence[ApiKey]:
        """Replace a project's limits and scopes. Raises NoSuchTenant."""
        mine = (project.c.organisation_id == tenant) & (project.c.id == project_id)
        async with self._engine.begin() as db:
            values = {"limits": limits_out(limits), "scopes": msgspec.to_builtins(scopes)}
            changed = await db.execute(sa.update(project).where(mine).values(values))
            if not changed.rowcount:
                raise NoSuchTenant(f"{tenant} has no project {project_id}")
            return await self._bind(db, tenant, api_key.c.project_id == project_id, actor=actor)

    async def set_key(
        self, tenant: str, key_id: str, *, limits: Limits, scopes: Scopes, actor: str = ""
    ) -> Sequence[ApiKey]:
        """Replace a key's limits and scopes. Raises NoSuchTenant."""
        mine = (api_key.c.organisation_id == tenant) & (api_key.c.id == key_id)
        async with self._engine.begin() as db:
            values = {"limits": limits_out(limits), "scopes": msgspec.to_builtins(scopes)}
            changed = await db.execute(sa.update(api_key).where(mine).values(values))
            if not changed.rowcount:
                raise NoSuchTenant(f"{tenant} has no key {key_id}")
            return await self._bind(db, tenant, mine, actor=actor)

    async def _bind(
        self, db: AsyncConnection, tenant: str, whose: sa.ColumnElement[bool], *, actor: str
    ) -> Sequence[ApiKey]:
        bump: Any = sa.update(api_key).where(whose).values(version=api_key.c.version + 1)
        await db.execute(bump)
        bound = [map_key(row) for row in (await db.execute(select_keys().where(whose))).mappings()]
        for key in bound:
            await record(db, actor=actor, action="rebound", kind="key", subject=key.id, org=tenant)
        return bound
