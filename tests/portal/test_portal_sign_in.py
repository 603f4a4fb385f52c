"""Signing in and out, links that work once, and what does not get in."""

import hashlib

import httpx
import pytest
from portal_rig import PASSWORD, PortalRig
from redis.asyncio import Redis

from contracts import keys
from gateway.portal.door import safe_next
from gateway.portal.passwords import TRIES_OF_ACCOUNT_FROM_ADDRESS
from gateway.portal.people import LastOwner
from gateway.portal.roles import Role
from gateway.portal.sessions import Sessions
from gateway.portal.transport import is_local
from tests.gateway.gateway_rig import eventually


async def test_a_person_signs_in_and_out_again(portal: PortalRig) -> None:
    await portal.person("ada@example.org", Role.OWNER)
    browser = portal.browser()
    first = await browser.get("/portal")
    assert first.status_code == 303
    assert first.headers["location"] == "/portal/login?next=/portal"

    answer = await browser.sign_in("Ada@Example.org")
    assert (answer.status_code, answer.headers["location"]) == (303, "/portal")
    page = await browser.get("/portal")
    assert page.status_code == 200
    assert "ada@example.org" in page.text

    assert (await browser.post("/portal/logout", form="/portal")).status_code == 303
    assert (await browser.get("/portal")).status_code == 303


async def test_a_wrong_password_and_an_unknown_address_are_told_the_same(portal: PortalRig) -> None:
    await portal.person("ada@example.org", Role.OWNER)
    wrong = await portal.browser().sign_in("ada@example.org", "something else")
    unknown = await portal.browser().sign_in("eve@example.org", "something else")
    assert wrong.status_code == unknown.status_code == 401
    for answer in (wrong, unknown):
        assert "E-mail or password is wrong." in answer.text


async def test_the_session_cookie_is_http_only_secure_and_lax(portal: PortalRig) -> None:
    await portal.person("ada@example.org", Role.OWNER)
    answer = await portal.browser().sign_in("ada@example.org")
    cookie = next(line for line in answer.headers.get_list("set-cookie") if line.startswith("pdgate_session="))
    assert {"httponly", "secure", "samesite=lax", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}


async def test_a_session_that_somebody_planted_is_worth_nothing_after_the_sign_in(portal: PortalRig) -> None:
    await portal.person("ada@example.org", Role.OWNER)
    mallory = await portal.signed_in(Role.VIEWER)
    victim = portal.browser()
    victim.cookies |= {"pdgate_session": mallory.session, "pdgate_form": "planted"}
    data = {"csrf": "planted", "email": "ada@example.org", "password": PASSWORD}
    assert (await victim.client.post("/portal/login", data=data)).status_code == 303
    assert victim.session != mallory.session
    assert (await mallory.get("/portal")).status_code == 303  # it ended, so it never became the victim's


async def test_every_sign_in_has_a_new_token(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.OWNER, email="ada@example.org")
    first = browser.session
    other = portal.browser()
    await other.sign_in("ada@example.org")
    assert first
    assert other.session not in ("", first)


async def test_signing_out_everywhere_ends_every_browser(portal: PortalRig) -> None:
    one = await portal.signed_in(Role.OWNER, email="ada@example.org")
    two = portal.browser()
    await two.sign_in("ada@example.org")
    await one.post("/portal/logout", {"everywhere": "1"}, form="/portal")
    assert (await two.get("/portal")).status_code == 303


async def test_a_session_ends_at_its_absolute_end_however_busy(redis: Redis) -> None:
    now_s = 1_000_000.0
    sessions = Sessions(redis, idle_s=100, absolute_s=250, now_s=lambda: now_s)
    token = await sessions.begin("person_1", how="password")
    for _ in range(3):
        found = await sessions.find(token)
        assert found is not None
        left_ms = await redis.pttl(keys.session(hashlib.sha256(token.encode()).hexdigest()))
        assert left_ms <= min(100_000, (1_000_250 - now_s) * 1000)
        now_s += 80
    now_s += 10
    assert await sessions.find(token) is None


