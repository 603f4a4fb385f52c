"""Operators act on the fleet, by API and by the page's forms: workers' drain and role, who steers, paused models."""

import asyncio
import csv
import io
from typing import Any

import httpx
import msgspec
from portal_rig import Browser, PortalRig

from contracts.lifecycle import Role as WorkerRole
from contracts.orders import Answer, Order, answer, orders
from contracts.wire import FIELD, encode
from gateway.portal.roles import Role
from gateway.tenants import publish_key_state
from tests.gateway.gateway_rig import HELLO, POOL, eventually

WORKERS = "/admin/v1/workers"


async def _operator(portal: PortalRig) -> httpx.AsyncClient:
    tenants = portal.rig.tenants
    org = await tenants.create_organisation("Operators", runs_fleet=True)
    project = await tenants.create_project(org.id, "Default")
    key, secret = await tenants.create_key(org.id, project.id, "admin", is_admin=True)
    await publish_key_state(portal.rig.redis, key)
    browser = portal.browser()
    browser.client.headers["authorization"] = f"Bearer {secret}"
    return browser.client


async def _ordered(portal: PortalRig) -> Order:
    """The one order in the pool's stream, as its leader would take it."""
    redis = portal.rig.redis
    (entry,) = await eventually(lambda: redis.xrange(orders(POOL)))
    await redis.xdel(orders(POOL), entry[0])
    return msgspec.msgpack.decode(entry[1][FIELD.encode()], type=Order)


async def _answer(portal: PortalRig, order: Order, said: Answer) -> None:
    key = answer(POOL, order.order_id)
    await portal.rig.redis.rpush(key, encode(said))
    await portal.rig.redis.pexpire(key, 300_000)


async def test_an_operator_gives_a_worker_a_role_and_the_answer_can_be_read_again(portal: PortalRig) -> None:
    operator = await _operator(portal)
    done = Answer(ok=True, role=WorkerRole.DECODE, drain_ms=12.0, switch_ms=3.0)

    async def lead() -> Order:
        order = await _ordered(portal)
        await _answer(portal, order, done)
        return order

    async with asyncio.TaskGroup() as tasks:
        leading = tasks.create_task(lead())
        given = await operator.post(
            f"{WORKERS}/prefill-0/orders", json={"what": "role", "role": "decode", "wait_s": 10}
        )
    assert given.status_code == 201, given.text
    order = leading.result()
    assert (order.worker_id, order.what, order.role) == ("prefill-0", "role", WorkerRole.DECODE)
    assert given.json() == {
        "id": order.order_id, "worker_id": "prefill-0", "state": "done", "message": "", "role": "decode",
        "drain_ms": 12.0, "switch_ms": 3.0,
    }  # fmt: skip
    for _ in range(2):
        assert (await operator.get(f"{WORKERS}/prefill-0/orders/{order.order_id}")).json()["state"] == "done"
    (row,) = (await operator.get("/admin/v1/audit", params={"kind": "worker"})).json()["data"]
    assert (row["action"], row["subject"], row["detail"]["role"]) == ("role_ordered", "prefill-0", "decode")


async def test_a_refused_drain_says_why_and_an_order_without_leader_stays_pending(portal: PortalRig) -> None:
    operator = await _operator(portal)
    asked = await operator.post(f"{WORKERS}/decode-0/orders", json={"what": "drain", "wait_s": 0})
    assert asked.json()["state"] == "pending"
    await _answer(portal, await _ordered(portal), Answer(ok=False, message="its stream is down"))
    seen = (await operator.get(f"{WORKERS}/decode-0/orders/{asked.json()['id']}")).json()
    assert (seen["state"], seen["message"]) == ("refused", "its stream is down")


async def test_orders_that_make_no_sense_are_refused_before_anything_is_written(portal: PortalRig) -> None:
    operator = await _operator(portal)
    assert (await operator.get(f"{WORKERS}/prefill-0")).json()["role"] == "prefill"
    bodies: list[tuple[str, dict[str, Any], int]] = [
        ("nobody", {"what": "drain"}, 404),
        ("decode-0", {"what": "role"}, 400),
        ("decode-0", {"what": "drain", "role": "decode"}, 400),
        ("decode-0", {"what": "explode"}, 400),
    ]
    for worker, body, status in bodies:
        assert (await operator.post(f"{WORKERS}/{worker}/orders", json=body)).status_code == status, body
    mine = portal.rig.client.headers["authorization"]
    refused = await portal.rig.client.post(f"{WORKERS}/decode-0/orders", json={"what": "drain"})
    assert refused.status_code == 403, mine
    assert await portal.rig.redis.xlen(orders(POOL)) == 0


