"""One-time links: invites, password resets and operators' sign-ins. The SQL on `link`.

There is no mail server, so a link is shown to whoever made it, who passes it on. Only its hash is stored. Looking at a
link does not use it, since chat programs fetch what they show; the form behind it does, once.
"""

import datetime as dt
import hashlib
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from contracts.errors import BadRequest, NotFound
from gateway.audit import record
from gateway.ids import new_id
from gateway.people_tables import link, person
from gateway.portal.people import Person, add_member, add_person, normal_email
from gateway.portal.roles import Role
from gateway.tables import organisation

INVITE, RESET, SIGN_IN = "invite", "reset", "sign_in"
LIVES: Final = {INVITE: dt.timedelta(days=7), RESET: dt.timedelta(hours=24), SIGN_IN: dt.timedelta(hours=24)}


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What a link is for, without what opens it."""

    id: str  # link_...
    kind: str  # invite | reset | sign_in
    email: str
    organisation_id: str | None
    organisation_name: str
    role: Role | None
    person_id: str | None
    issued_by: str
    created_at: dt.datetime
    expires_at: dt.datetime
    state: str  # open | used | withdrawn | expired


class Links:
    """Repository of one-time links. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def invite(self, tenant: str | None, email: str, role: Role, *, actor: str) -> tuple[Link, str]:
        """Return an invite and its token. Without a tenant it makes an operator. Raises BadRequest."""
        if (tenant is None) != (role is Role.OPERATOR):
            raise BadRequest("An operator belongs to no organisation, and everybody else to one.", param="role")
        return await self._issue(INVITE, actor, email=normal_email(email), organisation_id=tenant, role=role.value)

    async def reset(self, tenant: str | None, person_id: str, *, actor: str) -> tuple[Link, str]:
        """Return a link with which a person sets a new password, and its token."""
        return await self._issue(RESET, actor, person_id=person_id, organisation_id=tenant)

    async def sign_in(self, person_id: str, *, actor: str) -> tuple[Link, str]:
        """Return a link that signs a person in, and its token; earlier ones are withdrawn."""
        mine = sa.and_(link.c.person_id == person_id, link.c.kind == SIGN_IN, _OPEN)
        async with self._engine.begin() as db:
            await db.execute(sa.update(link).where(mine).values(withdrawn_at=sa.func.now()))
        return await self._issue(SIGN_IN, actor, person_id=person_id)

    async def find(self, token: str) -> Link | None:
        """Return the link of a token if it still opens something."""
        async with self._engine.begin() as db:
            row = (await db.execute(_links().where(link.c.token_hash == _hash(token), _OPEN))).mappings().one_or_none()
        return _link(row) if row else None

    async def list_invites(self, tenant: str) -> Sequence[Link]:
        """Return an organisation's invites, the newest first."""
        query = _links().where(link.c.organisation_id == tenant, link.c.kind == INVITE)
        async with self._engine.begin() as db:
            rows = (await db.execute(query.order_by(link.c.created_at.desc(), link.c.id))).mappings().all()
        return [_link(row) for row in rows]

    async def withdraw(self, tenant: str, link_id: str, *, actor: str) -> None:
        """Make an invite worthless. Raises NotFound."""
        mine = sa.and_(link.c.organisation_id == tenant, link.c.id == link_id, link.c.kind == INVITE, _OPEN)
        async with self._engine.begin() as db:
            changed = await db.execute(sa.update(link).where(mine).values(withdrawn_at=sa.func.now()))
            if not changed.rowcount:
                raise NotFound("There is no such open invite.")
            await record(db, actor=actor, action="withdrawn", kind="invite", subject=link_id, org=tenant)

    async def accept_as_new(self, token: str, *, email: str, name: str, password_hash: str) -> Person:
        """Use an invite up for somebody new, who becomes a member or an operator. Raises NotFound, BadRequest."""
        async with self._engine.begin() as db:
            used = await _use(db, token, INVITE)
            operates = used["role"] == Role.OPERATOR
            added = await add_person(
                db, email=used["email"] or email, name=name, password_hash=password_hash, is_operator=operates
            )
            await _join(db, used, added)
        return added

    async def accept_as(self, token: str, who: Person) -> None:
        """Use an invite up for somebody who is known, to whom it must be addressed. Raises NotFound."""
        async with self._engine.begin() as db:
            used = await _use(db, token, INVITE)
            if used["email"] != who.email:
                raise _gone()
            if used["role"] == Role.OPERATOR:
                await db.execute(sa.update(person).where(person.c.id == who.id).values(is_operator=True))
            await _join(db, used, who)

    async def use_reset(self, token: str, password_hash: str) -> str:
        """Use a reset up: set the password, return the person's id. Raises NotFound."""
        async with self._engine.begin() as db:
            used = await _use(db, token, RESET)
            mine = person.c.id == used["person_id"]
            await db.execute(sa.update(person).where(mine).values(password_hash=password_hash))
            person_id: str = used["person_id"]
            await record(db, actor=person_id, action="password_reset", kind="person", subject=person_id, org=None)
        return person_id

    async def use_sign_in(self, token: str) -> str:
        """Use a sign-in up and return the person's id. Raises NotFound."""
        async with self._engine.begin() as db:
            used = await _use(db, token, SIGN_IN)
        person_id: str = used["person_id"]
        return person_id

    async def _issue(self, kind: str, actor: str, **values: str | None) -> tuple[Link, str]:
        token = secrets.token_urlsafe(32)
        values |= {"id": new_id("link"), "kind": kind, "issued_by": actor}
        row = {**values, "token_hash": _hash(token), "expires_at": sa.func.now() + LIVES[kind]}
        subject = values.get("person_id") or values["id"]
        detail = {"email": values.get("email", ""), "role": values.get("role", "")} if kind == INVITE else {}
        async with self._engine.begin() as db:
            await db.execute(sa.insert(link).values(row))
            await record(
                db,
                actor=actor,
                action="issued",
                kind=kind,
                subject=str(subject),
                org=values.get("organisation_id"),
                detail=detail,
            )
            made = (await db.execute(_links().where(link.c.id == values["id"]))).mappings().one()
        return _link(made), token


