"""Organisations, projects and API keys: the only file with SQL on the schema `tenancy`.

A key is `pdg_` and 256 random bits. Stored are its SHA-256 and a visible prefix, so a copy of the
database opens nothing; a slow hash would add nothing, since there is no dictionary of 256-bit keys.

A key may be made elsewhere and imported; then it has no prefix of ours and is marked for rotation.

Every change of a key, or of limits above it, raises the key's version. `publish_key_state` puts
`STATE:VERSION` into the organisation's Redis shard, where the reserve script compares it, so a
gateway with an old copy notices at the next request.
"""

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import queries
from contracts import keys
from contracts.wire import FIELD, Change, encode
from gateway.audit import record
from gateway.ids import hash_key, new_id, new_key
from gateway.limits import NO_LIMITS, Limits
from gateway.scopes import NO_SCOPES, Scopes
from gateway.tables import api_key, organisation, project

_SHOWN_CHARACTERS: Final = 12
CHANGES_KEPT: Final = 10_000

# Sets the state only if it is newer: a gateway that read Postgres before a revocation must not undo it.
_PUBLISH: Final = """
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known and tonumber(string.match(known, ':(%d+)$')) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ':' .. ARGV[3])
return 1
"""


class NoSuchTenant(LookupError):
    """The organisation, project or key does not exist, or belongs to somebody else."""


class KeyKnown(ValueError):
    """A key with this hash exists."""


