"""The admin API: organisations, their members and invites, and what holds them."""

from typing import Any

import httpx
from admin_rig import here
from portal_rig import PortalRig

from gateway.portal.roles import Role


async def test_an_operator_makes_an_organisation_and_its_owner_comes_in(
    portal: PortalRig, operator: httpx.AsyncClient
) -> None:
    made = await operator.post("/admin/v1/organisations", json={"name": "New", "owner_email": "o@example.org"})
    assert made.status_code == 201, made.text
    org = made.json()
    owner = portal.browser()
    path = httpx.URL(org["invite_url"]).path
    assert (await owner.post(path, {"password": "a long password"})).status_code == 303
    members = (await owner.get(f"/admin/v1/organisations/{org['id']}/members")).json()
    assert [(one["email"], one["role"]) for one in members["data"]] == [("o@example.org", "owner")]
    listed = (await operator.get("/admin/v1/organisations", params={"name": "New"})).json()
    assert [one["id"] for one in listed["data"]] == [org["id"]]
    assert [one["name"] for one in (await owner.get("/admin/v1/organisations")).json()["data"]] == ["New"]


async def test_a_suspended_organisation_is_refused_and_resumed(
    portal: PortalRig, admin: httpx.AsyncClient, operator: httpx.AsyncClient
) -> None:
    assert (await admin.put(f"{here(portal)}/hold", json={})).status_code == 403  # the operator's to do
    held = await operator.put(f"{here(portal)}/hold", json={"reason": "unpaid"})
    assert held.json()["mode"] == "suspended"
    assert [one["id"] for one in (await operator.get(f"{here(portal)}/holds")).json()["data"]] == [portal.rig.org.id]
    assert (await operator.delete(f"{here(portal)}/hold")).json()["deleted"]
    assert (await operator.get(f"{here(portal)}/holds")).json()["data"] == []


async def test_invites_and_roles_keep_owners_to_owners(portal: PortalRig) -> None:
    owner = await portal.signed_in(Role.OWNER, email="owner@example.org")
    boss = await portal.signed_in(Role.ADMIN, email="admin@example.org")
    token = {"x-csrf-token": await boss.csrf("/portal")}
    people = {one["email"]: one["id"] for one in (await boss.get(f"{here(portal)}/members")).json()["data"]}

    async def ask(method: str, path: str, body: dict[str, Any]) -> int:
        return (await boss.client.request(method, f"{here(portal)}{path}", json=body, headers=token)).status_code

    assert await ask("POST", "/invites", {"email": "x@example.org", "role": "owner"}) == 403
    assert await ask("POST", "/invites", {"email": "x@example.org", "role": "operator"}) == 400
    assert await ask("PATCH", f"/members/{people['admin@example.org']}", {"role": "owner"}) == 403
    assert await ask("PATCH", f"/members/{people['owner@example.org']}", {"role": "viewer"}) == 403
    assert await ask("DELETE", f"/members/{people['owner@example.org']}", {}) == 403
    assert await ask("POST", f"/members/{people['owner@example.org']}/reset", {}) == 403
    assert await ask("POST", "/invites", {"email": "x@example.org", "role": "viewer"}) == 201
    invites = (await boss.get(f"{here(portal)}/invites", params={"state": "open"})).json()["data"]
    assert [(one["email"], one["url"]) for one in invites] == [("x@example.org", None)]
    assert await ask("DELETE", f"/invites/{invites[0]['id']}", {}) == 200
    alone = {"x-csrf-token": await owner.csrf("/portal")}
    path = f"{here(portal)}/members/{people['owner@example.org']}"
    assert (await owner.client.delete(path, headers=alone)).status_code == 409  # the last owner


async def test_who_belongs_to_two_organisations_is_reset_by_no_admin_of_one(portal: PortalRig) -> None:
    boss = await portal.signed_in(Role.ADMIN)
    other = await portal.rig.tenants.create_organisation("Other")
    shared = await portal.person("both@example.org", Role.VIEWER)
    async with portal.rig.gateway.engine.begin() as db:
        from gateway.portal.people import add_member

        await add_member(db, other.id, shared.id, Role.OWNER, actor="test")
    headers = {"x-csrf-token": await boss.csrf("/portal")}
    answer = await boss.client.post(f"{here(portal)}/members/{shared.id}/reset", headers=headers)
    assert answer.status_code == 403
