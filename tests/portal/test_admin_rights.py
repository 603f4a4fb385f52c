"""The admin API: who may what, and what stays within one organisation."""

from typing import Any

import httpx
from admin_rig import fillings, furnished, here, paths_of_organisations, with_csrf
from portal_rig import PortalRig

from gateway.portal.roles import RIGHTS, Right, Role

READS = {
    "": Right.READ,
    "/projects": Right.READ,
    "/holds": Right.READ,
    "/keys": Right.READ,
    "/service_accounts": Right.READ,
    "/members": Right.MEMBERS,
    "/invites": Right.MEMBERS,
    "/budgets": Right.COSTS,
    "/credits": Right.COSTS,
    "/profile": Right.COSTS,
    "/invoices": Right.COSTS,
    "/audit": Right.AUDIT,
    "/stored_texts": Right.READ,
}


async def test_every_role_reads_what_its_rights_say(portal: PortalRig) -> None:
    for role in Role:
        browser = await portal.signed_in(role)
        for path, right in READS.items():
            answer = await browser.get(f"{here(portal)}{path}")
            assert answer.status_code == (200 if right in RIGHTS[role] else 403), (role, path, answer.text)
        for path in ("prices", "models", "workers", "audit", "pools/tiny/steering", "pools/tiny/series"):
            answer = await browser.get(f"/admin/v1/{path}")
            assert answer.status_code == (200 if role is Role.OPERATOR else 403), (role, path, answer.text)


WRITES: dict[tuple[str, str], tuple[Right, dict[str, Any]]] = {
    ("POST", "/projects"): (Right.PROJECTS, {"name": "x"}),
    ("PATCH", ""): (Right.PROJECTS, {"name": "x"}),
    ("POST", "/keys"): (Right.KEYS, {"name": "x", "project_id": "?"}),
    ("POST", "/invites"): (Right.MEMBERS, {"email": "a@b.c", "role": "viewer"}),
    ("POST", "/service_accounts"): (Right.MEMBERS, {"name": "x", "project_id": "?"}),
    ("PUT", "/hold"): (Right.FLEET, {"mode": "read_only"}),
    ("POST", "/credits"): (Right.FLEET, {"amount": "1", "idempotency": "x"}),
    ("PUT", "/budgets/org/?"): (Right.MONEY, {"amount": "1"}),
    ("PUT", "/stored_texts"): (Right.STORAGE, {"days": 30}),
}


async def test_every_role_writes_what_its_rights_say_and_only_with_the_secret_of_its_pages(portal: PortalRig) -> None:
    for role in Role:
        browser = await portal.signed_in(role)
        headers = {"x-csrf-token": await browser.csrf("/portal")}
        for (method, path), (right, body) in WRITES.items():
            url = f"{here(portal)}{path}".replace("?", portal.rig.org.id)
            sent = {name: portal.rig.project.id if value == "?" else value for name, value in body.items()}
            forged = await browser.client.request(method, url, json=sent)
            assert forged.status_code == 403, (role, path)
            answer = await browser.client.request(method, url, json=sent, headers=headers)
            allowed = right in RIGHTS[role]
            assert (answer.status_code != 403) == allowed, (role, path, answer.text)
            assert answer.status_code in ((200, 201, 503) if allowed else (403,)), (role, path, answer.text)


async def test_nobody_without_a_key_or_session_gets_in_and_a_plain_key_does_not_administrate(portal: PortalRig) -> None:
    assert (await portal.browser().get(f"{here(portal)}/projects")).status_code == 401
    plain = await portal.rig.client.get(f"{here(portal)}/projects")
    assert plain.status_code == 403
    assert plain.json()["error"]["code"] == "permission_denied"


async def test_no_route_shows_or_changes_what_is_another_organisations(
    portal: PortalRig, admin: httpx.AsyncClient, operator: httpx.AsyncClient, billing: None
) -> None:
    """Every route of the admin API that takes an id, asked for another organisation's thing."""
    theirs = await furnished(portal)
    mine = {
        "admin key": admin,
        "plain key": portal.rig.client,
        "owner": (await with_csrf(await portal.signed_in(Role.OWNER))).client,
    }
    walked = 0
    for path, methods in sorted(paths_of_organisations(portal).items()):
        for method in sorted(methods):
            for filled in fillings(path, portal.rig.org.id, theirs):
                walked += 1
                for who, client in mine.items():
                    answer = await client.request(method, filled, json={} if method != "GET" else None)
                    assert answer.status_code in (400, 401, 403, 404, 405, 409), (who, method, filled, answer.text)
                    assert theirs["secret_name"] not in answer.text, (who, method, filled)
    assert walked >= 50
    still = await operator.get(f"/admin/v1/organisations/{theirs['organisation']}/keys/{theirs['key']}")
    assert still.json()["state"] == "active"
