"""Who may have prompts and answers stored, who reads them, and that nobody else does: admin API and pages."""

import asyncio
from typing import Any

import httpx
import pytest
from admin_rig import here, with_csrf
from portal_rig import Browser, PortalRig

from contracts.lifecycle import FinishReason, Phase
from gateway.portal.people import add_member
from gateway.portal.roles import RIGHTS, Right, Role
from tests.gateway.gateway_rig import HELLO, eventually

READERS = {Role.OWNER, Role.ADMIN, Role.DEVELOPER}
SECRET = "zebra-marzipan"
EVIL = "<script>alert(1)</script>"


async def talked(portal: PortalRig) -> str:
    """Have a request asked, answered and stored; return its id."""
    rig = portal.rig
    texts = rig.gateway.admin.texts

    async def knows() -> bool:
        return (await rig.gateway.auth.authenticate(f"Bearer {rig.secret}")).keeps_texts

    await eventually(knows)
    async with asyncio.TaskGroup() as tasks:
        body = {**HELLO, "messages": [{"role": "user", "content": f"{SECRET}{EVIL}"}]}
        tasks.create_task(rig.client.post("/v1/chat/completions", json=body))
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        await handle.tokens(f"teapot{EVIL}")
        await handle.finish(FinishReason.STOP, prompt=9, completion=1)
    await eventually(lambda: texts.book.find(rig.org.id, submit.rid))
    return submit.rid


def test_rights_are_as_the_docs_say() -> None:
    assert {role for role in Role if Right.TEXTS in RIGHTS[role]} == READERS
    assert {role for role in Role if Right.STORAGE in RIGHTS[role]} == {Role.OWNER, Role.ADMIN}


async def test_owners_and_admins_decide_and_it_is_audited(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    url = f"{here(portal)}/stored_texts"
    assert (await admin.get(url)).json() | {"days": 0} == {
        "stored": False, "since": None, "days": 0, "requests": 0, "bytes": 0, "object": "stored_texts",
    }  # fmt: skip
    for role in Role:
        browser = await with_csrf(await portal.signed_in(role))
        for method, body in (("PUT", {"days": 7}), ("DELETE", None)):
            answer = await browser.client.request(method, url, json=body)
            assert answer.status_code == (200 if role in (Role.OWNER, Role.ADMIN) else 403), (role, method)
    assert (await admin.put(url, json={"days": 366})).status_code == 400
    assert (await admin.put(url, json={"days": 5})).json()["days"] == 5
    since = (await admin.get(url)).json()["since"]
    again = (await admin.put(url, json={"days": 6})).json()  # other days: what is stored stays
    assert (again["since"], again["days"], again["stored"]) == (since, 6, True)
    acts = (await admin.get(f"{here(portal)}/audit?action=texts_stored")).json()["data"]
    assert [act["detail"]["days"] for act in acts][:2] == [6, 5]


async def test_readers_read_the_talk_and_nobody_else_does(
    portal: PortalRig, admin: httpx.AsyncClient, operator: httpx.AsyncClient
) -> None:
    await admin.put(f"{here(portal)}/stored_texts", json={})
    rid = await talked(portal)
    url, page = f"{here(portal)}/requests/{rid}/texts", f"/portal/requests/{rid}"
    theirs = await portal.rig.tenants.create_organisation("Others")
    assert SECRET in (await admin.get(url)).json()["prompt"]
    for role in Role:
        answer = await (browser := await portal.signed_in(role)).get(url)
        assert answer.status_code == (200 if role in READERS else 403), role
        shown = (await browser.get(f"{page}?org={portal.rig.org.id}")).text
        assert (SECRET in shown) == (role in READERS), role
        assert EVIL not in shown
        if role in READERS:
            assert answer.json()["answers"][0]["message"]["content"] == f"teapot{EVIL}"
            assert "teapot&lt;script&gt;" in shown
    stranger = await portal.signed_in(Role.OWNER, tenant=theirs.id)
    outside = (
        (operator, url, 403),
        (portal.rig.client, url, 403),  # a key for models
        (stranger.client, url, 404),
        (stranger.client, f"/admin/v1/organisations/{theirs.id}/requests/{rid}/texts", 404),
        (stranger.client, page, 404),
        (portal.browser().client, url, 401),
        (portal.rig.client, f"/v1/requests/{rid}", 200),
        (await portal_key(portal), f"/v1/requests/{rid}", 200),
    )
    deleted = await stranger.post(f"/portal/requests/{rid}/texts/delete", form="/portal/texts")
    assert deleted.status_code == 404
    for client, path, status in outside:
        answer = await client.get(path)
        assert answer.status_code == status, path
        assert SECRET not in answer.text, path
        assert "teapot" not in answer.text, path


async def portal_key(portal: PortalRig) -> httpx.AsyncClient:
    from admin_rig import admin_client

    return await admin_client(portal, fleet=False)


async def test_an_operator_who_is_a_member_reads_as_a_member(portal: PortalRig, admin: httpx.AsyncClient) -> None:
    await admin.put(f"{here(portal)}/stored_texts", json={})
    rid = await talked(portal)
    operator = await portal.signed_in(Role.OPERATOR, email="op@example.org")
    url = f"{here(portal)}/requests/{rid}/texts"
    assert (await operator.get(url)).status_code == 403
    who = await portal.portal.people.find_by_email("op@example.org")
    assert who is not None
    async with portal.rig.gateway.engine.begin() as db:
        await add_member(db, portal.rig.org.id, who.id, Role.DEVELOPER, actor="test")
    assert SECRET in (await operator.get(url)).text
    assert SECRET in (await operator.get(f"/portal/requests/{rid}?org={portal.rig.org.id}")).text
    assert (await operator.get("/admin/v1/workers")).status_code == 200  # and stays an operator


async def test_the_pages_turn_it_on_delete_one_and_turn_it_off(portal: PortalRig) -> None:
    owner = await portal.signed_in(Role.OWNER)
    text = (await owner.get("/portal/texts")).text
    assert "No prompt and no answer is stored" in text
    assert "not stored" in (await owner.get("/portal/requests")).text
    for days in ("0", "1e9", "", "-3", "366"):
        assert (await owner.post("/portal/texts", {"days": days})).status_code == 400, days
    assert (await owner.post("/portal/texts", {"days": "14"})).status_code == 303
    assert "14 days" in (await owner.get("/portal/texts")).text
    first, second = await talked(portal), await talked(portal)
    assert SECRET in (await owner.get(f"/portal/requests/{first}")).text
    developer = await portal.signed_in(Role.DEVELOPER)
    path = f"/portal/requests/{first}/texts/delete"
    assert (await developer.post(path, form="/portal/texts")).status_code == 403
    assert (await owner.post(path, form="/portal/texts")).status_code == 303
    assert "Nothing is stored of this request" in (await owner.get(f"/portal/requests/{first}")).text
    assert (await owner.post("/portal/texts/off", form="/portal/texts")).status_code == 303
    for rid in (first, second):
        assert SECRET not in (await owner.get(f"/portal/requests/{rid}")).text


@pytest.mark.parametrize("path", ["/portal/texts", "/portal/texts/off"])
async def test_a_forged_form_decides_nothing(portal: PortalRig, path: str) -> None:
    owner: Browser = await portal.signed_in(Role.OWNER)
    answer: Any = await owner.client.post(path, data={"days": "30", "csrf": "guessed"})
    assert answer.status_code == 403
    assert "No prompt and no answer is stored" in (await owner.get("/portal/texts")).text
