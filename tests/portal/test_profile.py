"""What people change of themselves: name, time zone, password."""

import pytest
from portal_rig import PASSWORD, PortalRig

from gateway.portal.roles import Role

ACCOUNT = "/portal/account"
EMAIL = "ada@example.org"
NEW = "another long password"


async def test_a_name_and_a_time_zone_are_on_every_page_after_that(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.VIEWER, email=EMAIL)
    assert "data-zone" not in (await browser.get("/portal")).text
    given = {"name": "Ada <b>Lovelace</b>", "time_zone": "Asia/Tokyo"}
    assert (await browser.post(f"{ACCOUNT}/profile", given, form=ACCOUNT)).status_code == 303
    page = (await browser.get("/portal")).text
    assert 'data-zone="Asia/Tokyo"' in page
    assert "Ada &lt;b&gt;Lovelace&lt;/b&gt;" in page
    assert (await browser.post(f"{ACCOUNT}/profile", {"name": "", "time_zone": ""}, form=ACCOUNT)).status_code == 303
    page = (await browser.get("/portal")).text
    assert "data-zone" not in page
    assert EMAIL in page


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../../etc/passwd", "/etc/localtime", "x" * 200, '"><script>'])
async def test_a_time_zone_that_is_none_is_refused(portal: PortalRig, zone: str) -> None:
    browser = await portal.signed_in(Role.VIEWER, email=EMAIL)
    answer = await browser.post(f"{ACCOUNT}/profile", {"time_zone": zone}, form=ACCOUNT)
    assert answer.status_code == 400
    assert "There is no such time zone" in answer.text
    assert "data-zone" not in (await browser.get("/portal")).text


async def test_a_password_is_changed_with_the_present_one_and_ends_the_other_sessions(portal: PortalRig) -> None:
    here, there = await portal.signed_in(Role.VIEWER, email=EMAIL), portal.browser()
    assert (await there.sign_in(EMAIL)).status_code == 303
    url = f"{ACCOUNT}/password"
    for given, status in (
        ({"password": "not my password", "new_password": NEW}, 401),
        ({"password": PASSWORD, "new_password": "short"}, 400),
        ({"new_password": NEW}, 401),
    ):
        answer = await here.post(url, given, form=ACCOUNT)
        assert (answer.status_code, 'role="alert"' in answer.text) == (status, True), given
    assert (await there.get("/portal")).status_code == 200
    assert (await here.client.post(url, data={"password": PASSWORD, "new_password": NEW})).status_code == 403  # forged
    changed = await here.post(url, {"password": PASSWORD, "new_password": NEW}, form=ACCOUNT)
    assert "Your password is changed" in changed.text
    assert (await here.get("/portal")).status_code == 200
    assert (await there.get("/portal")).status_code == 303
    assert (await there.sign_in(EMAIL)).status_code == 401
    assert (await there.sign_in(EMAIL, NEW)).status_code == 303
