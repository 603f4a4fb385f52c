"""What the pages of members and keys add: service accounts, links for new passwords, and hands off admins' keys."""

import re

from portal_rig import PASSWORD, PortalRig

from gateway.portal.people import add_member
from gateway.portal.roles import Role
from tests.gateway.gateway_rig import eventually

MEMBERS, KEYS = "/portal/members", "/portal/keys"


async def test_a_service_account_owns_a_key_which_ends_with_it(portal: PortalRig) -> None:
    rig = portal.rig
    admin = await portal.signed_in(Role.ADMIN)
    made = {"name": "indexer", "project": rig.project.id}
    assert (await admin.post("/portal/service-accounts", made, form=MEMBERS)).status_code == 303
    (account,) = await rig.gateway.admin.accounts.list(rig.org.id)
    assert account.id in (await admin.get(KEYS)).text
    shown = await admin.post(KEYS, {"name": "k", "project": rig.project.id, "owner": account.id})
    secret = re.search(r'<pre id="secret"[^>]*>(pdg_[^<]+)<', shown.text)
    assert secret is not None
    headers = {"authorization": f"Bearer {secret[1]}"}
    assert (await rig.client.get("/v1/models", headers=headers)).status_code == 200
    assert "of indexer" in (await admin.get(KEYS)).text
    stranger = {"name": "k", "project": rig.project.id, "owner": "sa_of_others"}
    assert (await admin.post(KEYS, stranger)).status_code == 404
    remove = f"/portal/service-accounts/{account.id}/remove"
    assert (await admin.post(remove, form=MEMBERS)).status_code == 303

    async def refused() -> bool:
        return (await rig.client.get("/v1/models", headers=headers)).status_code == 401

    await eventually(refused)
    assert (await admin.post(remove, form=MEMBERS)).status_code == 404


async def test_a_developer_neither_gets_the_secret_of_an_admins_key_nor_ends_or_binds_it(portal: PortalRig) -> None:
    rig = portal.rig
    key, _ = await rig.tenants.create_key(rig.org.id, rig.project.id, "root", is_admin=True)
    developer, owner = await portal.signed_in(Role.DEVELOPER), await portal.signed_in(Role.OWNER)
    for verb in ("rotate", "revoke"):
        answer = await developer.post(f"{KEYS}/{key.id}/{verb}", form=KEYS)
        assert (answer.status_code, "pdg_" in answer.text) == (403, False), verb
        assert f"{key.id}/{verb}" not in (await developer.get(KEYS)).text
    bound = await developer.post("/portal/limits", {"of": f"key:{key.id}", "requests_per_minute": "0"})
    assert bound.status_code == 403
    found = await rig.tenants.find_key(rig.org.id, key.id)
    assert found is not None
    assert (found.version, found.state) == (key.version, "active")
    assert (await owner.post(f"{KEYS}/{key.id}/rotate", form=KEYS)).status_code == 200


async def test_an_admin_makes_a_link_for_a_members_new_password_but_not_for_who_belongs_elsewhere_too(
    portal: PortalRig,
) -> None:
    admin = await portal.signed_in(Role.ADMIN)
    who = await portal.person("ada@example.org", Role.VIEWER)
    shown = await admin.post(f"{MEMBERS}/{who.id}/reset", form=MEMBERS)
    found = re.search(r'<pre id="link"[^>]*>https?://[^/]+(/portal/invite/[^<]+)<', shown.text)
    assert found is not None, shown.text[:1000]
    person = portal.browser()
    assert (await person.post(found[1], {"password": "another long password"})).status_code == 303
    assert (await portal.browser().sign_in("ada@example.org", PASSWORD)).status_code == 401
    other = await portal.rig.tenants.create_organisation("Others")
    async with portal.rig.gateway.engine.begin() as db:
        await add_member(db, other.id, who.id, Role.VIEWER, actor="test")
    refused = await admin.post(f"{MEMBERS}/{who.id}/reset", form=MEMBERS)
    assert (refused.status_code, "/portal/invite/" in refused.text) == (403, False)
    owner = await portal.person("boss@example.org", Role.OWNER)
    assert (await admin.post(f"{MEMBERS}/{owner.id}/reset", form=MEMBERS)).status_code == 403
