"""The portal's pages without a browser: who sees which, what they hold, and that they hold nobody else's."""

import re

import pytest
from past import play_week

from gateway.portal.figures import change, money, ms, percent, short
from gateway.portal.navigation import MENU
from gateway.portal.people import add_member
from gateway.portal.roles import RIGHTS, Role
from gateway.portal.shelf import Shelf
from gateway.portal.views.charts import OTHERS, by_group
from gateway.portal.views.ranges import range_of
from gateway.portal.views.requests import stages_of
from gateway.schemas.answers import RequestTimings
from tests.portal.portal_rig import PortalRig

PLACES = [place for _, places in MENU for place in places]
NO_BREAK = "\u00a0"


async def play(portal: PortalRig, num_requests: int = 80) -> list[str]:
    """Write a week of the rig's organisation; return the ids of its requests."""
    rig = portal.rig
    owners = [(rig.project.id, rig.key.id)]
    events = await play_week(rig.gateway.engine, rig.redis, org=rig.org.id, owners=owners, num_requests=num_requests)
    return [one.rid for one in events]


async def test_each_role_sees_the_pages_of_its_rights_and_no_others(portal: PortalRig) -> None:
    await play(portal, 30)
    for role in Role:
        browser = await portal.signed_in(role)
        for place in PLACES:
            answer = await browser.get(place.path)
            allowed = place.right in RIGHTS[role]
            assert answer.status_code == (200 if allowed else 403), (role, place.path, answer.text[:2000])
            assert (f'href="{place.path}"' in answer.text) == allowed, (role, place.path)


async def test_who_is_not_signed_in_is_sent_to_the_sign_in_from_every_page(portal: PortalRig) -> None:
    for place in PLACES:
        answer = await portal.browser().get(place.path)
        assert answer.status_code == 303, place.path
        assert answer.headers["location"].startswith("/portal/login?next=/portal")


async def test_no_page_has_a_script_or_style_or_handler_of_its_own(portal: PortalRig) -> None:
    rid = (await play(portal))[0]
    browser = await portal.signed_in(Role.OPERATOR)
    for path in [place.path for place in PLACES] + [f"/portal/requests/{rid}", "/portal/account", "/portal/login"]:
        answer = await browser.get(path)
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<script(?![^>]*\ssrc=)", answer.text), path
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=", answer.text), path
        assert "http://" not in answer.text.replace(portal.url, "").replace("http://www.w3.org/2000/svg", ""), path


async def test_the_first_page_weighs_less_than_300_kb_with_everything_it_loads(portal: PortalRig) -> None:
    await play(portal)
    browser = await portal.signed_in(Role.OWNER)
    page = await browser.get("/portal", headers={"accept-encoding": "identity"})
    weight = len(page.content)
    assets = re.findall(r'(?:src|href)="(/portal/static/[^"]+)"', page.text)
    assert len(assets) >= 3
    for asset in assets:
        answer = await browser.get(asset, headers={"accept-encoding": "gzip"})
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        weight += answer.num_bytes_downloaded
    assert weight < 300_000


async def test_an_organisation_sees_its_own_requests_and_no_others(portal: PortalRig) -> None:
    rid = (await play(portal))[0]
    theirs = await portal.rig.tenants.create_organisation("Others")
    stranger = await portal.signed_in(Role.OWNER, tenant=theirs.id)
    member = await portal.signed_in(Role.OWNER)
    assert rid in (await member.get("/portal/requests")).text
    assert rid not in (await stranger.get("/portal/requests")).text
    assert (await member.get(f"/portal/requests/{rid}")).status_code == 200
    for path in (f"/portal/requests/{rid}", f"/portal/requests/{rid}/receipt", f"/portal/requests/find?id={rid}"):
        assert (await stranger.get(path)).status_code == 404, path
    assert (await stranger.get(f"/portal?org={portal.rig.org.id}")).status_code == 403
    mine, others = (await member.get("/portal/usage.csv")).text, (await stranger.get("/portal/usage.csv")).text
    assert len(mine.splitlines()) > 1
    assert len(others.splitlines()) == 1
    key = portal.rig.key.id
    for verb in ("revoke", "rotate"):
        assert (await stranger.post(f"/portal/keys/{key}/{verb}", form="/portal/keys")).status_code == 404
    project = {"name": "x", "project": portal.rig.project.id}
    assert (await stranger.post("/portal/keys", project)).status_code == 404


async def test_somebody_in_two_organisations_changes_between_them(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.OWNER, email="ada@example.org")
    theirs = await portal.rig.tenants.create_organisation("Others")
    who = await portal.portal.people.find_by_email("ada@example.org")
    assert who is not None
    async with portal.rig.gateway.engine.begin() as db:
        await add_member(db, theirs.id, who.id, Role.VIEWER, actor="test")
    page = (await browser.get("/portal")).text
    assert 'name="organisation"' in page
    assert (await browser.post("/portal/organisation", {"organisation": theirs.id}, form="/portal")).status_code == 303
    assert "Others · pdgate" in (await browser.get("/portal/keys")).text


