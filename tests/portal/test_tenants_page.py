"""The operators' page of tenants: made, suspended, resumed."""

import re

from portal_rig import PASSWORD, Browser, PortalRig

from gateway.portal.roles import Role
from tests.gateway.gateway_rig import eventually

PAGE = "/portal/fleet/tenants"


async def test_an_operator_makes_an_organisation_whose_owner_comes_in_by_the_link(portal: PortalRig) -> None:
    operator: Browser = await portal.signed_in(Role.OPERATOR)
    bad = await operator.post(PAGE, {"name": "New <b>one</b>", "email": "nobody"})
    assert (bad.status_code, "This is no e-mail address" in bad.text) == (400, True)
    assert 'value="New &lt;b&gt;one&lt;/b&gt;"' in bad.text
    made = await operator.post(PAGE, {"name": "New <b>one</b>", "email": "boss@example.org"})
    found = re.search(r'<pre id="link"[^>]*>https?://[^/]+(/portal/invite/[^<]+)<', made.text)
    assert found is not None, made.text[:2000]
    assert found[1] not in (await operator.get(PAGE)).text  # shown once
    owner = portal.browser()
    assert (await owner.post(found[1], {"password": PASSWORD})).status_code == 303
    page = (await owner.get("/portal/keys")).text
    assert "New &lt;b&gt;one&lt;/b&gt;" in page
    assert "Default" in page
    assert (await operator.post(PAGE, {"name": "Without an owner"})).status_code == 303


async def test_a_suspended_organisation_is_refused_until_it_is_resumed(portal: PortalRig) -> None:
    operator: Browser = await portal.signed_in(Role.OPERATOR)
    url, client = f"{PAGE}/{portal.rig.org.id}/hold", portal.rig.client
    assert (await client.get("/v1/models")).status_code == 200

    async def answers(status: int) -> bool:
        return (await client.get("/v1/models")).status_code == status

    assert (await operator.post(url, {"on": "1"}, form=PAGE)).status_code == 303
    await eventually(lambda: answers(403))
    assert f"Resume {portal.rig.org.name}" in (await operator.get(PAGE)).text
    assert (await operator.post(url, {"on": ""}, form=PAGE)).status_code == 303
    await eventually(lambda: answers(200))
    assert (await operator.post(f"{PAGE}/org_none/hold", {"on": "1"}, form=PAGE)).status_code == 404


async def test_the_organisation_that_runs_the_fleet_is_not_suspended(portal: PortalRig) -> None:
    own = await portal.rig.tenants.create_organisation("Operators", runs_fleet=True)
    operator: Browser = await portal.signed_in(Role.OPERATOR)
    assert f"{PAGE}/{own.id}/hold" not in (await operator.get(PAGE)).text
    assert (await operator.post(f"{PAGE}/{own.id}/hold", {"on": "1"}, form=PAGE)).status_code == 404


async def test_members_make_and_suspend_nothing(portal: PortalRig) -> None:
    owner: Browser = await portal.signed_in(Role.OWNER)
    for path in (PAGE, f"{PAGE}/{portal.rig.org.id}/hold"):
        assert (await owner.post(path, {"name": "x", "on": "1"}, form="/portal")).status_code == 403
