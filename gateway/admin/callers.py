"""Who calls the admin API, and whether it may."""

from typing import Any

import msgspec
from litestar import Request

from contracts.errors import NotFound, PermissionDenied
from gateway.admin.handlers import check_address
from gateway.auth import credential
from gateway.guard import Guard
from gateway.portal.door import Door, NotAllowed, check_factor
from gateway.portal.roles import Right, Role, may
from gateway.tenants import Organisation, Tenants

SAFE = frozenset(("GET", "HEAD"))


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who calls, about which organisation."""

    actor: str  # for the record of changes: person_... or key_...
    role: Role
    tenant: str  # the organisation that the call is about; empty = the installation
    is_operator: bool
    member: Role | None = None  # of that organisation, also of operators

    def may(self, right: Right) -> bool:
        """Return whether the caller has a right."""
        return may(self.role, right) or (self.member is not None and may(self.member, right))


class Callers:
    """Checks callers. Errors: InvalidApiKey, SignInNeeded, PermissionDenied, NotFound, DependencyDown."""

    def __init__(self, guard: Guard, door: Door, tenants: Tenants) -> None:
        self._guard = guard
        self._door = door
        self._tenants = tenants

    async def about(self, request: Request[Any, Any, Any], tenant: str, right: Right) -> Caller:
        """Return who calls about an organisation. Raises NotFound when it is none of the caller's business."""
        caller = await self._caller(request, tenant)
        if caller.is_operator and await self._tenants.find_organisation(tenant) is None:
            raise _unknown(tenant)
        return _checked(caller, right)

    async def operator(self, request: Request[Any, Any, Any]) -> Caller:
        """Return who calls about the installation."""
        return _checked(await self._caller(request, ""), Right.FLEET)

    async def anybody(self, request: Request[Any, Any, Any]) -> tuple[Caller, list[Organisation]]:
        """Return who calls, and the organisations that it may know of."""
        check_address(request)
        if _has_key(request):
            caller = await self._caller(request, "")
            everything = await self._tenants.list_organisations()
            return caller, [found for found in everything if caller.is_operator or found.id == caller.tenant]
        _, who = await self._door.signed_in(request)
        places = await self._door.people.places(who)
        role = Role.OPERATOR if who.is_operator else Role.VIEWER
        caller = Caller(actor=who.id, role=role, tenant="", is_operator=who.is_operator)
        return caller, [place.organisation for place in places]

    async def _caller(self, request: Request[Any, Any, Any], tenant: str) -> Caller:
        check_address(request)
        if _has_key(request):
            return await self._by_key(request, tenant)
        session, who = await self._door.signed_in(request)
        if request.method not in SAFE:
            self._door.check_csrf(request, session)
        if not who.is_operator and not tenant:
            raise NotAllowed("This is for operators.")
        member = await self._door.people.role_of(tenant, who.id) if tenant else None
        role = Role.OPERATOR if who.is_operator else member
        if role is None:
            raise _unknown(tenant)
        organisation = await self._tenants.find_organisation(tenant) if tenant else None
        if organisation is not None:
            check_factor(session, who, organisation)
        return Caller(actor=who.id, role=role, tenant=tenant, is_operator=who.is_operator, member=member)

    async def _by_key(self, request: Request[Any, Any, Any], tenant: str) -> Caller:
        key = await self._guard.key_of(request)
        if not key.is_admin:
            raise PermissionDenied("This needs an admin key. Keys for models cannot administrate.")
        home = await self._tenants.find_organisation(key.organisation_id)
        operates = home is not None and home.runs_fleet
        if not operates and tenant not in ("", key.organisation_id):
            raise _unknown(tenant)
        return Caller(
            actor=key.id,
            role=Role.OPERATOR if operates else Role.ADMIN,
            tenant=tenant or key.organisation_id,
            is_operator=operates,
            member=Role.ADMIN if tenant in ("", key.organisation_id) else None,
        )


def _checked(caller: Caller, right: Right) -> Caller:
    if not caller.may(right):
        raise NotAllowed(f"The role {caller.role} may not do this: it needs the right '{right}'.")
    return caller


def _has_key(request: Request[Any, Any, Any]) -> bool:
    return credential(request.headers) is not None


def _unknown(tenant: str) -> NotFound:
    return NotFound(f"There is no organisation '{tenant}'.", param="organisation")
