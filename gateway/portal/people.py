"""People and their memberships: the SQL on `person`, `identity` and `membership`."""

import datetime as dt
import re
from collections.abc import Sequence
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from contracts.errors import BadRequest, NotFound, ServingError
from gateway.audit import record
from gateway.ids import new_id
from gateway.people_tables import identity, membership, person, second_factor
from gateway.portal.roles import Role
from gateway.tables import organisation
from gateway.tenant_read import plain_read
from gateway.tenants import Organisation, map_organisation

_EMAIL: Final = re.compile(r"[^@\s\x00-\x1f]{1,64}@[^@\s\x00-\x1f]{1,190}")
MAX_NAME_CHARACTERS: Final = 200


class LastOwner(ServingError):
    """An organisation keeps one owner."""

    code, type, http_status = "last_owner", "invalid_request_error", 409


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who may sign in."""

    id: str  # person_...
    email: str
    name: str
    is_operator: bool
    time_zone: str  # IANA name; empty = the browser's
    has_password: bool
    created_at: dt.datetime
    signed_in_at: dt.datetime | None
    disabled: bool
    has_second_factor: bool = False

    @property
    def shown(self) -> str:
        """Return the name, or the address of who has none."""
        return self.name or self.email


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A person in an organisation."""

    person: Person
    role: Role
    since: dt.datetime


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation and what somebody is in it."""

    organisation: Organisation
    role: Role  # OPERATOR for operators
    member: Role | None  # as a member; None for operators who are none


class People:
    """Repository of people and memberships. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def find(self, person_id: str) -> Person | None:
        """Return a person."""
        return await self._one(person.c.id == person_id)

    async def arriving(self, person_id: str) -> tuple[Person, Sequence[Place]] | None:
        """Return a person and the places that `places` gives: what every page begins with, in two statements."""
        async with plain_read(self._engine) as db:
            row = (await db.execute(_people().where(person.c.id == person_id))).mappings().one_or_none()
            if row is None:
                return None
            who = map_person(row)
            return who, await _places(db, who)

    async def find_by_email(self, email: str) -> Person | None:
        """Return the person with an address."""
        return await self._one(person.c.email == normal_email(email))

    async def first_operator(self) -> Person | None:
        """Return the operator who was first."""
        async with self._engine.begin() as db:
            query = sa.select(person).where(person.c.is_operator, person.c.disabled_at.is_(None))
            row = (await db.execute(query.order_by(person.c.created_at, person.c.id).limit(1))).mappings().one_or_none()
        return map_person(row) if row else None

    async def find_by_identity(self, issuer: str, subject: str) -> Person | None:
        """Return the person that an OpenID provider knows under a subject."""
        known = sa.select(identity.c.person_id).where(identity.c.issuer == issuer, identity.c.subject == subject)
        return await self._one(person.c.id.in_(known))

    async def password_of(self, email: str) -> tuple[Person, str | None] | None:
        """Return the person with an address, and the stored password."""
        async with self._engine.begin() as db:
            query = _people().where(person.c.email == email.strip().lower())
            row = (await db.execute(query)).mappings().one_or_none()
        return (map_person(row), row["password_hash"]) if row else None

    async def create_operator(self, email: str, *, actor: str) -> Person:
        """Create somebody who runs the fleet, without a password."""
        async with self._engine.begin() as db:
            return await add_person(db, email=email, name="", password_hash=None, is_operator=True, actor=actor)

    async def add_identity(self, person_id: str, *, issuer: str, subject: str, actor: str) -> None:
        """Let a person sign in at an OpenID provider."""
        async with self._engine.begin() as db:
            await db.execute(sa.insert(identity).values(issuer=issuer, subject=subject, person_id=person_id))
            await record(db, actor=actor, action="identity_added", kind="person", subject=person_id, org=None)

    async def set_password(self, person_id: str, password_hash: str, *, actor: str) -> None:
        """Give a person another password. The caller ends the sessions."""
        async with self._engine.begin() as db:
            await db.execute(sa.update(person).where(person.c.id == person_id).values(password_hash=password_hash))
            await record(db, actor=actor, action="password_set", kind="person", subject=person_id, org=None)

    async def set_profile(self, person_id: str, *, name: str, email: str, time_zone: str, actor: str) -> None:
        """Change what a person says of itself. Raises BadRequest."""
        values = {"name": checked_name(name), "email": normal_email(email), "time_zone": checked_zone(time_zone)}
        try:
            async with self._engine.begin() as db:
                await db.execute(sa.update(person).where(person.c.id == person_id).values(values))
                await record(db, actor=actor, action="profile_set", kind="person", subject=person_id, org=None)
        except sa.exc.IntegrityError:
            raise BadRequest("Somebody else has this e-mail address.", param="email") from None

    async def signed_in(self, person_id: str, *, how: str, address: str) -> None:
        """Note that a person signed in."""
        async with self._engine.begin() as db:
            await db.execute(sa.update(person).where(person.c.id == person_id).values(signed_in_at=sa.func.now()))
            detail = {"how": how, "address": address}
            await record(
                db, actor=person_id, action="signed_in", kind="person", subject=person_id, org=None, detail=detail
            )

    async def places(self, who: Person) -> Sequence[Place]:
        """Return the organisations that a person may look at, by name; every one for an operator."""
        async with plain_read(self._engine) as db:
            return await _places(db, who)

    async def members(self, tenant: str) -> Sequence[Member]:
        """Return an organisation's members, by address."""
        query = (
            _people(membership.c.role, membership.c.created_at.label("since"))
            .join(membership, membership.c.person_id == person.c.id)
            .where(membership.c.organisation_id == tenant)
            .order_by(person.c.email)
        )
        async with self._engine.begin() as db:
            rows = (await db.execute(query)).mappings().all()
        return [Member(person=map_person(row), role=Role(row["role"]), since=row["since"]) for row in rows]

    async def role_of(self, tenant: str, person_id: str) -> Role | None:
        """Return a member's role."""
        mine = sa.and_(membership.c.organisation_id == tenant, membership.c.person_id == person_id)
        async with self._engine.begin() as db:
            role = (await db.execute(sa.select(membership.c.role).where(mine))).scalar_one_or_none()
        return Role(role) if role else None

    async def set_role(self, tenant: str, person_id: str, role: Role, *, actor: str) -> None:
        """Change a member's role. Raises NotFound, LastOwner."""
        mine = sa.and_(membership.c.organisation_id == tenant, membership.c.person_id == person_id)
        async with self._engine.begin() as db:
            await _keep_an_owner(db, tenant, person_id, stays=role is Role.OWNER)
            changed = await db.execute(sa.update(membership).where(mine).values(role=role.value))
            if not changed.rowcount:
                raise NotFound("There is no such member.")
            await record(
                db, actor=actor, action="role_set", kind="member", subject=person_id, org=tenant, detail={"role": role}
            )

    async def remove(self, tenant: str, person_id: str, *, actor: str) -> None:
        """Take a member out of an organisation. Raises NotFound, LastOwner."""
        mine = sa.and_(membership.c.organisation_id == tenant, membership.c.person_id == person_id)
        async with self._engine.begin() as db:
            await _keep_an_owner(db, tenant, person_id, stays=False)
            gone = await db.execute(sa.delete(membership).where(mine))
            if not gone.rowcount:
                raise NotFound("There is no such member.")
            await record(db, actor=actor, action="removed", kind="member", subject=person_id, org=tenant)

    async def _one(self, where: sa.ColumnElement[bool]) -> Person | None:
        async with self._engine.begin() as db:
            row = (await db.execute(_people().where(where))).mappings().one_or_none()
        return map_person(row) if row else None