async def test_a_session_ends_when_nobody_uses_it(redis: Redis) -> None:
    sessions = Sessions(redis, idle_s=0.05)
    token = await sessions.begin("person_1", how="password")
    name = keys.session(hashlib.sha256(token.encode()).hexdigest())

    async def gone() -> bool:
        return not await redis.exists(name)

    await eventually(gone)
    assert await sessions.find(token) is None


async def test_a_form_without_the_secret_or_from_elsewhere_changes_nothing(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.OWNER)
    without = await browser.client.post("/portal/logout", data={})
    assert without.status_code == 403
    csrf = await browser.csrf("/portal")
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        answer = await browser.client.post("/portal/logout", data={"csrf": csrf}, headers=headers)
        assert answer.status_code == 403
    another = await portal.signed_in(Role.OWNER, email="other@example.org")
    stolen = await another.client.post("/portal/logout", data={"csrf": csrf})
    assert stolen.status_code == 403
    assert (await browser.get("/portal")).status_code == 200
    assert (await another.get("/portal")).status_code == 200
    by_header = await browser.client.post("/portal/logout", data={}, headers={"x-csrf-token": csrf})
    assert by_header.status_code == 303


async def test_signing_in_needs_the_form_of_this_browser(portal: PortalRig) -> None:
    await portal.person("ada@example.org", Role.OWNER)
    data = {"email": "ada@example.org", "password": PASSWORD, "csrf": "made up"}
    assert (await portal.browser().client.post("/portal/login", data=data)).status_code == 403


async def test_guessing_is_stopped_per_address_and_the_right_password_does_not_help_then(portal: PortalRig) -> None:
    await portal.person("ada@example.org", Role.OWNER)
    browser = portal.browser()
    csrf = await browser.csrf()
    statuses = []
    for _ in range(TRIES_OF_ACCOUNT_FROM_ADDRESS + 1):
        data = {"csrf": csrf, "email": "ada@example.org", "password": "guess guess"}
        statuses.append((await browser.client.post("/portal/login", data=data)).status_code)
    assert statuses == [401] * TRIES_OF_ACCOUNT_FROM_ADDRESS + [429]
    right = await browser.sign_in("ada@example.org")
    assert right.status_code == 429
    assert 0 < int(right.headers["retry-after"]) <= 900


@pytest.mark.parametrize(
    "target",
    [
        "https://evil.example",
        "//evil.example",
        "/\\evil.example",
        "/portal/../../evil",
        "/portal\\@evil.example",
        "/portalevil.example",
        "javascript:alert(1)",
        "/portal/\nlocation: x",
        "",
    ],
)
async def test_a_link_to_the_sign_in_page_cannot_send_people_elsewhere(portal: PortalRig, target: str) -> None:
    await portal.person("ada@example.org", Role.OWNER)
    answer = await portal.browser().sign_in("ada@example.org", next=target)
    location = httpx.URL(portal.url).join(answer.headers["location"])
    assert location.host == "127.0.0.1"
    assert location.path.startswith("/portal")


def test_a_page_of_the_portal_is_gone_back_to() -> None:
    assert safe_next("/portal/usage?org=org_1&from=2026-11-01") == "/portal/usage?org=org_1&from=2026-11-01"
    assert safe_next("/portal/login?next=/portal/login") == "/portal"
    assert safe_next(None) == "/portal"


async def test_an_invite_makes_a_member_once(portal: PortalRig) -> None:
    link, token = await portal.portal.links.invite(portal.rig.org.id, "New@Example.org", Role.DEVELOPER, actor="test")
    browser = portal.browser()
    shown = await browser.get(f"/portal/invite/{token}")
    assert "new@example.org" in shown.text  # looking does not use it
    short = await browser.post(f"/portal/invite/{token}", {"password": "short"})
    assert short.status_code == 400
    joined = await browser.post(f"/portal/invite/{token}", {"name": "New", "password": PASSWORD})
    assert joined.status_code == 303
    assert (await browser.get("/portal")).status_code == 200
    assert link.role is Role.DEVELOPER
    assert (await portal.browser().get(f"/portal/invite/{token}")).status_code == 404
    members = await portal.portal.people.members(portal.rig.org.id)
    assert [(member.person.email, member.role) for member in members] == [("new@example.org", Role.DEVELOPER)]


