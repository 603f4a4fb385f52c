"""The portal in a real Chromium at a whole stack: the first hour of a customer, accessibility, injections, looks."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from browser_rig import Site, fresh_email, running_site
from scenery import furnished

from contracts.v1 import billing_pb2 as pb
from gateway.portal.frontend import install, npm
from gateway.portal.navigation import MENU
from gateway.portal.roles import Role
from tests.chromium import keep
from tests.processes import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PATHS = [place.path for _, places in MENU for place in places]


@pytest.fixture
async def site(
    redis_url: str, database_url: str, catalog_file: Path, models_dir: Path, tmp_path: Path
) -> AsyncIterator[Site]:
    async with running_site(
        folder=tmp_path,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    ) as running:
        yield running


async def test_a_customer_comes_in_asks_pays_is_stopped_by_a_budget_and_gets_an_invoice(site: Site) -> None:
    email = fresh_email()
    await site.person(email, Role.OWNER)
    page = await site.page(email)
    await page.get_by_role("heading", name="No requests yet").wait_for()

    await page.get_by_role("link", name="Projects and keys").first.click()
    await page.locator("#project-name").fill("Chat for the website")
    await page.get_by_role("button", name="Make project").click()
    await page.get_by_role("heading", name="Chat for the website").wait_for()
    await page.locator("#key-name").fill("production")
    await page.locator("#key-project").select_option(label="Chat for the website")
    await page.get_by_role("button", name="Make key").click()
    secret = await page.locator("#secret").text_content()
    assert (secret or "").startswith("pdg_")

    await page.get_by_role("link", name="Playground").click()
    await page.locator("#key").select_option(label="production (Chat for the website)")
    await page.locator("#most").fill("24")
    await page.locator("#prompt").fill("What is a serverless gateway?")
    await page.locator("#send").click()
    await page.get_by_text("Finished.").wait_for(timeout=60_000)
    for measured in ("ttft", "tpot"):
        assert "ms" in (await page.locator(f"#{measured}").text_content() or "")
    assert "EUR" in (await page.locator("#cost").text_content() or "")
    receipt = page.locator("#receipt tbody tr")
    await receipt.first.wait_for(timeout=30_000)
    assert await receipt.count() == 3
    await page.get_by_role("link", name="Open this request").click()
    await page.get_by_role("heading", name="Timeline").wait_for()
    assert await page.locator("svg.course rect").count() >= 2

    async def metered() -> bool:
        await page.goto("/portal/usage?range=24h&by=meter")
        return await page.locator("section[aria-labelledby=groups] tbody tr").count() == 3

    await until(metered, 60)

    await page.get_by_role("link", name="Budgets").click()
    await page.locator("#scope").select_option(label="Project Chat for the website")
    await page.locator("#amount").fill("0.000001")
    await page.get_by_role("button", name="Set budget").click()
    await page.get_by_text("Hard", exact=True).wait_for()

    await page.goto("/portal/playground")
    await page.locator("#key").select_option(label="production (Chat for the website)")

    async def refused() -> bool:
        await page.locator("#prompt").fill("And now?")
        await page.locator("#send").click()
        await page.locator("#send:enabled").wait_for(timeout=60_000)
        return "insufficient_quota" in (await page.locator("#state").text_content() or "")

    await until(refused, 60)

    key_id = await page.locator("#key").input_value()
    month = await site.last_month("proj_past", key_id)
    await site.billing("CloseMonth", pb.Month(month=month, organisation=site.stack.org, issue=True))
    await page.get_by_role("link", name="Invoices").click()
    async with page.expect_download() as coming:
        await page.get_by_role("link", name="PDF").first.click()
    document = await (await coming.value).path()
    assert (await asyncio.to_thread(Path(document).read_bytes)).startswith(b"%PDF-")


async def test_no_page_has_a_serious_accessibility_finding(site: Site, tmp_path: Path) -> None:
    program = npm()
    assert program, "axe-core comes by npm: install Node.js"
    scratch = install(program, tmp_path / "vendor", dev=True)
    axe = (scratch / "node_modules/axe-core/axe.min.js").read_text()
    email = fresh_email()
    await site.person(email, Role.OPERATOR)
    events = await site.play_week([("proj_a", "key_a"), ("proj_b", "key_b")])
    more = ["/portal/account", "/portal/login", f"/portal/requests/{events[0].rid}"]
    found = []
    for dark, phone in ((False, False), (True, False), (False, True)):
        page = await site.page(email, dark=dark, phone=phone)
        for path in [*PATHS, *more]:
            await page.goto(path)
            await page.evaluate(axe)
            result = await page.evaluate("axe.run({resultTypes: ['violations']})")
            found += [
                (path, dark, phone, one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"])
                for one in result["violations"]
                if one["impact"] in ("serious", "critical")
            ]
    assert not found
    assert not site.troubles


async def test_what_is_typed_into_any_field_never_runs(site: Site) -> None:
    email = fresh_email()
    await site.person(email, Role.OWNER)
    page = await site.page(email)
    opened: list[str] = []
    page.on("dialog", lambda dialog: opened.append(dialog.message))
    evil = "\"'><img src=x onerror=window.pwned=1><script>window.pwned=1</script>{{7*7}}"
    await page.goto("/portal/keys")
    await page.locator("#project-name").fill(evil)
    await page.get_by_role("button", name="Make project").click()
    await page.locator("#key-name").fill(evil)
    await page.locator("#key-project").select_option(label=evil)
    await page.get_by_role("button", name="Make key").click()
    await page.locator("#secret").wait_for()
    await page.goto("/portal/playground")
    await page.locator("#prompt").fill(evil)
    await page.locator("#most").fill("8")
    await page.locator("#send").click()
    await page.get_by_text("Finished.").wait_for(timeout=60_000)
    await page.goto("/portal/webhooks")
    await page.locator("#address").fill("https://example.org/" + evil.replace(" ", "%20"))
    await page.locator("#secret").fill(evil)
    await page.get_by_role("button", name="Save").click()
    await page.get_by_role("heading", name="Webhooks").wait_for()
    await page.goto("/portal/members")
    await page.locator("#email").evaluate(
        "(field, text) => { field.type = 'text'; field.value = text; }", evil + "@example.org"
    )
    await page.get_by_role("button", name="Make invite").click()
    for path in [one for one in PATHS if "/fleet" not in one]:
        answer = await page.goto(path)
        assert answer is not None
        assert answer.status == 200, path
        assert await page.evaluate("window.pwned") is None, path
        assert await page.locator("img[src=x]").count() == 0, path
        assert "49" not in (await page.locator("h2").all_text_contents()), path
    assert not opened


async def test_pages_look_as_they_should_on_desk_and_phone_by_day_and_night(site: Site, tmp_path: Path) -> None:
    """Writes docs/screenshots when PDGATE_SCREENSHOTS=docs/screenshots, as `make screenshots` does."""
    folder = Path(os.environ.get("PDGATE_SCREENSHOTS") or tmp_path)
    email = fresh_email()
    await site.person(email, Role.OPERATOR)
    pages = {"sign-in": "/portal/login", **await furnished(site)}
    assert {path.partition("?")[0] for path in pages.values()} >= set(PATHS)
    for dark, phone in ((False, False), (True, False), (False, True), (True, True)):
        visitor = await site.page(dark=dark, phone=phone)
        signed_in = await site.page(email, dark=dark, phone=phone)
        for name, path in pages.items():
            page = visitor if name == "sign-in" else signed_in
            await page.goto(path)
            await page.wait_for_load_state("networkidle")
            wide = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{path} is wider than the screen"
            if await page.locator("figure.chart").count():
                assert await page.locator("figure.chart canvas").count(), f"{path} draws no chart"
            look = f"{name}-{'phone' if phone else 'desktop'}-{'dark' if dark else 'light'}.png"
            await asyncio.to_thread(keep, await page.screenshot(), folder / look)
    assert not site.troubles