async def test_the_fleets_page_gives_orders_and_shows_how_they_stand(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.OPERATOR)
    form = "/portal/fleet/workers/decode-0/order"
    sent = await browser.post(form, {"what": "drain"}, form="/portal/fleet")
    assert sent.status_code == 303
    page = sent.headers["location"]
    assert "on its way" in (await browser.get(page)).text
    await _answer(portal, await _ordered(portal), Answer(ok=False, message="<b>busy</b>"))
    assert "was not changed: &lt;b&gt;busy" in (await browser.get(page)).text
    assert (await browser.client.post(form, data={"what": "drain"})).status_code == 403  # not from our page
    assert (await browser.post(form, {"what": "explode"}, form="/portal/fleet")).status_code == 400
    viewer = await portal.signed_in(Role.ADMIN)
    assert (await viewer.post(form, {"what": "drain"}, form="/portal")).status_code == 403
    assert await portal.rig.redis.xlen(orders(POOL)) == 0


async def test_an_operator_steers_a_pool_from_its_page(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.OPERATOR)
    operator = await _operator(portal)

    async def steer(**fields: str) -> int:
        data = {"pool": POOL, **fields}
        return (await browser.post("/portal/fleet/steering", data, form="/portal/fleet")).status_code

    assert await steer(mode="manual", prefill="2", decode="0", unified="0") == 409
    assert await steer(mode="manual", prefill="1", decode="1", unified="0") == 303
    kept = (await operator.get(f"/admin/v1/pools/{POOL}/steering")).json()["value"]
    assert (kept["mode"], kept["prefill"], kept["decode"]) == ("manual", 1, 1)
    assert await steer(mode="nonsense") == 400
    assert await steer(mode="settings") == 303
    assert (await operator.get(f"/admin/v1/pools/{POOL}/steering")).json()["value"] == {"source": "settings"}


async def test_a_model_paused_on_the_page_serves_nobody_until_it_is_resumed(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.OPERATOR)
    form = "/portal/fleet/models/hold"
    assert (await browser.post(form, {"model": "tiny", "on": "1"}, form="/portal/fleet")).status_code == 303
    assert "Paused" in (await browser.get("/portal/fleet")).text

    async def refused() -> bool:
        answer = await portal.rig.client.post("/v1/chat/completions", json=HELLO)
        return answer.status_code == 503

    await eventually(refused)
    assert (await browser.post(form, {"model": "tiny", "on": ""}, form="/portal/fleet")).status_code == 303
    assert "Paused" not in (await browser.get("/portal/fleet")).text


async def test_limits_set_on_their_page_bind_the_next_request_and_roles_change_only_their_own(
    portal: PortalRig,
) -> None:
    rig = portal.rig
    owner, developer = await portal.signed_in(Role.OWNER), await portal.signed_in(Role.DEVELOPER)
    key, project, org = f"key:{rig.key.id}", f"project:{rig.project.id}", f"org:{rig.org.id}"

    async def put(browser: Browser, of: str, **fields: str) -> int:
        return (await browser.post("/portal/limits", {"of": of, **fields})).status_code

    assert await put(developer, key, requests_per_minute="7") == 303
    assert await put(developer, project, requests_per_minute="7") == 403
    assert await put(owner, org, requests_per_minute="7") == 403
    assert await put(owner, project, requests_per_minute="seven") == 400
    assert await put(owner, "key:none", requests_per_minute="7") == 404
    assert await put(owner, project, requests_per_minute="0") == 303
    page = (await owner.get(f"/portal/limits?of={key}")).text
    assert 'value="7"' in page
    refused = await rig.client.post("/v1/chat/completions", json=HELLO)
    assert refused.status_code == 429, refused.text


async def test_the_record_of_changes_comes_as_a_file_of_ones_own_or_for_operators_of_all(portal: PortalRig) -> None:
    others = await portal.rig.tenants.create_organisation("=Others")
    await portal.rig.tenants.create_project(others.id, "theirs", actor="=1+1")
    owner, operator = await portal.signed_in(Role.OWNER), await portal.signed_in(Role.OPERATOR)
    mine = list(csv.DictReader(io.StringIO((await owner.get("/portal/audit.csv?scope=all")).text)))
    assert {row["organisation_id"] for row in mine} == {portal.rig.org.id}
    everything = list(csv.DictReader(io.StringIO((await operator.get("/portal/audit.csv?scope=all")).text)))
    assert [int(row["id"]) for row in everything] == sorted((int(row["id"]) for row in everything), reverse=True)
    assert "'=1+1" in {row["actor"] for row in everything if row["organisation_id"] == others.id}
    assert "=Others" in (await operator.get("/portal/audit?scope=all")).text
