"""One-time codes: set up, asked for, used once, guessed in vain, lost, and required by an organisation."""

import asyncio
import html
import re

import httpx
import pyotp
import pytest
import sqlalchemy as sa
from portal_rig import PASSWORD, Browser, PortalRig

from gateway.people_tables import recovery_code
from gateway.portal.passwords import TRIES_OF_CODE
from gateway.portal.people import Person
from gateway.portal.roles import Role
from gateway.portal.sessions import OPENID

SET_UP = "/portal/account/second-factor"
CODE = "/portal/login/code"
EMAIL = "ada@example.org"


class Phone:
    """An authenticator app, with a clock that the test moves."""

    def __init__(self, portal: PortalRig) -> None:
        self.now_s = 1_800_000_000.0
        self.secret = ""
        portal.portal.factors._now_s = lambda: self.now_s

    def code(self, *, periods: int = 0) -> str:
        """What it shows, now or so many periods of 30 s later."""
        return pyotp.TOTP(self.secret).generate_otp(int(self.now_s) // 30 + periods)

    def wait(self) -> "Phone":
        self.now_s += 30
        return self


@pytest.fixture
async def phone(portal: PortalRig) -> Phone:
    return Phone(portal)


async def set_up(browser: Browser, phone: Phone) -> list[str]:
    """Set a second factor up, and return the recovery codes."""
    shown = await browser.post(SET_UP, {"password": PASSWORD}, form="/portal/account")
    assert shown.status_code == 200, shown.text
    found = re.search(r'id="totp-secret">([^<]+)<', shown.text)
    assert found is not None
    phone.secret = found[1].replace(" ", "")
    done = await browser.post(f"{SET_UP}/confirm", {"code": phone.code()}, form="/portal/account")
    assert done.status_code == 200, done.text
    codes = re.search(r'<pre id="codes"[^>]*>([^<]+)<', done.text)
    assert codes is not None
    return html.unescape(codes[1]).split()


async def waiting(portal: PortalRig) -> Browser:
    """A browser that gave the right password and is asked for the code."""
    browser = portal.browser()
    answer = await browser.sign_in(EMAIL, next="/portal/usage")
    assert (answer.status_code, answer.headers["location"]) == (303, CODE)
    return browser


async def enrolled(portal: PortalRig, phone: Phone, role: Role = Role.OWNER) -> tuple[Browser, list[str]]:
    browser = await portal.signed_in(role, email=EMAIL)
    return browser, await set_up(browser, phone)


async def test_a_right_password_alone_opens_nothing_and_a_code_does(portal: PortalRig, phone: Phone) -> None:
    _, codes = await enrolled(portal, phone)
    assert len(set(codes)) == 10
    browser = await waiting(portal)
    assert browser.session == ""
    assert (await browser.get("/portal")).headers["location"].startswith("/portal/login")
    wrong = await browser.post(CODE, {"code": "000000" if phone.code(periods=1) != "000000" else "111111"})
    assert wrong.status_code == 401
    right = await browser.post(CODE, {"code": phone.wait().code()})
    assert (right.status_code, right.headers["location"]) == (303, "/portal/usage")
    assert (await browser.get("/portal/usage")).status_code == 200
    assert (await browser.get(CODE)).headers["location"] == "/portal/login"  # the step is used up


async def test_no_code_works_twice_nor_one_that_is_older(portal: PortalRig, phone: Phone) -> None:
    await enrolled(portal, phone)
    used = phone.code()  # of the set-up
    assert (await (await waiting(portal)).post(CODE, {"code": used})).status_code == 401
    assert (await (await waiting(portal)).post(CODE, {"code": phone.code(periods=1)})).status_code == 303
    for periods in (1, 0, -1):
        assert (await (await waiting(portal)).post(CODE, {"code": phone.code(periods=periods)})).status_code == 401


async def test_two_that_come_at_once_with_one_code_are_one(portal: PortalRig, phone: Phone) -> None:
    await enrolled(portal, phone)
    browsers = [await waiting(portal) for _ in range(2)]
    forms = [{"csrf": await browser.csrf(CODE), "code": phone.code(periods=1)} for browser in browsers]
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(browser.client.post(CODE, data=form))
            for browser, form in zip(browsers, forms, strict=True)
        ]
    assert sorted(one.result().status_code for one in asked) == [303, 401]


async def test_a_clock_that_is_half_a_minute_off_is_let_in_and_a_whole_one_not(portal: PortalRig, phone: Phone) -> None:
    await enrolled(portal, phone)
    phone.now_s += 300
    assert (await (await waiting(portal)).post(CODE, {"code": phone.code(periods=2)})).status_code == 401
    assert (await (await waiting(portal)).post(CODE, {"code": phone.code(periods=-2)})).status_code == 401
    assert (await (await waiting(portal)).post(CODE, {"code": phone.code(periods=-1)})).status_code == 303


