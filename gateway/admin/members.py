"""Members, invites, resets and service accounts of an organisation."""

from litestar import delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from redis.asyncio import Redis

from contracts.errors import NotFound
from gateway.admin.callers import Caller, Callers
from gateway.admin.handlers import AnyRequest, holds_secret, taken
from gateway.admin.organisations import ORG, link_url
from gateway.admin.paging import ListOf, page
from gateway.admin.shapes import Done, LinkView, MemberView, NewInvite, NewServiceAccount, RoleChange
from gateway.openapi import json_operation
from gateway.portal.door import NotAllowed
from gateway.portal.factors import Factors
from gateway.portal.links import Link, Links
from gateway.portal.people import Member, People
from gateway.portal.roles import Right, Role, may_give
from gateway.portal.sessions import Sessions
from gateway.portal.transport import Transport
from gateway.service_accounts import ServiceAccount, ServiceAccounts
from gateway.tenants import Tenants, publish_key_state

TAGS = ["admin: members"]


class Members:
    """What the handlers do beside reading and answering."""

    def __init__(
        self,
        people: People,
        links: Links,
        sessions: Sessions,
        accounts: ServiceAccounts,
        factors: Factors,
        tenants: Tenants,
        redis: Redis,
    ) -> None:
        self.people = people
        self.links = links
        self.sessions = sessions
        self.accounts = accounts
        self.factors = factors
        self._tenants = tenants
        self._redis = redis

    async def role_of(self, tenant: str, person_id: str) -> Role:
        """Return a member's role. Raises NotFound."""
        role = await self.people.role_of(tenant, person_id)
        if role is None:
            raise NotFound("There is no such member.")
        return role

    async def remove_account(self, tenant: str, account_id: str, *, actor: str) -> None:
        """Remove a service account and revoke its keys. Raises NoSuchTenant."""
        for key_id in await self.accounts.remove(tenant, account_id, actor=actor):
            await publish_key_state(self._redis, await self._tenants.revoke(tenant, key_id, actor=actor))


def member_routes(callers: Callers, parts: Members, transport: Transport) -> list[HTTPRouteHandler]:
    """Return the handlers of members."""

    @get(f"{ORG}/members", summary="List members", operation_id="listMembers", tags=TAGS)
    async def list_members(request: AnyRequest, organisation: FromPath[str]) -> ListOf[MemberView]:
        """Return the members, by e-mail."""
        caller = await callers.about(request, organisation, Right.MEMBERS)
        found = [member_view(member) for member in await parts.people.members(caller.tenant)]
        return page(request, found, lambda view: view.id)

    @patch(
        f"{ORG}/members/{{person:str}}",
        summary="Change a member's role",
        operation_id="updateMember",
        tags=TAGS,
        operation_class=json_operation(RoleChange, Done),
    )
    async def update_member(request: AnyRequest, organisation: FromPath[str], person: FromPath[str]) -> Done:
        """Change a role. Only owners make and unmake owners; an organisation keeps one."""
        caller = await callers.about(request, organisation, Right.MEMBERS)
        wanted = Role((await taken(request, RoleChange)).role)
        check_gift(caller, await parts.role_of(caller.tenant, person), wanted)
        await parts.people.set_role(caller.tenant, person, wanted, actor=caller.actor)
        return Done(id=person, object="member")

    @delete(
        f"{ORG}/members/{{person:str}}",
        summary="Remove a member",
        operation_id="deleteMember",
        tags=TAGS,
        status_code=200,
    )
    async def delete_member(request: AnyRequest, organisation: FromPath[str], person: FromPath[str]) -> Done:
        """Take somebody out of the organisation, at once."""
        caller = await callers.about(request, organisation, Right.MEMBERS)
        check_gift(caller, await parts.role_of(caller.tenant, person))
        await parts.people.remove(caller.tenant, person, actor=caller.actor)
        return Done(id=person, object="member", deleted=True)

    @post(
        f"{ORG}/members/{{person:str}}/reset",
        summary="Make a link for a new password",
        operation_id="resetMember",
        tags=TAGS,
    )
    async def reset_member(request: AnyRequest, organisation: FromPath[str], person: FromPath[str]) -> LinkView:
        """Return a one-time link with which the member sets a new password: pass it on yourself."""
        caller = await callers.about(request, organisation, Right.MEMBERS)
        await check_reset(parts, caller, person)
        holds_secret(request)
        made, token = await parts.links.reset(caller.tenant, person, actor=caller.actor)
        return link_view(made, url=link_url(transport, request, token))

    @delete(
        f"{ORG}/members/{{person:str}}/second_factor",
        summary="Take a member's second factor away",
        operation_id="deleteSecondFactor",
        tags=TAGS,
        status_code=200,
    )
    async def delete_factor(request: AnyRequest, organisation: FromPath[str], person: FromPath[str]) -> Done:
        """For who lost phone and recovery codes; their sessions end. Operators only: make sure who asks."""
        caller = await callers.about(request, organisation, Right.FLEET)
        await parts.role_of(caller.tenant, person)
        gone = await parts.factors.remove(person, actor=caller.actor)
        await parts.sessions.end_all(person)
        return Done(id=person, object="second_factor", deleted=gone)

    return [list_members, update_member, delete_member, reset_member, delete_factor]


