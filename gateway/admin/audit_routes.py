"""The record of changes: read, filtered, exported."""

from typing import Any

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncEngine

from contracts.errors import BadRequest
from gateway.admin.callers import Callers
from gateway.admin.handlers import AnyRequest
from gateway.admin.organisations import ORG
from gateway.admin.paging import ListOf, limit_of
from gateway.audit import Recorded, Wanted, changes_across_tenants, changes_of
from gateway.portal.roles import Right
from gateway.tenant_read import tenant_read

TAGS = ["admin: audit"]


def audit_routes(callers: Callers, engine: AsyncEngine) -> list[HTTPRouteHandler]:
    """Return the handlers of the record of changes."""

    @get(f"{ORG}/audit", summary="List changes", operation_id="listAudit", tags=TAGS)
    async def list_audit(request: AnyRequest, organisation: FromPath[str]) -> Response[Any]:
        """Return who changed what, newest first; filter by `actor`, `action`, `kind`, `subject`.

        As JSON lines when `accept` is application/jsonl.
        """
        caller = await callers.about(request, organisation, Right.AUDIT)
        async with tenant_read(engine, caller.tenant) as db:
            found = await changes_of(db, caller.tenant, _wanted(request), limit=limit_of(request) + 1)
        return _answer(request, list(found))

    @get("/admin/v1/audit", summary="List all changes", operation_id="listAllAudit", tags=TAGS)
    async def list_all_audit(request: AnyRequest) -> Response[Any]:
        """Return who changed what, of people and models and every organisation. For operators."""
        await callers.operator(request)
        async with engine.begin() as db:
            found = await changes_across_tenants(db, _wanted(request), limit=limit_of(request) + 1)
        return _answer(request, list(found))

    return [list_audit, list_all_audit]


def _wanted(request: AnyRequest) -> Wanted:
    cursor = request.query_params.get("cursor")
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise BadRequest("This 'cursor' is not of this list.", param="cursor")
    filters = {name: request.query_params.get(name, "") for name in ("actor", "action", "kind", "subject")}
    return Wanted(**filters, before=int(cursor) if cursor else None)


def _answer(request: AnyRequest, found: list[Recorded]) -> Response[Any]:
    limit = limit_of(request)
    data, more = found[:limit], len(found) > limit
    following = str(data[-1].id) if more else None
    if "application/jsonl" in request.headers.get("accept", ""):
        lines = b"".join(msgspec.json.encode(one) + b"\n" for one in data)
        headers = {"x-next-cursor": following} if following else {}
        return Response(lines, media_type="application/jsonl", headers=headers)
    return Response(ListOf(data=data, has_more=more, next_cursor=following))
