"""API keys of an organisation."""

import datetime as dt
import time

from litestar import delete, get, patch, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from redis.asyncio import Redis

from contracts.errors import BadRequest
from gateway.admin.callers import Caller, Callers
from gateway.admin.handlers import AnyRequest, checked, holds_secret, taken, unix_ms
from gateway.admin.organisations import ORG, Organisations
from gateway.admin.paging import ListOf, page
from gateway.admin.shapes import KeyChange, KeyView, NewKey, Rotation
from gateway.limits import NO_LIMITS
from gateway.openapi import json_operation
from gateway.portal.door import NotAllowed
from gateway.portal.roles import Right
from gateway.service_accounts import ServiceAccounts
from gateway.tenants import ApiKey, NoSuchTenant, publish_key_state

TAGS = ["admin: keys"]
KEY = f"{ORG}/keys/{{key:str}}"


def key_routes(  # noqa: C901 - handlers beside each other
    callers: Callers, parts: Organisations, accounts: ServiceAccounts, redis: Redis
) -> list[HTTPRouteHandler]:
    """Return the handlers of keys."""

    async def known(tenant: str, key_id: str) -> ApiKey:
        found = await parts.tenants.find_key(tenant, key_id)
        if found is None:
            raise NoSuchTenant(f"{tenant} has no key {key_id}")
        return found

    async def changeable(request: AnyRequest, organisation: str, key_id: str) -> tuple[Caller, ApiKey]:
        caller = await callers.about(request, organisation, Right.KEYS)
        found = await known(caller.tenant, key_id)
        if found.is_admin:
            check_admin(caller)
        return caller, found

    @get(f"{ORG}/keys", summary="List keys", operation_id="listKeys", tags=TAGS)
    async def list_keys(request: AnyRequest, organisation: FromPath[str]) -> ListOf[KeyView]:
        """Return the keys, oldest first; filter by `project_id`, `state`, `owner`."""
        caller = await callers.about(request, organisation, Right.READ)
        found = [key_view(key) for key in await parts.tenants.list_keys(caller.tenant)]
        for name in ("project_id", "state", "owner"):
            wanted = request.query_params.get(name)
            found = [view for view in found if wanted in (None, getattr(view, name))]
        return page(request, found, lambda view: view.id)

    @post(
        f"{ORG}/keys",
        summary="Create a key",
        operation_id="createKey",
        tags=TAGS,
        operation_class=json_operation(NewKey, KeyView, status=201),
    )
    async def create_key(request: AnyRequest, organisation: FromPath[str]) -> KeyView:
        """Create a key; its `secret` is in this answer and nowhere else. Admin keys are made by admins."""
        caller = await callers.about(request, organisation, Right.KEYS)
        wanted = await taken(request, NewKey)
        if wanted.admin:
            check_admin(caller)
        check_expiry(wanted.expires_at)
        if wanted.owner and wanted.owner not in {found.id for found in await accounts.list(caller.tenant)}:
            raise BadRequest("'owner' is a service account of the organisation.", param="owner")
        holds_secret(request)
        made, secret = await parts.tenants.create_key(
            caller.tenant,
            wanted.project_id,
            wanted.name,
            is_admin=wanted.admin,
            limits=wanted.limits or NO_LIMITS,
            scopes=checked(wanted.scopes),
            expires_at=wanted.expires_at,
            owner=wanted.owner or caller.actor,
            actor=caller.actor,
        )
        await publish_key_state(redis, made)
        return key_view(made, secret=secret)

    @get(KEY, summary="Get a key", operation_id="getKey", tags=TAGS)
    async def get_key(request: AnyRequest, organisation: FromPath[str], key: FromPath[str]) -> KeyView:
        """Return a key, without its secret."""
        caller = await callers.about(request, organisation, Right.READ)
        return key_view(await known(caller.tenant, key))

    @patch(
        KEY,
        summary="Change what binds a key",
        operation_id="updateKey",
        tags=TAGS,
        operation_class=json_operation(KeyChange, KeyView),
    )
    async def update_key(request: AnyRequest, organisation: FromPath[str], key: FromPath[str]) -> KeyView:
        """Change limits or scopes; every gateway knows within the second."""
        caller, found = await changeable(request, organisation, key)
        wanted = await taken(request, KeyChange)
        await parts.bounds.set_key(
            caller.tenant,
            key,
            limits=found.limits if wanted.limits is None else wanted.limits,
            scopes=found.scopes if wanted.scopes is None else checked(wanted.scopes),
            actor=caller.actor,
        )
        await parts.publish()
        return key_view(await known(caller.tenant, key))

    @post(
        f"{KEY}/rotate",
        summary="Rotate a key",
        operation_id="rotateKey",
        tags=TAGS,
        operation_class=json_operation(Rotation, KeyView, status=201),
    )
    async def rotate_key(request: AnyRequest, organisation: FromPath[str], key: FromPath[str]) -> KeyView:
        """Give a key a new secret; the old one works for `overlap_s` more."""
        caller, _ = await changeable(request, organisation, key)
        wanted = await taken(request, Rotation)
        holds_secret(request)
        made, secret = await parts.tenants.rotate(
            caller.tenant, key, overlap=dt.timedelta(seconds=wanted.overlap_s), actor=caller.actor
        )
        await parts.publish()
        return key_view(made, secret=secret)

    @delete(KEY, summary="Revoke a key", operation_id="revokeKey", tags=TAGS, status_code=200)
    async def revoke_key(request: AnyRequest, organisation: FromPath[str], key: FromPath[str]) -> KeyView:
        """Revoke a key on every gateway within the second; running answers end."""
        caller, _ = await changeable(request, organisation, key)
        gone = await parts.tenants.revoke(caller.tenant, key, actor=caller.actor)
        await parts.publish()
        return key_view(gone)

    return [list_keys, create_key, get_key, update_key, rotate_key, revoke_key]


def check_expiry(moment: dt.datetime | None) -> None:
    """Raise BadRequest for an end that has passed, or that is out of all reason."""
    expires_ms = unix_ms(moment, "expires_at")
    if moment is not None and expires_ms <= time.time() * 1000:
        raise BadRequest("'expires_at' is in the past.", param="expires_at")


def check_admin(caller: Caller) -> None:
    """Raise NotAllowed when the caller may not make or change admin keys, which may do what admins may."""
    if not caller.may(Right.MEMBERS):
        raise NotAllowed(f"The role {caller.role} may not make or change admin keys.")


def key_view(key: ApiKey, *, secret: str | None = None) -> KeyView:
    """Return a key as it is answered."""
    same = ("id", "project_id", "name", "prefix", "state", "owner", "limits", "scopes", "created_at", "expires_at")
    return KeyView(**{name: getattr(key, name) for name in same}, admin=key.is_admin, secret=secret)