async def _places(db: AsyncConnection, who: Person) -> Sequence[Place]:
    mine = sa.and_(membership.c.organisation_id == organisation.c.id, membership.c.person_id == who.id)
    query = (
        sa.select(organisation, membership.c.role)
        .join(membership, mine, isouter=who.is_operator)
        .order_by(sa.func.lower(organisation.c.name), organisation.c.id)
    )
    return [_place(row, who) for row in (await db.execute(query)).mappings()]


def _place(row: sa.RowMapping, who: Person) -> Place:
    member = Role(row["role"]) if row["role"] else None
    role = Role.OPERATOR if who.is_operator else member
    assert role is not None, "who is no operator is shown memberships only"
    return Place(organisation=map_organisation(row), role=role, member=member)


def _people(*more: sa.ColumnElement[Any]) -> sa.Select[Any]:
    mine = sa.and_(second_factor.c.person_id == person.c.id, second_factor.c.confirmed_at.is_not(None))
    return sa.select(person, sa.exists().where(mine).label("has_second_factor"), *more)


async def add_person(
    db: AsyncConnection, *, email: str, name: str, password_hash: str | None, is_operator: bool = False, actor: str = ""
) -> Person:
    """Create a person. Raises BadRequest when the address is taken or is none."""
    values = {
        "id": new_id("person"),
        "email": normal_email(email),
        "name": checked_name(name),
        "password_hash": password_hash,
        "is_operator": is_operator,
    }
    taken = sa.select(person.c.id).where(person.c.email == values["email"])
    if (await db.execute(taken)).one_or_none() is not None:
        raise BadRequest("Somebody has this e-mail address already.", param="email")
    row = (await db.execute(sa.insert(person).values(values).returning(*person.c))).mappings().one()
    await record(db, actor=actor or row["id"], action="created", kind="person", subject=row["id"], org=None)
    return map_person(row)