async def test_a_key_is_shown_once_works_and_ends_with_its_revocation(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.DEVELOPER)
    made = await browser.post("/portal/keys", {"name": "robot", "project": portal.rig.project.id, "days": "30"})
    secret = re.search(r'id="secret"[^>]*>(pdg_[0-9A-Za-z]+)<', made.text)
    assert secret is not None
    assert secret[1] not in (await browser.get("/portal/keys")).text
    ask = {"headers": {"authorization": f"Bearer {secret[1]}"}}
    assert (await portal.rig.client.get("/v1/models", **ask)).status_code == 200
    (key,) = [one for one in await portal.rig.tenants.list_keys(portal.rig.org.id) if one.name == "robot"]
    assert (await browser.post(f"/portal/keys/{key.id}/revoke", form="/portal/keys")).status_code == 303
    assert (await portal.rig.client.get("/v1/models", **ask)).status_code == 401


async def test_a_rotated_key_has_a_new_secret_and_the_old_one_for_an_hour(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.OWNER)
    made = await browser.post(f"/portal/keys/{portal.rig.key.id}/rotate", form="/portal/keys")
    fresh = re.search(r'id="secret"[^>]*>(pdg_[0-9A-Za-z]+)<', made.text)
    assert fresh is not None
    for secret in (fresh[1], portal.rig.secret):
        answer = await portal.rig.client.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
        assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/portal/projects", "/portal/keys"])
async def test_a_form_without_the_sessions_secret_changes_nothing(portal: PortalRig, path: str) -> None:
    browser = await portal.signed_in(Role.OWNER)
    answer = await browser.client.post(path, data={"name": "forged", "project": portal.rig.project.id})
    assert answer.status_code == 403
    assert "forged" not in (await browser.get("/portal/keys")).text


async def test_what_people_type_is_shown_as_text(portal: PortalRig) -> None:
    browser = await portal.signed_in(Role.OWNER)
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    await browser.post("/portal/projects", {"name": evil}, form="/portal/keys")
    for path in ("/portal/keys", "/portal/usage", "/portal/requests"):
        text = (await browser.get(path)).text
        assert "<script>alert" not in text, path
        assert "<img src=x" not in text, path
        assert "&lt;script&gt;" in text, path


async def test_a_csv_cell_is_no_formula(portal: PortalRig) -> None:
    rig = portal.rig
    risky = await rig.tenants.create_project(rig.org.id, "=1+1")
    owners = [(risky.id, rig.key.id)]
    await play_week(rig.gateway.engine, rig.redis, org=rig.org.id, owners=owners, num_requests=30)
    browser = await portal.signed_in(Role.OWNER)
    lines = (await browser.get("/portal/usage.csv?by=project")).text.splitlines()
    assert lines[0].startswith("start_unix_s,project,project_name")
    assert all(",'=1+1," in line for line in lines[1:])


def test_a_timeline_has_every_stage_and_adds_up_to_the_whole() -> None:
    seen = RequestTimings(ttft_ms=300, tpot_ms=20, total_ms=1000, queue_ms=50, prefill_ms=200, transfer_ms=40)
    stages = stages_of(seen)
    assert [one.name for one in stages] == ["queue", "prefill", "transfer", "decode"]
    assert [one.took_ms for one in stages] == [50, 210, 40, 700]
    assert sum(one.share for one in stages) == pytest.approx(1)
    assert [one.x for one in stages] == [0, 50, 260, 300]


def test_small_groups_are_added_up_as_others() -> None:
    cells = [(0, f"m{i}", float(i)) for i in range(1, 11)]
    series = by_group(cells, [0, 60])
    assert [one.name for one in series] == ["m10", "m9", "m8", "m7", "m6", "m5", "m4", OTHERS]
    assert series[-1].values == [6.0, 0.0]


def test_a_range_ends_with_the_bucket_that_runs_and_follows_the_one_before() -> None:
    chosen = range_of("24h", 1_000_000)
    assert (chosen.span.end_s, chosen.span.start_s) == (1_000_800, 914_400)
    assert chosen.before.end_s == chosen.span.start_s
    assert len(chosen.starts) == 24
    assert range_of("nonsense", 0).name == "7d"


def test_numbers_carry_their_units() -> None:
    assert money(48_400_000, "EUR") == f"0.0484{NO_BREAK}EUR"
    assert money(1_234_500_000_000, "EUR") == f"1\u202f234.50{NO_BREAK}EUR"
    assert (ms(412.4), ms(1240)) == (f"412{NO_BREAK}ms", f"1.24{NO_BREAK}s")
    assert percent(0.948) == f"94.8{NO_BREAK}%"
    assert (short(999), short(12_345), short(4_560_000)) == ("999", "12.3\u202fk", "4.56\u202fM")
    assert (change(110, 100), change(5, 0), change(5000, 100)) == (f"+10{NO_BREAK}%", "", "\u00d7\u202f50")


def test_only_files_of_the_shelf_can_be_asked_for() -> None:
    shelf = Shelf()
    assert shelf.address("app.css").startswith("/portal/static/app.css?v=")
    assert shelf.address("../portal.py") == ""
