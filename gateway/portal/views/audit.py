"""`/portal/audit`: who did what, also as a file. Operators see what concerns no one organisation, too."""

import csv
import io
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream

from gateway.audit import Recorded, Wanted, changes_across_tenants, changes_of
from gateway.portal.door import Visit
from gateway.portal.figures import cell
from gateway.portal.people import People
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk
from gateway.tenant_read import tenant_read

PAGE: Final = 100
_BATCH: Final = 1_000  # rows of a file that are in memory at once
_COLUMNS: Final = ("id", "at", "actor", "action", "kind", "subject", "organisation_id", "detail")
_SCOPES: Final = (("", "This organisation"), ("all", "Whole installation"))


def audit_view_routes(desk: Desk, people: People) -> list[HTTPRouteHandler]:
    """Return the handlers of the record of changes."""

    async def rows(visit: Visit, *, everything: bool, wanted: Wanted, limit: int) -> Sequence[Recorded]:
        if everything:
            async with desk.reading_across_tenants() as db:
                return await changes_across_tenants(db, wanted, limit=limit)
        async with tenant_read(desk.engine, visit.tenant) as db:
            return await changes_of(db, visit.tenant, wanted, limit=limit)

    def whole(request: Request[Any, Any, Any], visit: Visit) -> bool:
        return request.query_params.get("scope") == "all" and visit.may(Right.FLEET)

    @get("/portal/audit")
    async def list_changes(request: Request[Any, Any, Any]) -> Response[str]:
        """Show who did what, newest first."""
        visit = await desk.enter(request, Right.AUDIT)
        before = request.query_params.get("before", "")
        wanted = Wanted(before=int(before) if before.isascii() and before.isdecimal() and len(before) < 18 else None)
        everything = whole(request, visit)
        found = await rows(visit, everything=everything, wanted=wanted, limit=PAGE + 1)
        return desk.show(
            request,
            "audit",
            visit,
            changes=found[:PAGE],
            actors={one.person.id: one.person.shown for one in await people.members(visit.tenant)},
            older=found[PAGE - 1].id if len(found) > PAGE else None,
            scope="all" if everything else "",
            scopes=_SCOPES if visit.may(Right.FLEET) else (),
            names={one.id: one.name for one in await desk.tenants.list_organisations()} if everything else {},
        )

    @get("/portal/audit.csv")
    async def get_file(request: Request[Any, Any, Any]) -> Stream:
        """Return the whole record as CSV, newest first."""
        visit = await desk.enter(request, Right.AUDIT)
        everything = whole(request, visit)

        async def lines() -> AsyncIterator[bytes]:
            yield _csv([_COLUMNS])
            wanted, left = Wanted(), True
            while left:
                found = await rows(visit, everything=everything, wanted=wanted, limit=_BATCH)
                yield _csv([_cells(one) for one in found])
                left = len(found) == _BATCH
                wanted = Wanted(before=found[-1].id) if found else wanted

        headers = {"content-disposition": 'attachment; filename="audit.csv"'}
        return Stream(lines(), media_type="text/csv", headers=headers)

    return [list_changes, get_file]


def _cells(one: Recorded) -> Sequence[str]:
    texts = [one.actor, one.action, one.kind, one.subject, one.organisation_id or ""]
    return [str(one.id), one.at.isoformat(), *map(cell, texts), cell(msgspec.json.encode(one.detail).decode())]


def _csv(rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
