"""Service accounts: members that are no people and own keys."""

import datetime as dt
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit import record
from gateway.ids import new_id
from gateway.people_tables import service_account
from gateway.tables import api_key, project
from gateway.tenants import NoSuchTenant


class ServiceAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A service account of one project."""

    id: str  # sa_...
    organisation_id: str
    project_id: str
    name: str
    created_at: dt.datetime


class ServiceAccounts:
    """Repository of service accounts. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def create(self, tenant: str, project_id: str, name: str, *, actor: str) -> ServiceAccount:
        """Create a service account. Raises NoSuchTenant."""
        values = {"id": new_id("sa"), "organisation_id": tenant, "project_id": project_id, "name": name}
        async with self._engine.begin() as db:
            owned = sa.select(project.c.id).where(project.c.id == project_id, project.c.organisation_id == tenant)
            if (await db.execute(owned)).one_or_none() is None:
                raise NoSuchTenant(f"{tenant} has no project {project_id}")
            made = sa.insert(service_account).values(values).returning(*service_account.c)
            row = (await db.execute(made)).mappings().one()
            await record(db, actor=actor, action="created", kind="service_account", subject=row["id"], org=tenant)
        return _account(row)

    async def list(self, tenant: str) -> Sequence[ServiceAccount]:
        """Return an organisation's service accounts, oldest first."""
        mine = sa.and_(service_account.c.organisation_id == tenant, service_account.c.removed_at.is_(None))
        query = sa.select(service_account).where(mine).order_by(service_account.c.created_at, service_account.c.id)
        async with self._engine.begin() as db:
            rows = (await db.execute(query)).mappings().all()
        return [_account(row) for row in rows]

    async def remove(self, tenant: str, account_id: str, *, actor: str) -> Sequence[str]:
        """Remove a service account and return the ids of its active keys, which the caller revokes.

        Raises:
            NoSuchTenant: no such account.
        """
        mine = sa.and_(
            service_account.c.organisation_id == tenant,
            service_account.c.id == account_id,
            service_account.c.removed_at.is_(None),
        )
        async with self._engine.begin() as db:
            gone = await db.execute(sa.update(service_account).where(mine).values(removed_at=sa.func.now()))
            if not gone.rowcount:
                raise NoSuchTenant(f"{tenant} has no service account {account_id}")
            await record(db, actor=actor, action="removed", kind="service_account", subject=account_id, org=tenant)
            own = sa.select(api_key.c.id).where(
                api_key.c.organisation_id == tenant, api_key.c.owner == account_id, api_key.c.state == "active"
            )
            return list((await db.execute(own)).scalars())


def _account(row: sa.RowMapping) -> ServiceAccount:
    return ServiceAccount(**{name: row[name] for name in ServiceAccount.__struct_fields__})
