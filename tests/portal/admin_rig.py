"""Clients of the admin API, and another organisation to stay away from."""

import httpx
from portal_rig import Browser, PortalRig

from gateway.portal.roles import Role
from gateway.tenants import publish_key_state

TOKEN = "billing-token"


async def admin_client(portal: PortalRig, *, fleet: bool) -> httpx.AsyncClient:
    """A client with an admin key: of the rig's organisation, or of the one that runs the fleet."""
    tenants = portal.rig.tenants
    org = portal.rig.org
    project = portal.rig.project
    if fleet:
        org = await tenants.create_organisation("Operators", runs_fleet=True)
        project = await tenants.create_project(org.id, "Default")
    key, secret = await tenants.create_key(org.id, project.id, "admin", is_admin=True)
    await publish_key_state(portal.rig.redis, key)
    browser = portal.browser()
    browser.client.headers["authorization"] = f"Bearer {secret}"
    return browser.client


def here(portal: PortalRig) -> str:
    return f"/admin/v1/organisations/{portal.rig.org.id}"


async def furnished(portal: PortalRig) -> dict[str, str]:
    """Another organisation that has one of everything."""
    tenants = portal.rig.tenants
    org = await tenants.create_organisation("zzz-theirs")
    project = await tenants.create_project(org.id, "zzz-theirs")
    key, _ = await tenants.create_key(org.id, project.id, "zzz-theirs")
    person = await portal.person("them@example.org", Role.OWNER, tenant=org.id)
    link, _ = await portal.portal.links.invite(org.id, "guest@example.org", Role.VIEWER, actor="test")
    account = await portal.rig.gateway.admin.accounts.create(org.id, project.id, "zzz-theirs", actor="test")
    return {
        "organisation": org.id,
        "project": project.id,
        "key": key.id,
        "person": person.id,
        "invite": link.id,
        "account": account.id,
        "invoice": "019b0000-0000-7000-8000-000000000000",
        "request_id": "019b0000-0000-7000-8000-000000000000",
        "kind": "project",
        "kind_id": project.id,
        "secret_name": "zzz-theirs",
    }


def paths_of_organisations(portal: PortalRig) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for handler in portal.rig.gateway.admin.routes():
        for path in handler.paths:
            if "{organisation" in path:
                found.setdefault(path, set()).update(str(method) for method in handler.http_methods)
    return found


def fillings(path: str, mine: str, theirs: dict[str, str]) -> list[str]:
    """The path with another's organisation, and, where it names a thing, with our organisation and another's thing."""

    def fill(organisation: str) -> str:
        filled = path.replace("{organisation:str}", organisation)
        for name, value in theirs.items():
            filled = filled.replace(f"{{{name}:str}}", value)
        assert "{" not in filled, filled
        return filled

    both = [fill(theirs["organisation"])]
    return [*both, fill(mine)] if path.count("{") > 1 else both


async def with_csrf(browser: Browser) -> Browser:
    browser.client.headers["x-csrf-token"] = await browser.csrf("/portal")
    return browser
