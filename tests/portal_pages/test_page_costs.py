"""What a page costs is counted, not timed: statements to PostgreSQL, whatever there is to show."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from past import play_week

from gateway.portal.navigation import MENU
from gateway.portal.roles import Role
from tests.portal.portal_rig import Browser, PortalRig

FIRST_PAGE = (
    8  # who comes, and where they belong; as the tenant: usage, health, the time before, requests, their meters
)
ANY_PAGE = 14
LOOPS = ("prices", "changes", "holds", "names", "additions", "batches", "files", "texts")
PATHS = [place.path for _, places in MENU for place in places]


@contextmanager
def counted(portal: PortalRig) -> Iterator[list[str]]:
    """Collect the statements of the gateway's engine."""
    said: list[str] = []

    def executed(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        said.append(statement)

    engine = portal.rig.gateway.engine.sync_engine
    sa.event.listen(engine, "before_cursor_execute", executed)
    try:
        yield said
    finally:
        sa.event.remove(engine, "before_cursor_execute", executed)


async def statements(portal: PortalRig, browser: Browser, path: str) -> list[str]:
    """Return what a page asks for."""
    with counted(portal) as said:
        answer = await browser.get(f"{path}?org={portal.rig.org.id}")
    assert answer.status_code == 200, path
    return said


def stop_loops() -> None:
    """End the loops of the gateway that ask the database by themselves: only pages shall be counted."""
    for task in asyncio.all_tasks():
        if task.get_name() in LOOPS:
            task.cancel()


async def test_the_first_page_asks_as_little_as_it_can_and_no_page_asks_more_for_more_rows(portal: PortalRig) -> None:
    rig = portal.rig
    browser = await portal.signed_in(Role.OPERATOR)
    stop_loops()
    few = {path: await statements(portal, browser, path) for path in PATHS}
    owners = [(rig.project.id, rig.key.id)]
    for number in range(4):
        project = await rig.tenants.create_project(rig.org.id, f"p{number}")
        key, _ = await rig.tenants.create_key(rig.org.id, project.id, f"k{number}")
        owners.append((project.id, key.id))
        await portal.person(f"m{number}@example.org", Role.VIEWER)
        await rig.tenants.create_organisation(f"o{number}")
    await play_week(rig.gateway.engine, rig.redis, org=rig.org.id, owners=owners, num_requests=60)
    many = {path: await statements(portal, browser, path) for path in PATHS}
    assert len(many["/portal"]) <= FIRST_PAGE, many["/portal"]
    for path in PATHS:
        assert len(many[path]) <= ANY_PAGE, (path, many[path])
        assert len(many[path]) <= len(few[path]) + 1, (path, many[path])  # meters are asked where there are requests