def invite_routes(callers: Callers, parts: Members, transport: Transport) -> list[HTTPRouteHandler]:
    """Return the handlers of invites."""

    @get(f"{ORG}/invites", summary="List invites", operation_id="listInvites", tags=TAGS)
    async def list_invites(request: AnyRequest, organisation: FromPath[str]) -> ListOf[LinkView]:
        """Return the invites, newest first; filter by `state`."""
        caller = await callers.about(request, organisation, Right.MEMBERS)
        wanted = request.query_params.get("state")
        found = [link_view(link) for link in await parts.links.list_invites(caller.tenant)]
        return page(request, [view for view in found if wanted in (None, view.state)], lambda view: view.id)

    @post(
        f"{ORG}/invites",
        summary="Invite somebody",
        operation_id="createInvite",
        tags=TAGS,
        operation_class=json_operation(NewInvite, LinkView, status=201),
    )
    async def create_invite(request: AnyRequest, organisation: FromPath[str]) -> LinkView:
        """Return a one-time link that makes somebody a member: pass it on yourself, nothing is sent."""
        caller = await callers.about(request, organisation, Right.MEMBERS)
        wanted = await taken(request, NewInvite)
        check_gift(caller, Role(wanted.role))
        holds_secret(request)
        made, token = await parts.links.invite(caller.tenant, wanted.email, Role(wanted.role), actor=caller.actor)
        return link_view(made, url=link_url(transport, request, token))

    @delete(
        f"{ORG}/invites/{{invite:str}}",
        summary="Withdraw an invite",
        operation_id="deleteInvite",
        tags=TAGS,
        status_code=200,
    )
    async def delete_invite(request: AnyRequest, organisation: FromPath[str], invite: FromPath[str]) -> Done:
        """Make an invite worthless."""
        caller = await callers.about(request, organisation, Right.MEMBERS)
        await parts.links.withdraw(caller.tenant, invite, actor=caller.actor)
        return Done(id=invite, object="invite", deleted=True)

    return [list_invites, create_invite, delete_invite]


def service_account_routes(callers: Callers, parts: Members) -> list[HTTPRouteHandler]:
    """Return the handlers of service accounts."""

    @get(f"{ORG}/service_accounts", summary="List service accounts", operation_id="listServiceAccounts", tags=TAGS)
    async def list_accounts(request: AnyRequest, organisation: FromPath[str]) -> ListOf[ServiceAccount]:
        """Return the service accounts, oldest first."""
        caller = await callers.about(request, organisation, Right.READ)
        return page(request, await parts.accounts.list(caller.tenant), lambda found: found.id)

    @post(
        f"{ORG}/service_accounts",
        summary="Create a service account",
        operation_id="createServiceAccount",
        tags=TAGS,
        operation_class=json_operation(NewServiceAccount, ServiceAccount, status=201),
    )
    async def create_account(request: AnyRequest, organisation: FromPath[str]) -> ServiceAccount:
        """Create a member that is no person and owns keys."""
        caller = await callers.about(request, organisation, Right.MEMBERS)
        wanted = await taken(request, NewServiceAccount)
        return await parts.accounts.create(caller.tenant, wanted.project_id, wanted.name, actor=caller.actor)

    @delete(
        f"{ORG}/service_accounts/{{account:str}}",
        summary="Remove a service account",
        operation_id="deleteServiceAccount",
        tags=TAGS,
        status_code=200,
    )
    async def delete_account(request: AnyRequest, organisation: FromPath[str], account: FromPath[str]) -> Done:
        """Remove a service account and revoke its keys."""
        caller = await callers.about(request, organisation, Right.MEMBERS)
        await parts.remove_account(caller.tenant, account, actor=caller.actor)
        return Done(id=account, object="service_account", deleted=True)

    return [list_accounts, create_account, delete_account]


def check_gift(caller: Caller, *roles: Role) -> None:
    """Raise NotAllowed when the caller may not give or take one of the roles."""
    for role in roles:
        if not may_give(caller.role, role):
            raise NotAllowed(f"The role {caller.role} may not make or unmake a member with the role {role}.")


async def check_reset(parts: Members, caller: Caller, person_id: str) -> None:
    """Raise NotAllowed when a link for a member's password would give the caller more than the organisation's own.

    A password opens every organisation of a person, so an administrator of one of them makes no link for who is a
    member of others, or an operator.
    """
    check_gift(caller, await parts.role_of(caller.tenant, person_id))
    who = await parts.people.find(person_id)
    if who is None:
        raise NotFound("There is no such member.")
    if caller.is_operator:
        return
    if who.is_operator or len(await parts.people.places(who)) > 1:
        raise NotAllowed("This person belongs to more than this organisation: an operator makes the link.")


def member_view(member: Member) -> MemberView:
    """Return a member as it is answered."""
    who = member.person
    return MemberView(
        id=who.id,
        email=who.email,
        name=who.name,
        role=member.role,
        since=member.since,
        signed_in_at=who.signed_in_at,
        second_factor=who.has_second_factor,
    )


def link_view(found: Link, *, url: str | None = None) -> LinkView:
    """Return a link as it is answered."""
    fields = {name: getattr(found, name) for name in LinkView.__struct_fields__ if name != "url"}
    return LinkView(**fields, url=url)
