"""A one-time code in a real Chromium: set up by the picture, asked for, lost, turned off; every page accessible."""

import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pyotp
import pytest
from browser_rig import Site, fresh_email, running_site
from playwright.async_api import Page

from gateway.portal.frontend import install, npm
from gateway.portal.roles import Role
from tests.chromium import PASSWORD

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


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


class Phone:
    """An app whose clock the test reads: it never shows a code twice, as it would have to wait for the next one."""

    def __init__(self, secret: str) -> None:
        self._codes = pyotp.TOTP(secret)
        self._used = 0

    def code(self) -> str:
        """A code that was not used: of the period before, of this one, or of the next."""
        self._used = max(self._used + 1, int(time.time()) // 30 - 1)
        return self._codes.generate_otp(self._used)


async def serious(page: Page, axe: str) -> list[tuple[str, str]]:
    await page.evaluate(axe)
    result = await page.evaluate("axe.run({resultTypes: ['violations']})")
    return [(page.url, one["id"]) for one in result["violations"] if one["impact"] in ("serious", "critical")]


async def test_a_person_sets_a_code_up_is_asked_for_it_loses_the_phone_and_turns_it_off(
    site: Site, tmp_path: Path
) -> None:
    program = npm()
    assert program, "axe-core comes by npm: install Node.js"
    axe = (install(program, tmp_path / "vendor", dev=True) / "node_modules/axe-core/axe.min.js").read_text()
    found: list[tuple[str, str]] = []
    email = fresh_email()
    await site.person(email, Role.OWNER)
    page = await site.page(email)

    await page.locator(".who a").click()
    await page.get_by_role("heading", name="Account").wait_for()
    found += await serious(page, axe)
    await page.locator("#password").fill(PASSWORD)
    await page.get_by_role("button", name="Set up").click()
    await page.get_by_role("img", name=re.compile("QR code")).wait_for()
    box = await page.locator(".qr svg").bounding_box()
    assert box is not None
    assert box["width"] > 120
    found += await serious(page, axe)
    phone = Phone((await page.locator("#totp-secret").text_content() or "").replace(" ", ""))
    await page.get_by_label("Code", exact=True).fill(phone.code())
    await page.get_by_role("button", name="Turn on").click()
    codes = (await page.locator("#codes").text_content() or "").split()
    assert len(codes) == 10
    found += await serious(page, axe)

    other = await site.page()
    await other.goto("/portal/usage")
    await other.get_by_label("E-mail").fill(email)
    await other.get_by_label("Password").fill(PASSWORD)
    await other.get_by_role("button", name="Sign in").click()
    await other.get_by_role("heading", name="One-time code").wait_for()
    found += await serious(other, axe)
    await other.get_by_label("Code", exact=True).fill("000000")
    await other.get_by_role("button", name="Sign in").click()
    await other.get_by_text("This code is wrong").wait_for()
    await other.get_by_label("Code", exact=True).fill(phone.code())
    await other.get_by_role("button", name="Sign in").click()
    await other.get_by_role("heading", name="Usage").first.wait_for()

    lost = await site.page()
    await lost.goto("/portal")
    await lost.get_by_label("E-mail").fill(email)
    await lost.get_by_label("Password").fill(PASSWORD)
    await lost.get_by_role("button", name="Sign in").click()
    await lost.get_by_label("Code", exact=True).fill(codes[0])
    await lost.get_by_role("button", name="Sign in").click()
    await lost.get_by_text("9 recovery codes are left").wait_for()
    found += await serious(lost, axe)
    await lost.locator("#off-password").fill(PASSWORD)
    await lost.locator("#off-code").fill(codes[1])
    lost.on("dialog", lambda one: one.accept())
    await lost.get_by_role("button", name="Turn off").click()
    await lost.get_by_role("button", name="Set up").wait_for()
    assert not found
    assert [said for said in site.troubles if "401" not in said] == []


async def test_an_owner_requires_it_and_the_members_are_led_to_it(site: Site) -> None:
    owner, member = fresh_email(), fresh_email()
    await site.person(owner, Role.OWNER)
    await site.person(member, Role.DEVELOPER)
    page = await site.page(owner)
    await page.goto("/portal/members")
    await page.get_by_role("button", name="Require it").click()
    await page.get_by_text("asks for a second factor").wait_for()  # the owner too
    await page.locator("#password").fill(PASSWORD)
    await page.get_by_role("button", name="Set up").click()
    phone = Phone((await page.locator("#totp-secret").text_content() or "").replace(" ", ""))
    await page.get_by_label("Code", exact=True).fill(phone.code())
    await page.get_by_role("button", name="Turn on").click()
    await page.locator("#codes").wait_for()
    await page.goto("/portal/members")
    await page.get_by_text("Nobody gets in with a password alone").wait_for()

    theirs = await site.page()
    await theirs.goto("/portal/keys")
    await theirs.get_by_label("E-mail").fill(member)
    await theirs.get_by_label("Password").fill(PASSWORD)
    await theirs.get_by_role("button", name="Sign in").click()
    await theirs.get_by_text("asks for a second factor").wait_for()
    assert theirs.url.endswith("/portal/account")
    await theirs.get_by_role("button", name="Sign out").click()
    await theirs.get_by_role("heading", name="Sign in").wait_for()
    assert site.troubles == []
