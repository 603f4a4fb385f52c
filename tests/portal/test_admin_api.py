"""The admin API: organisations to audit, who may what, and what stays within one organisation."""

import datetime as dt
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from portal_rig import Browser, PortalRig

from billing.admin import Admin, admin_server
from billing.budgets import Budgets
from billing.consumer import UsageSink
from billing.moments import moment
from billing.partitions import Partitions, ensure_partitions
from billing.prices import list_prices
from contracts import keys
from contracts.credentials import Credentials
from contracts.identity import new_rid
from contracts.rating import Tokens, cost
from contracts.usage import Outcome, UsageEvent
from contracts.wire import encode
from gateway.portal.roles import RIGHTS, Right, Role
from gateway.tenants import publish_key_state

TOKEN = "billing-token"


async def _admin(portal: PortalRig, *, fleet: bool) -> httpx.AsyncClient:
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


@pytest.fixture
async def operator(portal: PortalRig) -> httpx.AsyncClient:
    return await _admin(portal, fleet=True)


@pytest.fixture
async def admin(portal: PortalRig) -> httpx.AsyncClient:
    return await _admin(portal, fleet=False)


@pytest.fixture
async def billing(portal: PortalRig) -> AsyncIterator[None]:
    gateway = portal.rig.gateway
    budgets = Budgets(gateway.engine, gateway.redis)
    serving = Admin(gateway.engine, budgets, currency="EUR")
    gateway.admin.money._money._credentials = Credentials(token=TOKEN)
    async with admin_server(serving, listen="127.0.0.1:0", token=TOKEN) as address:
        await portal.rig.redis.set(keys.BILLING_ADMIN, address)
        yield


def _here(portal: PortalRig) -> str:
    return f"/admin/v1/organisations/{portal.rig.org.id}"


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