async def test_guessing_ends_after_five_codes_from_wherever_and_the_right_one_does_not_help_then(
    portal: PortalRig, phone: Phone
) -> None:
    await enrolled(portal, phone)
    phone.wait()
    wrong = next(one for one in ("123456", "654321", "111111", "222222") if one not in _near(phone))
    statuses = [(await (await waiting(portal)).post(CODE, {"code": wrong})).status_code for _ in range(TRIES_OF_CODE)]
    assert statuses == [401] * TRIES_OF_CODE
    late = await (await waiting(portal)).post(CODE, {"code": phone.code()})
    assert late.status_code == 429
    assert 0 < int(late.headers["retry-after"]) <= 900


def _near(phone: Phone) -> set[str]:
    return {phone.code(periods=periods) for periods in (-1, 0, 1)}


async def test_a_recovery_code_works_once_and_is_stored_as_a_hash(portal: PortalRig, phone: Phone) -> None:
    _, codes = await enrolled(portal, phone)
    async with portal.rig.gateway.engine.begin() as db:
        stored = (await db.execute(sa.select(recovery_code.c.code_hash))).scalars().all()
    assert len(stored) == 10
    plain = [code.encode() for code in codes] + [code.replace("-", "").encode() for code in codes]
    assert not any(code in bytes(row) for code in plain for row in stored)
    typed = codes[0].replace("-", " ").upper()
    first = await (await waiting(portal)).post(CODE, {"code": typed})
    assert (first.status_code, first.headers["location"]) == (303, "/portal/account")  # where new ones are made
    assert (await (await waiting(portal)).post(CODE, {"code": codes[0]})).status_code == 401
    assert (await (await waiting(portal)).post(CODE, {"code": codes[1]})).status_code == 303


async def test_new_recovery_codes_want_a_code_and_replace_the_old(portal: PortalRig, phone: Phone) -> None:
    browser, old = await enrolled(portal, phone)
    refused = await browser.post(f"{SET_UP}/codes", {"code": "abc"}, form="/portal/account")
    assert refused.status_code == 401
    shown = await browser.post(f"{SET_UP}/codes", {"code": phone.wait().code()}, form="/portal/account")
    assert shown.status_code == 200
    assert old[0] not in shown.text
    assert old[0] not in (await browser.get("/portal/account")).text
    assert (await (await waiting(portal)).post(CODE, {"code": old[0]})).status_code == 401


async def test_turning_it_off_wants_password_and_code(portal: PortalRig, phone: Phone) -> None:
    browser, _ = await enrolled(portal, phone)
    for form in (
        {"password": "another one", "code": phone.code(periods=1)},
        {"password": PASSWORD, "code": "12345"},
        {"code": phone.code(periods=1)},
    ):
        assert (await browser.post(f"{SET_UP}/off", form, form="/portal/account")).status_code == 401
    done = {"password": PASSWORD, "code": phone.code(periods=1)}
    assert (await browser.post(f"{SET_UP}/off", done, form="/portal/account")).status_code == 303
    assert (await portal.browser().sign_in(EMAIL)).headers["location"] == "/portal"


async def test_setting_it_up_wants_the_password_and_a_code_and_ends_the_other_sessions(
    portal: PortalRig, phone: Phone
) -> None:
    browser = await portal.signed_in(Role.VIEWER, email=EMAIL)
    other = portal.browser()
    await other.sign_in(EMAIL)
    wrong = await browser.post(SET_UP, {"password": "not the password"}, form="/portal/account")
    assert wrong.status_code == 401
    shown = await browser.post(SET_UP, {"password": PASSWORD}, form="/portal/account")
    assert "<svg" in shown.text
    assert (await portal.browser().sign_in(EMAIL)).headers["location"] == "/portal"  # nothing is in force yet
    unsure = await browser.post(f"{SET_UP}/confirm", {"code": "abcdef"}, form="/portal/account")
    assert unsure.status_code == 401
    assert "<svg" in unsure.text  # and can be tried again
    await set_up(browser, phone)
    assert (await other.get("/portal")).status_code == 303
    assert (await browser.get("/portal")).status_code == 200
    again = await browser.post(SET_UP, {"password": PASSWORD}, form="/portal/account")
    assert again.status_code == 409  # what is in force is not replaced by who found a browser


