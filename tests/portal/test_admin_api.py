"""The admin API: pages of lists, writes that are sent again, faults of bodies, the record of changes."""

from typing import Any

import httpx
from admin_rig import here
from portal_rig import PortalRig


async def test_lists_come_in_pages(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    for number in range(5):
        made = await admin.post(f"{here(portal)}/projects", json={"name": f"p{number}"})
        assert made.status_code == 201, made.text
    names: list[str] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        answer = (await admin.get(f"{here(portal)}/projects", params=params)).json()
        names += [one["name"] for one in answer["data"]]
        if not answer["has_more"]:
            break
        params["cursor"] = answer["next_cursor"]
    assert names == ["Default", "p0", "p1", "p2", "p3", "p4"]
    for wrong in ({"limit": 0}, {"limit": "x"}, {"cursor": "elsewhere"}):
        assert (await admin.get(f"{here(portal)}/projects", params=wrong)).status_code == 400


async def test_the_record_of_changes_says_who_did_what_and_can_be_exported(
    portal: PortalRig, admin: httpx.AsyncClient
) -> None:
    project = (await admin.post(f"{here(portal)}/projects", json={"name": "new"})).json()
    audit = (await admin.get(f"{here(portal)}/audit", params={"kind": "project"})).json()
    newest = audit["data"][0]
    assert (newest["action"], newest["subject"]) == ("created", project["id"])
    assert newest["actor"].startswith("key_")
    lines = (await admin.get(f"{here(portal)}/audit", headers={"accept": "application/jsonl"})).text.splitlines()
    everything = (await admin.get(f"{here(portal)}/audit")).json()["data"]
    assert len(lines) == len(everything)
    pages: list[int] = []
    params: dict[str, Any] = {"limit": 1}
    while len(pages) < len(everything):
        one = (await admin.get(f"{here(portal)}/audit", params=params)).json()
        pages += [row["id"] for row in one["data"]]
        params["cursor"] = one["next_cursor"]
    assert pages == [row["id"] for row in everything]


async def test_a_write_that_is_sent_again_with_its_key_happens_once(
    portal: PortalRig, admin: httpx.AsyncClient
) -> None:
    headers = {"idempotency-key": "one"}
    first = await admin.post(f"{here(portal)}/projects", json={"name": "once"}, headers=headers)
    again = await admin.post(f"{here(portal)}/projects", json={"name": "once"}, headers=headers)
    assert first.json() == again.json()
    assert again.headers["idempotent-replayed"] == "true"
    other = await admin.post(f"{here(portal)}/projects", json={"name": "twice"}, headers=headers)
    assert other.status_code == 422
    key = {"name": "k", "project_id": portal.rig.project.id}
    made = await admin.post(f"{here(portal)}/keys", json=key, headers={"idempotency-key": "two"})
    assert made.status_code == 201
    repeated = await admin.post(f"{here(portal)}/keys", json=key, headers={"idempotency-key": "two"})
    assert repeated.status_code == 409  # a secret is kept nowhere
    assert made.json()["secret"] not in str(await portal.rig.redis.keys("*"))
    assert len([one for one in (await admin.get(f"{here(portal)}/keys")).json()["data"] if one["name"] == "k"]) == 1


async def test_what_is_wrong_in_a_body_is_named(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    for body, param in (
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x", "limits": {"requests_per_minut": 1}}, "limits"),
        ({"name": "x", "limits": {"requests_per_minute": -1}}, "limits.requests_per_minute"),
        ({"name": "x", "limits": {"tokens_per_minute": 2**53}}, "limits.tokens_per_minute"),
        ({"name": "x\u0000"}, "name"),
    ):
        answer = await admin.post(f"{here(portal)}/projects", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    for path, body in (
        ("keys", {"name": "x", "project_id": portal.rig.project.id, "expires_at": "2999-01-01T00:00:00Z"}),
        ("keys", {"name": "x", "project_id": portal.rig.project.id, "expires_at": "2027-01-01T00:00:00"}),  # whose?
        ("keys", {"name": "x", "project_id": "proj\u0000"}),
        ("keys?cursor=%00", {"name": "x", "project_id": portal.rig.project.id}),
    ):
        answer = await admin.post(f"{here(portal)}/{path}", json=body)
        assert answer.status_code == 400, (path, body, answer.text)
    networks = await admin.post(f"{here(portal)}/projects", json={"name": "x", "scopes": {"networks": ["no"]}})
    assert networks.status_code == 400


async def test_every_operation_has_a_stable_id_in_the_description(portal: PortalRig) -> None:
    schema = (await portal.browser().get("/schema/openapi.json")).json()
    ids = [
        operation["operationId"]
        for path, methods in schema["paths"].items()
        if path.startswith("/admin/v1/")
        for operation in methods.values()
        if isinstance(operation, dict) and "operationId" in operation
    ]
    assert len(ids) == len(set(ids)) >= 45
    assert {"createKey", "rotateKey", "putBudget", "listAudit", "putSteering", "adminPauseModel"} <= set(ids)