async def test_an_invite_for_somebody_known_asks_to_sign_in_and_opens_no_account(portal: PortalRig) -> None:
    other = await portal.rig.tenants.create_organisation("Other")
    await portal.person("ada@example.org", Role.OWNER)
    _, token = await portal.portal.links.invite(other.id, "ada@example.org", Role.VIEWER, actor="test")
    thief = portal.browser()
    shown = await thief.get(f"/portal/invite/{token}")
    assert shown.headers["location"] == f"/portal/login?next=/portal/invite/{token}"
    csrf = await thief.csrf()
    taken = await thief.client.post(f"/portal/invite/{token}", data={"csrf": csrf, "password": PASSWORD})
    assert taken.status_code == 404
    ada = portal.browser()
    await ada.sign_in("ada@example.org")
    assert (await ada.post(f"/portal/invite/{token}")).status_code == 303
    assert await portal.portal.people.role_of(other.id, (await _person(portal, "ada@example.org"))) is Role.VIEWER


async def test_a_reset_sets_the_password_once_and_ends_all_sessions(portal: PortalRig) -> None:
    ada = await portal.person("ada@example.org", Role.OWNER)
    old = portal.browser()
    await old.sign_in("ada@example.org")
    _, token = await portal.portal.links.reset(portal.rig.org.id, ada.id, actor="test")
    browser = portal.browser()
    assert (await browser.post(f"/portal/invite/{token}", {"password": "another password"})).status_code == 303
    assert (await old.get("/portal")).status_code == 303
    assert (await portal.browser().sign_in("ada@example.org")).status_code == 401
    assert (await portal.browser().sign_in("ada@example.org", "another password")).status_code == 303
    assert (await portal.browser().get(f"/portal/invite/{token}")).status_code == 404


async def test_the_operators_link_signs_in_once_and_a_newer_one_replaces_it(portal: PortalRig) -> None:
    operator = await portal.portal.people.create_operator("operator@localhost", actor="test")
    _, older = await portal.portal.links.sign_in(operator.id, actor="test")
    _, token = await portal.portal.links.sign_in(operator.id, actor="test")
    assert (await portal.browser().get(f"/portal/invite/{older}")).status_code == 404
    browser = portal.browser()
    assert (await browser.post(f"/portal/invite/{token}")).status_code == 303
    assert "operator" in (await browser.get("/portal")).text
    assert (await portal.browser().get(f"/portal/invite/{token}")).status_code == 404


async def test_plain_http_is_refused_but_on_the_machine_itself(portal: PortalRig) -> None:
    browser = portal.browser()
    far = await browser.get("/portal/login", headers={"host": "gateway.example.org"})
    assert far.status_code == 403
    assert "https" in far.text
    assert (await browser.get("/portal/login", headers={"host": "localhost:8080"})).status_code == 200


def test_which_hosts_are_this_machine() -> None:
    for host in ("localhost", "localhost:8080", "a.localhost", "127.0.0.1:1", "[::1]:8080", "[::1]"):
        assert is_local(host), host
    for host in ("example.org", "localhost.example.org", "10.0.0.1:80", "", "127.0.0.1.example.org"):
        assert not is_local(host), host


async def test_every_page_has_strict_headers(portal: PortalRig) -> None:
    for answer in (
        await portal.browser().get("/portal/login"),
        await portal.browser().get("/portal"),
        await portal.browser().get("/portal/invite/none"),
    ):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"


async def test_what_people_write_is_shown_as_text(portal: PortalRig) -> None:
    answer = await portal.browser().sign_in('"><script>alert(1)</script>@x', next='"><script>alert(2)</script>')
    assert "<script>" not in answer.text


async def test_an_organisation_keeps_an_owner(portal: PortalRig) -> None:
    ada = await portal.person("ada@example.org", Role.OWNER)
    with pytest.raises(LastOwner):
        await portal.portal.people.set_role(portal.rig.org.id, ada.id, Role.VIEWER, actor="test")
    with pytest.raises(LastOwner):
        await portal.portal.people.remove(portal.rig.org.id, ada.id, actor="test")


async def _person(portal: PortalRig, email: str) -> str:
    found = await portal.portal.people.find_by_email(email)
    assert found is not None
    return found.id
