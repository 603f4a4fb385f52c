"""`/portal/audit`: who did what."""

from typing import Any, Final

import sqlalchemy as sa
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.portal.people import People
from gateway.portal.roles import Right
from gateway.portal.views.desk import Desk
from gateway.tables import change

PAGE: Final = 100


def audit_view_routes(desk: Desk, people: People) -> list[HTTPRouteHandler]:
    """Return the handler of the record of changes."""

    @get("/portal/audit")
    async def list_changes(request: Request[Any, Any, Any]) -> Response[str]:
        """Show who did what, newest first."""
        visit = await desk.enter(request, Right.AUDIT)
        before = request.query_params.get("before", "")
        query = sa.select(change).where(change.c.organisation_id == visit.tenant)
        if before.isdecimal() and len(before) < 18:
            query = query.where(change.c.id < int(before))
        async with desk.reading(visit) as db:
            rows = (await db.execute(query.order_by(change.c.id.desc()).limit(PAGE + 1))).mappings().all()
        actors = {one.person.id: one.person.shown for one in await people.members(visit.tenant)}
        older = rows[PAGE - 1]["id"] if len(rows) > PAGE else None
        return desk.show(request, "audit", visit, changes=rows[:PAGE], actors=actors, older=older)

    return [list_changes]
