"""Chromium for tests: finding it, signing people in, keeping pictures. Playwright belongs to `make e2e`."""

import io
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy.ext.asyncio import create_async_engine

from contracts.environment import asyncpg_url
from gateway.portal.passwords import Passwords
from gateway.portal.people import add_person
from tests.processes import Stack

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, Playwright

PASSWORD: Final = "correct horse battery"
FLAGS: Final = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
ZONE: Final = "Europe/Berlin"


def chromium() -> str:
    """Return the path of Chromium; fail when there is none."""
    found = os.environ.get("PDGATE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "these tests need Chromium: apt-get install chromium, or set PDGATE_CHROMIUM"
    return found


@asynccontextmanager
async def browsing(playwright: "Playwright") -> "AsyncIterator[Browser]":
    """Run Chromium."""
    browser = await playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
    try:
        yield browser
    finally:
        await browser.close()


async def page_of(browser: "Browser", url: str, *, dark: bool = False, width: int = 1280, height: int = 860) -> "Page":
    """Return a page of a new browser profile."""
    profile = await browser.new_context(
        base_url=url.replace("127.0.0.1", "localhost"),
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        timezone_id=ZONE,
        accept_downloads=True,
    )
    return await profile.new_page()


async def sign_in(page: "Page", email: str) -> None:
    """Fill the sign-in form and wait for the overview."""
    await page.goto("/portal")
    await page.get_by_label("E-mail").fill(email)
    await page.get_by_label("Password").fill(PASSWORD)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("heading", name="Overview").wait_for()


async def add_operator(stack: Stack, email: str) -> None:
    """Create an operator with PASSWORD."""
    passwords = Passwords()
    hashed = await passwords.hash(PASSWORD)
    passwords.close()
    engine = create_async_engine(asyncpg_url(stack.database_url))
    async with engine.begin() as db:
        await add_person(db, email=email, name="", password_hash=hashed, is_operator=True)
    await engine.dispose()


def keep(picture: bytes, file: Path) -> None:
    """Write a screenshot with 64 colours: a third of the bytes, and the same to the eye."""
    from PIL import Image

    Image.open(io.BytesIO(picture)).convert("RGB").quantize(64).save(file, optimize=True)