async def test_neither_a_reset_nor_an_operators_link_goes_around_it(portal: PortalRig, phone: Phone) -> None:
    _, _ = await enrolled(portal, phone, Role.OPERATOR)
    who = await _person(portal)
    links = portal.portal.links
    for _, token in (await links.reset(None, who.id, actor="test"), await links.sign_in(who.id, actor="test")):
        browser = portal.browser()
        used = await browser.post(f"/portal/invite/{token}", {"password": PASSWORD})
        assert (used.status_code, used.headers["location"]) == (303, CODE)
        assert (await browser.get("/portal")).status_code == 303
        assert (await browser.post(CODE, {"code": phone.wait().code()})).status_code == 303
        assert (await browser.get("/portal")).status_code == 200


async def test_an_organisation_that_requires_it_lets_nobody_in_with_a_password_alone(
    portal: PortalRig, phone: Phone
) -> None:
    owner = await portal.signed_in(Role.OWNER)
    developer = await portal.signed_in(Role.DEVELOPER, email=EMAIL)
    members = "/portal/members"
    assert (await developer.post(f"{members}/second-factor", {"on": "1"}, form=members)).status_code == 403
    assert (await owner.post(f"{members}/second-factor", {"on": "1"}, form=members)).status_code == 303
    for page in ("/portal", "/portal/keys", "/portal/playground"):
        sent = await developer.get(page)
        assert (sent.status_code, sent.headers["location"]) == (303, "/portal/account")
    api = f"/admin/v1/organisations/{portal.rig.org.id}/projects"
    refused = await developer.get(api)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "second_factor_needed")
    asked = await developer.get("/portal/account")
    assert "asks for a second factor" in asked.text
    await set_up(developer, phone)
    assert (await developer.get("/portal/keys")).status_code == 200
    assert (await developer.get(api)).status_code == 200
    assert (await portal.rig.client.get("/v1/models")).status_code == 200  # keys are not people


async def test_who_comes_from_a_provider_is_not_asked(portal: PortalRig) -> None:
    who = await portal.person(EMAIL, Role.VIEWER)
    await portal.portal.factors.need(portal.rig.org.id, on=True, actor="test")
    browser = portal.browser()
    browser.cookies["pdgate_session"] = await portal.portal.sessions.begin(who.id, how=OPENID)
    assert (await browser.get("/portal/usage")).status_code == 200
    browser.cookies["pdgate_session"] = await portal.portal.sessions.begin(who.id, how="password")
    assert (await browser.get("/portal/usage")).status_code == 303


async def test_only_an_operator_takes_it_away_from_others_and_that_is_recorded(
    portal: PortalRig, phone: Phone, admin: httpx.AsyncClient, operator: httpx.AsyncClient
) -> None:
    browser, _ = await enrolled(portal, phone, Role.DEVELOPER)
    who = await _person(portal)
    path = f"/admin/v1/organisations/{portal.rig.org.id}/members/{who.id}/second_factor"
    shown = (await admin.get(f"/admin/v1/organisations/{portal.rig.org.id}/members")).json()["data"]
    assert [(one["email"], one["second_factor"]) for one in shown] == [(EMAIL, True)]
    assert (await admin.delete(path)).status_code == 403
    assert (await operator.delete(path)).json() == {"id": who.id, "object": "second_factor", "deleted": True}
    assert (await browser.get("/portal")).status_code == 303  # signed out everywhere
    assert (await portal.browser().sign_in(EMAIL)).headers["location"] == "/portal"
    found = (await operator.get("/admin/v1/audit", params={"subject": who.id})).json()["data"]
    changes = [(one["action"], one["actor"]) for one in found if "factor" in one["action"]]
    assert [action for action, _ in changes] == ["second_factor_removed", "second_factor_set"]
    assert changes[0][1].startswith("key_")
    assert changes[1][1] == who.id


async def test_the_owner_requires_it_by_the_api_and_an_admin_key_does_not(
    portal: PortalRig, admin: httpx.AsyncClient, operator: httpx.AsyncClient
) -> None:
    path = f"/admin/v1/organisations/{portal.rig.org.id}"
    assert (await admin.patch(path, json={"needs_second_factor": True})).status_code == 403
    changed = await operator.patch(path, json={"needs_second_factor": True})
    assert changed.json()["needs_second_factor"]
    owner = await portal.signed_in(Role.OWNER)
    assert (await owner.get("/portal")).headers["location"] == "/portal/account"


async def test_an_invited_member_stays_signed_in_when_an_invite_is_accepted(portal: PortalRig, phone: Phone) -> None:
    browser, _ = await enrolled(portal, phone)
    other = await portal.rig.tenants.create_organisation("Other")
    _, token = await portal.portal.links.invite(other.id, EMAIL, Role.VIEWER, actor="test")
    before = browser.session
    joined = await browser.post(f"/portal/invite/{token}")
    assert (joined.status_code, joined.headers["location"]) == (303, "/portal")
    assert browser.session == before


async def _person(portal: PortalRig) -> Person:
    found = await portal.portal.people.find_by_email(EMAIL)
    assert found is not None
    return found