async def add_member(db: AsyncConnection, tenant: str, person_id: str, role: Role, *, actor: str) -> None:
    """Make a person a member; who is one already gets the role."""
    wanted = insert(membership).values(organisation_id=tenant, person_id=person_id, role=role.value)
    await db.execute(
        wanted.on_conflict_do_update(index_elements=["organisation_id", "person_id"], set_={"role": role.value})
    )
    await record(db, actor=actor, action="joined", kind="member", subject=person_id, org=tenant, detail={"role": role})


def normal_email(text: str) -> str:
    """Return an e-mail address as it is stored: in small letters. Raises BadRequest when it is none."""
    email = text.strip().lower()
    if _EMAIL.fullmatch(email) is None:
        raise BadRequest("This is no e-mail address.", param="email")
    return email


def checked_name(text: str) -> str:
    """Return a name without what cannot be shown. Raises BadRequest when it is too long."""
    name = "".join(letter for letter in text if letter.isprintable()).strip()
    if len(name) > MAX_NAME_CHARACTERS:
        raise BadRequest(f"A name has at most {MAX_NAME_CHARACTERS} characters.", param="name")
    return name


def checked_zone(text: str) -> str:
    """Return the IANA name of a time zone; empty = the browser's. Raises BadRequest when there is none of that name."""
    try:
        if text:
            ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadRequest("There is no such time zone. Europe/Berlin, say, is one.", param="time_zone") from None
    return text


def map_person(row: sa.RowMapping) -> Person:
    """Return the person in a row of its table."""
    return Person(
        id=row["id"],
        email=row["email"],
        name=row["name"],
        is_operator=row["is_operator"],
        time_zone=row["time_zone"],
        has_password=row["password_hash"] is not None,
        created_at=row["created_at"],
        signed_in_at=row["signed_in_at"],
        disabled=row["disabled_at"] is not None,
        has_second_factor=row.get("has_second_factor", False),
    )


async def _keep_an_owner(db: AsyncConnection, tenant: str, person_id: str, *, stays: bool) -> None:
    """Raise LastOwner when `person_id` is the only owner and does not stay one. Locks the owners."""
    owners = sa.select(membership.c.person_id).where(
        membership.c.organisation_id == tenant, membership.c.role == Role.OWNER.value
    )
    names = set((await db.execute(owners.with_for_update())).scalars())
    if names == {person_id} and not stays:
        raise LastOwner("An organisation keeps one owner. Make somebody else an owner first.")
