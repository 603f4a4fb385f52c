"""Links to pages of an organisation, passed on to somebody who belongs to several; pages left open in other tabs."""

from portal_rig import PortalRig

from gateway.portal.people import add_member
from gateway.portal.roles import Role

EMAIL = "ada@example.org"


async def two_places(portal: PortalRig) -> str:
    """Make Ada an owner of the rig's organisation and of another one; return the other's id."""
    other = await portal.rig.tenants.create_organisation("Zebra")
    await portal.rig.tenants.create_project(other.id, "Of the zebra")
    who = await portal.person(EMAIL, Role.OWNER)
    async with portal.rig.gateway.engine.begin() as db:
        await add_member(db, other.id, who.id, Role.OWNER, actor="test")
    return other.id


async def test_a_link_to_an_organisation_is_about_it_and_so_are_the_pages_and_forms_after_it(portal: PortalRig) -> None:
    other = await two_places(portal)
    browser = portal.browser()
    await browser.sign_in(EMAIL)
    assert "Of the zebra" not in (await browser.get("/portal/keys")).text
    page = await browser.get(f"/portal/keys?org={other}")
    assert "Of the zebra" in page.text
    assert f'data-org="{other}"' in page.text
    assert "Of the zebra" in (await browser.get("/portal/keys")).text
    assert (await browser.post("/portal/projects", {"name": "Stripes"}, form="/portal/keys")).status_code == 303
    assert "Stripes" in [one.name for one in await portal.rig.tenants.list_projects(other)]


async def test_a_form_of_a_page_about_another_organisation_changes_nothing(portal: PortalRig) -> None:
    other = await two_places(portal)
    browser = portal.browser()
    await browser.sign_in(EMAIL)
    left_open = await browser.csrf("/portal/keys")
    await browser.get(f"/portal?org={other}")  # in another tab
    answer = await browser.client.post("/portal/projects", data={"name": "Lost", "csrf": left_open})
    assert (answer.status_code, "You look at Zebra now" in answer.text) == (403, True)
    for tenant in (other, portal.rig.org.id):
        assert "Lost" not in [one.name for one in await portal.rig.tenants.list_projects(tenant)]
    back = {"organisation": portal.rig.org.id, "csrf": left_open}  # leaving is possible from there
    assert (await browser.client.post("/portal/organisation", data=back)).status_code == 303
    answer = await browser.client.post("/portal/projects", data={"name": "Found", "csrf": left_open})
    assert answer.status_code == 303


async def test_a_link_to_an_organisation_of_others_leads_nowhere(portal: PortalRig) -> None:
    theirs = await portal.rig.tenants.create_organisation("Theirs")
    browser = await portal.signed_in(Role.OWNER)
    assert (await browser.get(f"/portal?org={theirs.id}")).status_code == 403
    assert f'data-org="{portal.rig.org.id}"' in (await browser.get("/portal")).text