async def test_lists_come_in_pages(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    for number in range(5):
        made = await admin.post(f"{_here(portal)}/projects", json={"name": f"p{number}"})
        assert made.status_code == 201, made.text
    names: list[str] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        answer = (await admin.get(f"{_here(portal)}/projects", params=params)).json()
        names += [one["name"] for one in answer["data"]]
        if not answer["has_more"]:
            break
        params["cursor"] = answer["next_cursor"]
    assert names == ["Default", "p0", "p1", "p2", "p3", "p4"]
    for wrong in ({"limit": 0}, {"limit": "x"}, {"cursor": "elsewhere"}):
        assert (await admin.get(f"{_here(portal)}/projects", params=wrong)).status_code == 400


async def test_a_key_is_made_bound_rotated_and_revoked(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    body = {"name": "k", "project_id": portal.rig.project.id, "limits": {"requests_per_minute": 5}}
    made = (await admin.post(f"{_here(portal)}/keys", json=body)).json()
    assert made["secret"].startswith("pdg_")
    path = f"{_here(portal)}/keys/{made['id']}"

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
    listed = (await admin.get(f"{_here(portal)}/keys", params={"state": "revoked"})).json()["data"]
    assert [one["id"] for one in listed] == [made["id"]]


async def test_a_service_account_owns_keys_that_end_with_it(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    body = {"name": "ci", "project_id": portal.rig.project.id}
    account = (await admin.post(f"{_here(portal)}/service_accounts", json=body)).json()
    key = (await admin.post(f"{_here(portal)}/keys", json={**body, "owner": account["id"]})).json()
    assert key["owner"] == account["id"]
    gone = await admin.delete(f"{_here(portal)}/service_accounts/{account['id']}")
    assert gone.json()["deleted"]
    assert (await admin.get(f"{_here(portal)}/keys/{key['id']}")).json()["state"] == "revoked"


async def test_a_suspended_organisation_is_refused_and_resumed(
    portal: PortalRig, admin: httpx.AsyncClient, operator: httpx.AsyncClient
) -> None:
    assert (await admin.put(f"{_here(portal)}/hold", json={})).status_code == 403  # the operator's to do
    held = await operator.put(f"{_here(portal)}/hold", json={"reason": "unpaid"})
    assert held.json()["mode"] == "suspended"
    assert [one["id"] for one in (await operator.get(f"{_here(portal)}/holds")).json()["data"]] == [portal.rig.org.id]
    assert (await operator.delete(f"{_here(portal)}/hold")).json()["deleted"]
    assert (await operator.get(f"{_here(portal)}/holds")).json()["data"] == []


async def test_invites_and_roles_keep_owners_to_owners(portal: PortalRig) -> None:
    owner = await portal.signed_in(Role.OWNER, email="owner@example.org")
    boss = await portal.signed_in(Role.ADMIN, email="admin@example.org")
    token = {"x-csrf-token": await boss.csrf("/portal")}
    people = {one["email"]: one["id"] for one in (await boss.get(f"{_here(portal)}/members")).json()["data"]}

    async def ask(method: str, path: str, body: dict[str, Any]) -> int:
        return (await boss.client.request(method, f"{_here(portal)}{path}", json=body, headers=token)).status_code

    assert await ask("POST", "/invites", {"email": "x@example.org", "role": "owner"}) == 403
    assert await ask("POST", "/invites", {"email": "x@example.org", "role": "operator"}) == 400
    assert await ask("PATCH", f"/members/{people['admin@example.org']}", {"role": "owner"}) == 403
    assert await ask("PATCH", f"/members/{people['owner@example.org']}", {"role": "viewer"}) == 403
    assert await ask("DELETE", f"/members/{people['owner@example.org']}", {}) == 403
    assert await ask("POST", f"/members/{people['owner@example.org']}/reset", {}) == 403
    assert await ask("POST", "/invites", {"email": "x@example.org", "role": "viewer"}) == 201
    invites = (await boss.get(f"{_here(portal)}/invites", params={"state": "open"})).json()["data"]
    assert [(one["email"], one["url"]) for one in invites] == [("x@example.org", None)]
    assert await ask("DELETE", f"/invites/{invites[0]['id']}", {}) == 200
    alone = {"x-csrf-token": await owner.csrf("/portal")}
    path = f"{_here(portal)}/members/{people['owner@example.org']}"
    assert (await owner.client.delete(path, headers=alone)).status_code == 409  # the last owner


async def test_who_belongs_to_two_organisations_is_reset_by_no_admin_of_one(portal: PortalRig) -> None:
    boss = await portal.signed_in(Role.ADMIN)
    other = await portal.rig.tenants.create_organisation("Other")
    shared = await portal.person("both@example.org", Role.VIEWER)
    async with portal.rig.gateway.engine.begin() as db:
        from gateway.portal.people import add_member

        await add_member(db, other.id, shared.id, Role.OWNER, actor="test")
    headers = {"x-csrf-token": await boss.csrf("/portal")}
    answer = await boss.client.post(f"{_here(portal)}/members/{shared.id}/reset", headers=headers)
    assert answer.status_code == 403


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
}


async def test_every_role_reads_what_its_rights_say(portal: PortalRig) -> None:
    for role in Role:
        browser = await portal.signed_in(role)
        for path, right in READS.items():
            answer = await browser.get(f"{_here(portal)}{path}")
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
}


async def test_every_role_writes_what_its_rights_say_and_only_with_the_secret_of_its_pages(portal: PortalRig) -> None:
    for role in Role:
        browser = await portal.signed_in(role)
        headers = {"x-csrf-token": await browser.csrf("/portal")}
        for (method, path), (right, body) in WRITES.items():
            url = f"{_here(portal)}{path}".replace("?", portal.rig.org.id)
            sent = {name: portal.rig.project.id if value == "?" else value for name, value in body.items()}
            forged = await browser.client.request(method, url, json=sent)
            assert forged.status_code == 403, (role, path)
            answer = await browser.client.request(method, url, json=sent, headers=headers)
            allowed = right in RIGHTS[role]
            assert (answer.status_code != 403) == allowed, (role, path, answer.text)
            assert answer.status_code in ((200, 201, 503) if allowed else (403,)), (role, path, answer.text)


async def test_a_developer_makes_no_admin_key_and_touches_none(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    developer = await portal.signed_in(Role.DEVELOPER)
    headers = {"x-csrf-token": await developer.csrf("/portal")}
    body = {"name": "x", "project_id": portal.rig.project.id, "admin": True}
    assert (await developer.client.post(f"{_here(portal)}/keys", json=body, headers=headers)).status_code == 403
    keys_there = (await developer.get(f"{_here(portal)}/keys")).json()["data"]
    powerful = next(one["id"] for one in keys_there if one["admin"])
    answer = await developer.client.post(f"{_here(portal)}/keys/{powerful}/rotate", json={}, headers=headers)
    assert answer.status_code == 403


async def test_nobody_without_a_key_or_session_gets_in_and_a_plain_key_does_not_administrate(portal: PortalRig) -> None:
    assert (await portal.browser().get(f"{_here(portal)}/projects")).status_code == 401
    plain = await portal.rig.client.get(f"{_here(portal)}/projects")
    assert plain.status_code == 403
    assert plain.json()["error"]["code"] == "permission_denied"


async def test_no_route_shows_or_changes_what_is_another_organisations(
    portal: PortalRig, admin: httpx.AsyncClient, operator: httpx.AsyncClient, billing: None
) -> None:
    """Every route of the admin API that takes an id, asked for another organisation's thing."""
    theirs = await _furnished(portal)
    mine = {
        "admin key": admin,
        "plain key": portal.rig.client,
        "owner": (await _with_csrf(await portal.signed_in(Role.OWNER))).client,
    }
    walked = 0
    for path, methods in sorted(_paths(portal).items()):
        for method in sorted(methods):
            for filled in _fillings(path, portal.rig.org.id, theirs):
                walked += 1
                for who, client in mine.items():
                    answer = await client.request(method, filled, json={} if method != "GET" else None)
                    assert answer.status_code in (400, 401, 403, 404, 405, 409), (who, method, filled, answer.text)
                    assert theirs["secret_name"] not in answer.text, (who, method, filled)
    assert walked >= 50
    still = await operator.get(f"/admin/v1/organisations/{theirs['organisation']}/keys/{theirs['key']}")
    assert still.json()["state"] == "active"


async def _furnished(portal: PortalRig) -> dict[str, str]:
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
        "kind": "project",
        "kind_id": project.id,
        "secret_name": "zzz-theirs",
    }


def _paths(portal: PortalRig) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for handler in portal.rig.gateway.admin.routes():
        for path in handler.paths:
            if "{organisation" in path:
                found.setdefault(path, set()).update(str(method) for method in handler.http_methods)
    return found


def _fillings(path: str, mine: str, theirs: dict[str, str]) -> list[str]:
    """The path with another's organisation, and, where it names a thing, with our organisation and another's thing."""

    def fill(organisation: str) -> str:
        filled = path.replace("{organisation:str}", organisation)
        for name, value in theirs.items():
            filled = filled.replace(f"{{{name}:str}}", value)
        assert "{" not in filled, filled
        return filled

    both = [fill(theirs["organisation"])]
    return [*both, fill(mine)] if path.count("{") > 1 else both


async def _with_csrf(browser: Browser) -> Browser:
    browser.client.headers["x-csrf-token"] = await browser.csrf("/portal")
    return browser


async def test_what_forms_of_the_portal_write_about_money_is_in_the_record_of_changes(
    portal: PortalRig, admin: httpx.AsyncClient, billing: None
) -> None:
    payer = await portal.signed_in(Role.BILLING)
    scope = {"scope": f"project:{portal.rig.project.id}"}
    foreign = {"scope": "project:proj_of_another"}
    assert (await payer.post("/portal/budgets", {**scope, "amount": "12.50"})).status_code == 303
    assert (await payer.post("/portal/budgets/remove", foreign, form="/portal/budgets")).status_code == 404
    assert (await payer.post("/portal/budgets/remove", scope, form="/portal/budgets")).status_code == 303
    hook = {"address": "https://example.org/hook", "secret": "s" * 32}
    assert (await payer.post("/portal/webhooks", hook)).status_code == 303
    found = (await admin.get(f"{_here(portal)}/audit")).json()["data"]
    written = [(one["action"], one["subject"]) for one in found if one["kind"] in ("budget", "profile")]
    project = scope["scope"]
    assert written[::-1] == [
        ("set_budget", project),
        ("remove_budget", project),
        ("set_profile", portal.rig.org.id),
    ]
    assert all(one["actor"].startswith("person_") for one in found if one["kind"] in ("budget", "profile"))


async def test_budgets_credits_and_prices_are_written_by_billing_and_read_back(
    portal: PortalRig, admin: httpx.AsyncClient, operator: httpx.AsyncClient, billing: None
) -> None:
    budget = f"{_here(portal)}/budgets/project/{portal.rig.project.id}"
    assert (await admin.put(budget, json={"amount": "12.50"})).status_code == 200
    found = (await admin.get(f"{_here(portal)}/budgets")).json()["data"]
    assert [(one["scope"], one["amount_nano"], one["thresholds"]) for one in found] == [
        ("project", 12_500_000_000, [50, 80, 100])
    ]
    assert (await admin.delete(budget)).json()["deleted"]
    gift = {"amount": "5", "idempotency": "welcome"}
    assert (await admin.post(f"{_here(portal)}/credits", json=gift)).status_code == 403
    first = await operator.post(f"{_here(portal)}/credits", json=gift)
    again = await operator.post(f"{_here(portal)}/credits", json=gift)
    assert first.status_code == 201, first.text
    assert first.json()["id"] == again.json()["id"]
    credit = (await admin.get(f"{_here(portal)}/credits")).json()["data"]
    assert [one["value"]["left"] for one in credit] == [5_000_000_000]
    price = {"model": "tiny", "prefill_computed": "1", "prefill_cached": "0.5", "decode": "2"}
    made = await operator.post("/admin/v1/prices", json=price)
    assert made.status_code == 201, made.text
    assert made.json()["value"]["version"] == 2
    listed = (await operator.get("/admin/v1/prices", params={"model": "tiny"})).json()["data"]
    assert {one["value"]["price"]["version"] for one in listed} == {1, 2}
    refused = await operator.post(f"{_here(portal)}/invoices", json={"month": "2999-01"})
    assert refused.status_code == 400


async def test_the_record_of_changes_says_who_did_what_and_can_be_exported(
    portal: PortalRig, admin: httpx.AsyncClient
) -> None:
    project = (await admin.post(f"{_here(portal)}/projects", json={"name": "new"})).json()
    audit = (await admin.get(f"{_here(portal)}/audit", params={"kind": "project"})).json()
    newest = audit["data"][0]
    assert (newest["action"], newest["subject"]) == ("created", project["id"])
    assert newest["actor"].startswith("key_")
    lines = (await admin.get(f"{_here(portal)}/audit", headers={"accept": "application/jsonl"})).text.splitlines()
    everything = (await admin.get(f"{_here(portal)}/audit")).json()["data"]
    assert len(lines) == len(everything)
    pages: list[int] = []
    params: dict[str, Any] = {"limit": 1}
    while len(pages) < len(everything):
        one = (await admin.get(f"{_here(portal)}/audit", params=params)).json()
        pages += [row["id"] for row in one["data"]]
        params["cursor"] = one["next_cursor"]
    assert pages == [row["id"] for row in everything]


async def test_an_operator_steers_a_pool_and_pauses_a_model(portal: PortalRig, operator: httpx.AsyncClient) -> None:
    workers = (await operator.get("/admin/v1/workers", params={"role": "prefill"})).json()["data"]
    assert [one["value"]["worker_id"] for one in workers] == ["prefill-0"]
    assert (await operator.get("/admin/v1/pools/tiny/steering")).json()["value"] == {"source": "settings"}
    nothing = await operator.put("/admin/v1/pools/tiny/steering", json={"mode": "manual", "prefill": 2})
    assert nothing.status_code == 409
    kept = await operator.put("/admin/v1/pools/tiny/steering", json={"mode": "manual", "prefill": 1, "decode": 1})
    assert kept.status_code == 200, kept.text
    assert (await operator.get("/admin/v1/pools/tiny/steering")).json()["value"]["mode"] == "manual"
    assert (await operator.delete("/admin/v1/pools/tiny/steering")).status_code == 200
    paused = await operator.put("/admin/v1/models/tiny-alias/hold", json={"reason": "maintenance"})
    assert paused.json()["id"] == "tiny"
    assert (await operator.get("/admin/v1/models")).json()["data"][0]["value"]["paused"]
    assert (await operator.delete("/admin/v1/models/tiny/hold")).json()["deleted"]
    for method, path in (("POST", "/admin/v1/models"), ("DELETE", "/admin/v1/models/tiny")):
        refused = await operator.request(method, path)
        assert refused.status_code == 409
        assert "catalogue" in refused.json()["error"]["message"]
    assert (await operator.get("/admin/v1/pools/nowhere/series")).status_code == 404
    assert (await operator.get("/admin/v1/pools/tiny/decisions")).status_code == 404


async def test_a_write_that_is_sent_again_with_its_key_happens_once(
    portal: PortalRig, admin: httpx.AsyncClient
) -> None:
    headers = {"idempotency-key": "one"}
    first = await admin.post(f"{_here(portal)}/projects", json={"name": "once"}, headers=headers)
    again = await admin.post(f"{_here(portal)}/projects", json={"name": "once"}, headers=headers)
    assert first.json() == again.json()
    assert again.headers["idempotent-replayed"] == "true"
    other = await admin.post(f"{_here(portal)}/projects", json={"name": "twice"}, headers=headers)
    assert other.status_code == 422
    key = {"name": "k", "project_id": portal.rig.project.id}
    made = await admin.post(f"{_here(portal)}/keys", json=key, headers={"idempotency-key": "two"})
    assert made.status_code == 201
    repeated = await admin.post(f"{_here(portal)}/keys", json=key, headers={"idempotency-key": "two"})
    assert repeated.status_code == 409  # a secret is kept nowhere
    assert made.json()["secret"] not in str(await portal.rig.redis.keys("*"))
    assert len([one for one in (await admin.get(f"{_here(portal)}/keys")).json()["data"] if one["name"] == "k"]) == 1


async def test_what_is_wrong_in_a_body_is_named(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    for body, param in (
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x", "limits": {"requests_per_minut": 1}}, "limits"),
        ({"name": "x\u0000"}, "name"),
    ):
        answer = await admin.post(f"{_here(portal)}/projects", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    networks = await admin.post(f"{_here(portal)}/projects", json={"name": "x", "scopes": {"networks": ["no"]}})
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


async def test_a_price_is_previewed_on_past_usage_and_not_set(
    portal: PortalRig, operator: httpx.AsyncClient, admin: httpx.AsyncClient, billing: None
) -> None:
    body = {"model": "tiny", "prefill_computed": "0.1", "prefill_cached": "0.02", "decode": "0.8", "batch_ppm": 500000}
    assert (await admin.post("/admin/v1/prices/preview", json=body)).status_code == 403
    await _use(portal, Tokens(decode=1_000_000))
    now = dt.datetime.now(dt.UTC)
    span = {"used_from": (now - dt.timedelta(days=1)).isoformat(), "used_to": (now + dt.timedelta(days=1)).isoformat()}
    answer = await operator.post("/admin/v1/prices/preview", json=body | span)
    assert answer.status_code == 200, answer.text
    seen = answer.json()
    assert (seen["object"], seen["difference"], seen["difference_nano"]) == ("price_preview", "0.4", 400_000_000)
    (change,) = seen["changes"]
    assert (change["organisation_id"], change["meter"]) == (portal.rig.org.id, "decode")
    assert (change["old"], change["new"], change["requests"]) == ("0.4", "0.8", 1)
    last_month = (await operator.post("/admin/v1/prices/preview", json=body)).json()
    assert dt.datetime.fromisoformat(last_month["used_to"]) == now.replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    listed = (await operator.get("/admin/v1/prices", params={"model": "tiny"})).json()["data"]
    assert len(listed) == 1, "nothing was set"
    wrong = await operator.post("/admin/v1/prices/preview", json=body | {"model": "nothing"})
    assert wrong.status_code == 400
    assert "has no price" in wrong.json()["error"]["message"]


async def _use(portal: PortalRig, tokens: Tokens) -> None:
    """Bill one request of the portal's organisation, a minute ago."""
    engine = portal.rig.gateway.engine
    at_ms = int(dt.datetime.now(dt.UTC).timestamp() * 1000) - 60_000
    async with engine.begin() as conn:
        await ensure_partitions(conn, moment(at_ms).date(), 2)
        price = next(one.price for one in await list_prices(conn, "tiny"))
    event = UsageEvent(
        rid=new_rid(at_ms), org=portal.rig.org.id, project=portal.rig.project.id, key_id=portal.rig.key.id,
        model="tiny", pool="tiny", tier="default", outcome=Outcome.FINISHED, price=price, tokens=tokens,
        cost=cost(tokens, price),
    )  # fmt: skip
    sink = UsageSink(engine, Partitions(engine))
    await sink.write(await sink.prepare([encode(event)]))
