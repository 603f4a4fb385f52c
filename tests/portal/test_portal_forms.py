"""Every form of the portal: who may send it, that nobody sends it from elsewhere, and whose things it reaches."""

from typing import Any, Final

from admin_rig import furnished
from portal_rig import PortalRig

from gateway.app import _views
from gateway.portal.roles import RIGHTS, Right, Role

FORMS: Final = {
    "/portal/projects": Right.PROJECTS,
    "/portal/keys": Right.KEYS,
    "/portal/keys/{key_id:str}/rotate": Right.KEYS,
    "/portal/keys/{key_id:str}/revoke": Right.KEYS,
    "/portal/playground/chat": Right.PLAY,
    "/portal/limits": Right.PROJECTS,
    "/portal/budgets": Right.MONEY,
    "/portal/budgets/remove": Right.MONEY,
    "/portal/webhooks": Right.MONEY,
    "/portal/members": Right.MEMBERS,
    "/portal/members/{person_id:str}/role": Right.MEMBERS,
    "/portal/members/{person_id:str}/remove": Right.MEMBERS,
    "/portal/members/{person_id:str}/reset": Right.MEMBERS,
    "/portal/members/invites/{link_id:str}/withdraw": Right.MEMBERS,
    "/portal/service-accounts": Right.MEMBERS,
    "/portal/service-accounts/{account_id:str}/remove": Right.MEMBERS,
    "/portal/members/second-factor": Right.OWNERS,
    "/portal/members/{person_id:str}/second-factor-off": Right.FLEET,
    "/portal/fleet/workers/{worker:str}/order": Right.FLEET,
    "/portal/fleet/steering": Right.FLEET,
    "/portal/fleet/models/hold": Right.FLEET,
    "/portal/fleet/models": Right.FLEET,
    "/portal/fleet/models/{model:str}/remove": Right.FLEET,
    "/portal/fleet/tenants": Right.FLEET,
    "/portal/fleet/tenants/{tenant:str}/hold": Right.FLEET,
    "/portal/texts": Right.STORAGE,
    "/portal/texts/off": Right.STORAGE,
    "/portal/requests/{rid:str}/texts/delete": Right.STORAGE,
}
ONES_OWN: Final = {
    "/portal/account/profile",
    "/portal/account/password",
    "/portal/account/second-factor",
    "/portal/account/second-factor/confirm",
    "/portal/account/second-factor/codes",
    "/portal/account/second-factor/off",
}


def _posted(portal: PortalRig) -> set[str]:
    nobody: Any = None
    return {path for one in _views(portal.rig.gateway, nobody) for path in one.paths if "POST" in one.http_methods}


async def _filled(portal: PortalRig, path: str, theirs: dict[str, str]) -> str:
    for name, value in (
        ("key_id", theirs["key"]),
        ("person_id", theirs["person"]),
        ("link_id", theirs["invite"]),
        ("account_id", theirs["account"]),
        ("worker", "prefill-0"),
        ("model", "tiny"),
        ("tenant", theirs["organisation"]),
        ("rid", theirs["request_id"]),
    ):
        path = path.replace(f"{{{name}:str}}", value)
    assert "{" not in path, path
    return f"{path}?key={theirs['key']}" if path.endswith("/chat") else path


def _fields(theirs: dict[str, str]) -> dict[str, str]:
    """What any form may hold, all of it another organisation's."""
    scope = f"project:{theirs['project']}"
    return {"name": "x", "project": theirs["project"], "scope": scope, "of": scope, "role": "viewer", "amount": "1"}


async def test_every_form_is_known_here(portal: PortalRig) -> None:
    """A new form is written into one of the tables above, and is walked from then on."""
    assert _posted(portal) == set(FORMS) | ONES_OWN


async def test_a_form_is_refused_to_every_role_without_its_right_and_to_all_from_another_site(
    portal: PortalRig,
) -> None:
    theirs = await furnished(portal)
    fields = _fields({**theirs, "project": portal.rig.project.id})
    for role in Role:
        browser = await portal.signed_in(role)
        csrf = await browser.csrf("/portal")
        for path, right in FORMS.items():
            filled = await _filled(portal, path, theirs)
            sent: list[dict[str, Any]] = []
            if role is Role.OPERATOR:  # who may send them all
                sent = [
                    {"data": fields},
                    {"data": {**fields, "csrf": "made up"}},
                    {"data": {**fields, "csrf": csrf}, "headers": {"origin": "https://evil.example"}},
                ]
            elif right not in RIGHTS[role]:
                sent = [{"data": {**fields, "csrf": csrf}, "headers": {"x-csrf-token": csrf}}]
            for one in sent:
                answer = await browser.client.post(filled, **one)
                assert answer.status_code == 403, (role, path, one, answer.text[:500])


async def test_no_form_of_an_owner_reaches_another_organisations_things(portal: PortalRig) -> None:
    theirs = await furnished(portal)
    browser = await portal.signed_in(Role.OWNER)
    headers = {"x-csrf-token": await browser.csrf("/portal")}
    mine = {
        "/portal/projects",
        "/portal/members",
        "/portal/members/second-factor",
        "/portal/webhooks",
        "/portal/texts/off",
    }
    for path in sorted(set(FORMS) - mine):
        filled = await _filled(portal, path, theirs)
        answer = await browser.client.post(filled, data=_fields(theirs), headers=headers)
        assert answer.status_code in (400, 401, 403, 404), (path, answer.text[:500])
        assert theirs["secret_name"] not in answer.text, path
    keys = await portal.rig.tenants.list_keys(theirs["organisation"])
    assert [(key.id, key.state) for key in keys] == [(theirs["key"], "active")]
    members = await portal.portal.people.members(theirs["organisation"])
    assert [(one.person.id, one.role) for one in members] == [(theirs["person"], Role.OWNER)]
    assert [one.state for one in await portal.portal.links.list_invites(theirs["organisation"])] == ["open"]


async def test_no_page_of_an_owner_shows_another_organisations_things(portal: PortalRig) -> None:
    theirs = await furnished(portal)
    browser = await portal.signed_in(Role.OWNER)
    nobody: Any = None
    walked = 0
    for handler in _views(portal.rig.gateway, nobody):
        for path in handler.paths if "GET" in handler.http_methods else ():
            filled = path
            for name, value in (("rid", theirs["invoice"]), ("invoice_id", theirs["invoice"]), ("kind", "pdf")):
                filled = filled.replace(f"{{{name}:str}}", value)
            assert "{" not in filled, filled
            for query in ({}, {"org": theirs["organisation"]}, {"project": theirs["project"], "key": theirs["key"]}):
                answer = await browser.get(filled, params=query)
                walked += 1
                assert answer.status_code < 500, (filled, query, answer.text[:500])
                assert theirs["secret_name"] not in answer.text, (filled, query)
                if "org" in query and filled != "/portal/account":
                    assert answer.status_code == 403, (filled, answer.status_code)
    assert walked >= 60
