"""How the first operator comes in: the link that `pdgate up` prints, and `pdgate orgs invite` later."""

import asyncio
import json

import httpx
import pytest
from portal_rig import PASSWORD, PortalRig
from typer.testing import CliRunner

from contracts.catalog import Catalog
from pdgate.cli import app
from pdgate.tenancy import prepare_tenants


async def test_each_start_signs_the_one_operator_in_once(
    portal: PortalRig, redis_url: str, database_url: str, catalog: Catalog
) -> None:
    known: dict[str, str] = {}
    for _ in range(2):
        first = await prepare_tenants(
            database_url=database_url, redis_url=redis_url, catalog=catalog, known=known, demo=False
        )
        known = {"PDGATE_ADMIN_KEY": first.admin}
        browser = portal.browser()
        assert (await browser.post(f"/portal/invite/{first.sign_in}")).status_code == 303
        assert "operator@localhost" in (await browser.get("/portal")).text
        assert (await portal.browser().get(f"/portal/invite/{first.sign_in}")).status_code == 404
    headers = {"authorization": f"Bearer {known['PDGATE_ADMIN_KEY']}"}
    assert (await portal.browser().client.get("/admin/v1/workers", headers=headers)).status_code == 200


async def test_the_command_line_makes_links(
    portal: PortalRig, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("PDGATE_PORTAL_URL", f"{portal.url}/portal")

    async def link(*arguments: str) -> str:
        ran = await asyncio.to_thread(CliRunner().invoke, app, ["orgs", "invite", *arguments, "--json"])
        assert ran.exit_code == 0, ran.output
        return httpx.URL(json.loads(ran.output)[0]["url"]).path

    operator = portal.browser()
    assert (await operator.post(await link())).status_code == 303
    assert (await operator.get("/admin/v1/workers")).status_code == 200
    owner = portal.browser()
    path = await link("boss@example.org", "--org", portal.rig.org.id, "--role", "admin")
    assert (await owner.post(path, {"password": PASSWORD})).status_code == 303
    assert (await owner.get(f"/admin/v1/organisations/{portal.rig.org.id}/members")).status_code == 200
    assert (await owner.get("/admin/v1/workers")).status_code == 403
    second = portal.browser()
    path = await link("op2@example.org")
    assert (await second.post(path, {"password": PASSWORD})).status_code == 303
    assert (await second.get("/admin/v1/workers")).status_code == 200