class Organisation(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant."""

    id: str
    name: str
    is_demo: bool
    limits: Limits
    created_at: dt.datetime
    runs_fleet: bool = False  # its admin keys are the operator's
    needs_second_factor: bool = False  # of people who sign in with a password
    texts_since: dt.datetime | None = None  # prompts and answers are stored; None = they are not


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an organisation; what it used is shown and limited apart."""

    id: str
    organisation_id: str
    name: str
    limits: Limits
    scopes: Scopes


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key with everything that the gateway asks per request: its tenant and the limits at each scope."""

    id: str
    organisation_id: str
    project_id: str
    name: str
    prefix: str
    state: str  # active | revoked
    version: int
    is_admin: bool
    created_at: dt.datetime
    expires_at: dt.datetime | None
    limits: Limits
    project_limits: Limits
    organisation_limits: Limits
    scopes: Scopes = NO_SCOPES
    project_scopes: Scopes = NO_SCOPES
    imported: bool = False  # made elsewhere: to be rotated
    budgeted: frozenset[str] = frozenset()  # scopes whose budget billing keeps: key, project, org, credit
    owner: str = ""  # the person or service account that it was made for
    share_group: str = ""  # organisations that find each other's prefixes, all by consent; empty = none
    keeps_texts: bool = False  # its organisation has prompts and answers stored

    @property
    def key_state(self) -> str:
        """Return what the reserve script compares: `STATE:VERSION`."""
        return f"{self.state}:{self.version}"

    @property
    def bounds(self) -> tuple[Scopes, Scopes]:
        """Return what the key may be used for: its own scopes and its project's."""
        return self.scopes, self.project_scopes


async def publish_key_state(redis: Redis, key: ApiKey) -> None:
    """Make the reserve script and all gateways know the key's state; an older state never replaces a newer one."""
    shard_key = keys.key_states(key.organisation_id)
    answer: Any = redis.eval(_PUBLISH, 1, shard_key, key.id, key.state, str(key.version))
    if await answer and key.version > 1:  # nobody has a new key in memory
        entry: Any = {FIELD: encode(Change(kind="key", id=key.id, state=key.key_state))}
        await redis.xadd(keys.CHANGES, entry, maxlen=CHANGES_KEPT, approximate=True)


class Tenants:
    """Repository of organisations, projects and keys. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._reading = engine.execution_options(isolation_level="AUTOCOMMIT")  # one statement, one round trip

    async def create_organisation(
        self,
        name: str,
        *,
        is_demo: bool = False,
        runs_fleet: bool = False,
        limits: Limits = NO_LIMITS,
        organisation_id: str = "",
        actor: str = "",
    ) -> Organisation:
        """Create a tenant, with a new id unless one is given. With `runs_fleet` its admin keys are the operator's."""
        values = {"id": organisation_id or new_id("org"), "name": name, "is_demo": is_demo, "runs_fleet": runs_fleet}
        values["limits"] = limits_out(limits)
        async with self._engine.begin() as db:
            row = (await db.execute(sa.insert(organisation).values(values).returning(*organisation.c))).mappings().one()
            await record(db, actor=actor, action="created", kind="org", subject=row["id"], org=row["id"])
        return map_organisation(row)

    async def list_organisations(self) -> Sequence[Organisation]:
        """Return every tenant, oldest first: for operators."""
        async with self._engine.begin() as db:
            rows = (
                (await db.execute(sa.select(organisation).order_by(organisation.c.created_at, organisation.c.id)))
                .mappings()
                .all()
            )
        return [map_organisation(row) for row in rows]

    async def find_organisation(self, tenant: str) -> Organisation | None:
        """Return a tenant."""
        async with self._engine.begin() as db:
            found = await db.execute(sa.select(organisation).where(organisation.c.id == tenant))
            row = found.mappings().one_or_none()
        return map_organisation(row) if row else None

    async def rename_organisation(self, tenant: str, name: str, *, actor: str) -> None:
        """Give a tenant another name. Raises NoSuchTenant."""
        await self._rename(organisation, organisation.c.id == tenant, name, tenant, tenant, actor)

    async def rename_project(self, tenant: str, project_id: str, name: str, *, actor: str) -> None:
        """Give a project another name. Raises NoSuchTenant."""
        mine = (project.c.organisation_id == tenant) & (project.c.id == project_id)
        await self._rename(project, mine, name, tenant, project_id, actor)

    async def _rename(
        self, table: sa.Table, mine: sa.ColumnElement[bool], name: str, tenant: str, subject: str, actor: str
    ) -> None:
        async with self._engine.begin() as db:
            changed = await db.execute(sa.update(table).where(mine).values(name=name))
            if not changed.rowcount:
                raise NoSuchTenant(f"{tenant} has no {subject}")
            kind = "org" if table is organisation else "project"
            await record(
                db, actor=actor, action="renamed", kind=kind, subject=subject, org=tenant, detail={"name": name}
            )

    async def set_runs_fleet(self, tenant: str) -> None:
        """Make a tenant's admin keys the operator's."""
        async with self._engine.begin() as db:
            await db.execute(sa.update(organisation).where(organisation.c.id == tenant).values(runs_fleet=True))

    async def find_organisation_by_name(self, name: str) -> Organisation | None:
        """Return the oldest tenant of that name."""
        query = sa.select(organisation).where(organisation.c.name == name).order_by(organisation.c.created_at).limit(1)
        async with self._engine.begin() as db:
            row = (await db.execute(query)).mappings().one_or_none()
        return map_organisation(row) if row else None

    async def create_project(
        self, tenant: str, name: str, *, limits: Limits = NO_LIMITS, scopes: Scopes = NO_SCOPES, actor: str = ""
    ) -> Project:
        """Create a project. Raises NoSuchTenant."""
        values = {
            "id": new_id("proj"),
            "organisation_id": tenant,
            "name": name,
            "limits": limits_out(limits),
            "scopes": msgspec.to_builtins(scopes),
        }
        try:
            async with self._engine.begin() as db:
                row = (await db.execute(sa.insert(project).values(values).returning(*project.c))).mappings().one()
                await record(db, actor=actor, action="created", kind="project", subject=row["id"], org=tenant)
        except sa.exc.IntegrityError:
            raise NoSuchTenant(tenant) from None
        return _project(row)

    async def list_projects(self, tenant: str) -> Sequence[Project]:
        """Return the tenant's projects, oldest first."""
        query = sa.select(project).where(project.c.organisation_id == tenant).order_by(project.c.created_at)
        async with self._engine.begin() as db:
            rows = (await db.execute(query)).mappings().all()
        return [_project(row) for row in rows]

    async def create_key(
        self,
        tenant: str,
        project_id: str,
        name: str,
        *,
        is_admin: bool = False,
        limits: Limits = NO_LIMITS,
        scopes: Scopes = NO_SCOPES,
        expires_at: dt.datetime | None = None,
        owner: str = "",
        actor: str = "",
    ) -> tuple[ApiKey, str]:
        """Create a key and return it with its plaintext, which is nowhere stored. Raises NoSuchTenant."""
        plaintext = new_key()
        values = {
            "name": name,
            "prefix": plaintext[:_SHOWN_CHARACTERS],
            "hash": hash_key(plaintext),
            "is_admin": is_admin,
            "limits": limits_out(limits),
            "scopes": msgspec.to_builtins(scopes),
            "expires_at": expires_at,
            "owner": owner,
        }
        return await self._add_key(tenant, project_id, values, actor=actor, action="created"), plaintext

    async def import_key(
        self,
        tenant: str,
        project_id: str,
        name: str,
        *,
        key_hash: bytes,
        prefix: str = "",
        limits: Limits = NO_LIMITS,
        scopes: Scopes = NO_SCOPES,
        actor: str = "",
    ) -> ApiKey:
        """Take over a key that was made elsewhere, by its SHA-256; it is marked for rotation.

        Raises:
            NoSuchTenant: no such project.
            KeyKnown: the key is here already.
        """
        values = {
            "name": name,
            "prefix": prefix,
            "hash": key_hash,
            "limits": limits_out(limits),
            "scopes": msgspec.to_builtins(scopes),
            "imported": True,
        }
        try:
            return await self._add_key(tenant, project_id, values, actor=actor, action="imported")
        except sa.exc.IntegrityError:
            raise KeyKnown(f"the key {name!r} is known already") from None

    async def _add_key(
        self, tenant: str, project_id: str, values: dict[str, Any], *, actor: str, action: str
    ) -> ApiKey:
        values |= {"id": new_id("key"), "organisation_id": tenant, "project_id": project_id}
        async with self._engine.begin() as db:
            owned = sa.select(project.c.id).where(project.c.id == project_id, project.c.organisation_id == tenant)
            if (await db.execute(owned)).one_or_none() is None:
                raise NoSuchTenant(f"{tenant} has no project {project_id}")
            await db.execute(sa.insert(api_key).values(values))
            await record(db, actor=actor, action=action, kind="key", subject=values["id"], org=tenant)
            row = (await db.execute(select_keys().where(api_key.c.id == values["id"]))).mappings().one()
        return map_key(row)

    async def find_key(self, tenant: str, key_id: str) -> ApiKey | None:
        """Return one of the tenant's keys."""
        async with self._reading.connect() as db:
            row = (await db.execute(_CALLER_BY_ID, {"tenant": tenant, "key_id": key_id})).mappings().one_or_none()
        return _map_caller(row) if row else None

    async def find_by_hash(self, key_hash: bytes) -> ApiKey | None:
        """Return the key with this hash. The one query without a tenant: it is how the tenant becomes known."""
        async with self._reading.connect() as db:
            row = (await db.execute(_CALLER_BY_HASH, {"key_hash": key_hash})).mappings().one_or_none()
        if row is None:
            return None
        key = _map_caller(row)
        if row["hash"] == key_hash:
            return key
        ends = min(row["old_hash_until"], key.expires_at or row["old_hash_until"])
        return msgspec.structs.replace(key, expires_at=ends)

    async def list_keys(self, tenant: str) -> Sequence[ApiKey]:
        """Return the tenant's keys, oldest first, revoked ones included."""
        query = select_keys().where(api_key.c.organisation_id == tenant).order_by(api_key.c.created_at)
        async with self._engine.begin() as db:
            rows = (await db.execute(query)).mappings().all()
        return [map_key(row) for row in rows]

    async def revoke(self, tenant: str, key_id: str, *, actor: str = "") -> ApiKey:
        """Revoke a key. The caller publishes the returned state. Raises NoSuchTenant."""
        changes = {"state": "revoked", "old_hash": None, "old_hash_until": None}
        return await self._change_key(tenant, key_id, changes, actor=actor, action="revoked")

    async def rotate(
        self, tenant: str, key_id: str, *, overlap: dt.timedelta = dt.timedelta(0), actor: str = ""
    ) -> tuple[ApiKey, str]:
        """Give a key a new secret; the old one works for `overlap` more, or until the returned state is published.

        Raises:
            NoSuchTenant: no such key, or a revoked one.
        """
        plaintext = new_key()
        overlaps = overlap > dt.timedelta(0)
        changes = {
            "hash": hash_key(plaintext),
            "prefix": plaintext[:_SHOWN_CHARACTERS],
            "imported": False,
            "old_hash": api_key.c.hash if overlaps else None,
            "old_hash_until": sa.func.now() + overlap if overlaps else None,
        }
        return await self._change_key(tenant, key_id, changes, actor=actor, action="rotated"), plaintext

    async def _change_key(
        self, tenant: str, key_id: str, changes: dict[str, Any], *, actor: str, action: str
    ) -> ApiKey:
        mine = (api_key.c.organisation_id == tenant) & (api_key.c.id == key_id)
        change = sa.update(api_key).where(mine, api_key.c.state == "active")
        async with self._engine.begin() as db:
            await db.execute(change.values(**changes, version=api_key.c.version + 1))
            row = (await db.execute(select_keys().where(mine))).mappings().one_or_none()
            if row is None or ("state" not in changes and row["state"] != "active"):
                raise NoSuchTenant(f"{tenant} has no active key {key_id}")
            await record(db, actor=actor, action=action, kind="key", subject=key_id, org=tenant)
        return map_key(row)


def _map_caller(row: sa.RowMapping) -> ApiKey:
    key = map_key(row)
    return msgspec.structs.replace(key, budgeted=frozenset(row["budgeted"]), share_group=row["share_group"])


def select_keys() -> sa.Select[Any]:
    """Keys with the limits of their project and organisation."""
    return (
        sa.select(
            api_key,
            project.c.limits.label("project_limits"),
            project.c.scopes.label("project_scopes"),
            organisation.c.limits.label("organisation_limits"),
            organisation.c.texts_since,
        )
        .join(project, project.c.id == api_key.c.project_id)
        .join(organisation, organisation.c.id == api_key.c.organisation_id)
    )


def _select_callers() -> sa.Select[Any]:
    """Keys with what billing lets their requests do."""
    key = api_key.c
    return select_keys().add_columns(
        queries.budgeted_scopes(key.organisation_id, key.project_id, key.id).label("budgeted"),
        queries.share_group(key.organisation_id).label("share_group"),
    )


# Made once: to put such a statement together takes longer than PostgreSQL does for it.
_CALLER_BY_ID: Final = _select_callers().where(
    api_key.c.organisation_id == sa.bindparam("tenant"), api_key.c.id == sa.bindparam("key_id")
)
_CALLER_BY_HASH: Final = _select_callers().where(
    sa.or_(
        api_key.c.hash == sa.bindparam("key_hash"),
        sa.and_(api_key.c.old_hash == sa.bindparam("key_hash"), api_key.c.old_hash_until > sa.func.now()),
    )
)


def limits_out(limits: Limits) -> dict[str, Any]:
    """Return limits as they are stored."""
    built: dict[str, Any] = msgspec.to_builtins(limits)
    return built


def _limits_in(raw: Any) -> Limits:
    return msgspec.convert(raw, Limits)


def map_organisation(row: sa.RowMapping) -> Organisation:
    """Return the organisation in a row of its table."""
    return Organisation(
        id=row["id"],
        name=row["name"],
        is_demo=row["is_demo"],
        limits=_limits_in(row["limits"]),
        created_at=row["created_at"],
        runs_fleet=row["runs_fleet"],
        needs_second_factor=row["needs_second_factor"],
        texts_since=row["texts_since"],
    )


def _project(row: sa.RowMapping) -> Project:
    return Project(
        id=row["id"],
        organisation_id=row["organisation_id"],
        name=row["name"],
        limits=_limits_in(row["limits"]),
        scopes=msgspec.convert(row["scopes"], Scopes),
    )


def map_key(row: sa.RowMapping) -> ApiKey:
    """Return the key in a row of `select_keys`."""
    return ApiKey(
        id=row["id"],
        organisation_id=row["organisation_id"],
        project_id=row["project_id"],
        name=row["name"],
        prefix=row["prefix"],
        state=row["state"],
        version=row["version"],
        is_admin=row["is_admin"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        limits=_limits_in(row["limits"]),
        project_limits=_limits_in(row["project_limits"]),
        organisation_limits=_limits_in(row["organisation_limits"]),
        scopes=msgspec.convert(row["scopes"], Scopes),
        project_scopes=msgspec.convert(row["project_scopes"], Scopes),
        imported=row["imported"],
        owner=row["owner"],
        keeps_texts=row["texts_since"] is not None,
    )