_OPEN: Final = sa.and_(link.c.used_at.is_(None), link.c.withdrawn_at.is_(None), link.c.expires_at > sa.func.now())


async def _use(db: AsyncConnection, token: str, kind: str) -> sa.RowMapping:
    """Return the link's row, used from here on: whoever comes second finds nothing."""
    mine = sa.and_(link.c.token_hash == _hash(token), link.c.kind == kind, _OPEN)
    use = sa.update(link).where(mine).values(used_at=sa.func.now()).returning(*link.c)
    row = (await db.execute(use)).mappings().one_or_none()
    if row is None:
        raise _gone()
    return row


async def _join(db: AsyncConnection, used: sa.RowMapping, who: Person) -> None:
    if used["organisation_id"] is not None:
        await add_member(db, used["organisation_id"], who.id, Role(used["role"]), actor=who.id)
        return
    await record(db, actor=who.id, action="made_operator", kind="person", subject=who.id, org=None)


def _links() -> sa.Select[tuple[object, ...]]:
    return sa.select(link, organisation.c.name.label("organisation_name")).join(
        organisation, organisation.c.id == link.c.organisation_id, isouter=True
    )


def _link(row: sa.RowMapping) -> Link:
    return Link(
        id=row["id"],
        kind=row["kind"],
        email=row["email"],
        organisation_id=row["organisation_id"],
        organisation_name=row["organisation_name"] or "",
        role=Role(row["role"]) if row["role"] else None,
        person_id=row["person_id"],
        issued_by=row["issued_by"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        state=_state(row),
    )


def _state(row: sa.RowMapping) -> str:
    if row["used_at"] is not None:
        return "used"
    if row["withdrawn_at"] is not None:
        return "withdrawn"
    return "expired" if row["expires_at"] <= dt.datetime.now(dt.UTC) else "open"


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _gone() -> NotFound:
    return NotFound("This link was used, was withdrawn, or has expired. Ask for a new one.")
