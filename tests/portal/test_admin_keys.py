"""The admin API: keys and the service accounts that own them."""

import httpx
from admin_rig import here
from portal_rig import PortalRig

from gateway.portal.roles import Role


async def test_a_key_is_made_bound_rotated_and_revoked(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    body = {"name": "k", "project_id": portal.rig.project.id, "limits": {"requests_per_minute": 5}}
    made = (await admin.post(f"{here(portal)}/keys", json=body)).json()
    assert made["secret"].startswith("pdg_")
    path = f"{here(portal)}/keys/{made['id']}"

    async def works(secret: str) -> int:
        headers = {"authorization": f"Bearer {secret}"}
        return (await portal.browser().client.get("/v1/models", headers=headers)).status_code

    assert await works(made["secret"]) == 200
    bound = (await admin.patch(path, json={"scopes": {"models": ["tiny"]}})).json()
    assert bound["limits"] == {"requests_per_minute": 5}
    assert bound["scopes"] == {"models": ["tiny"]}
    assert bound["secret"] is None
    rotated = (await admin.post(f"{path}/rotate", json={})).json()
    assert await works(made["secret"]) == 401
    assert await works(rotated["secret"]) == 200
    assert (await admin.delete(path)).json()["state"] == "revoked"
    assert await works(rotated["secret"]) == 401
    listed = (await admin.get(f"{here(portal)}/keys", params={"state": "revoked"})).json()["data"]
    assert [one["id"] for one in listed] == [made["id"]]


async def test_a_service_account_owns_keys_that_end_with_it(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    body = {"name": "ci", "project_id": portal.rig.project.id}
    account = (await admin.post(f"{here(portal)}/service_accounts", json=body)).json()
    key = (await admin.post(f"{here(portal)}/keys", json={**body, "owner": account["id"]})).json()
    assert key["owner"] == account["id"]
    gone = await admin.delete(f"{here(portal)}/service_accounts/{account['id']}")
    assert gone.json()["deleted"]
    assert (await admin.get(f"{here(portal)}/keys/{key['id']}")).json()["state"] == "revoked"


async def test_a_developer_makes_no_admin_key_and_touches_none(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    developer = await portal.signed_in(Role.DEVELOPER)
    headers = {"x-csrf-token": await developer.csrf("/portal")}
    body = {"name": "x", "project_id": portal.rig.project.id, "admin": True}
    assert (await developer.client.post(f"{here(portal)}/keys", json=body, headers=headers)).status_code == 403
    keys_there = (await developer.get(f"{here(portal)}/keys")).json()["data"]
    powerful = next(one["id"] for one in keys_there if one["admin"])
    answer = await developer.client.post(f"{here(portal)}/keys/{powerful}/rotate", json={}, headers=headers)
    assert answer.status_code == 403
