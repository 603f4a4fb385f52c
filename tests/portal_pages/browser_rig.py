"""Chromium at a whole stack: gateway, scheduler, billing and timed workers, each its own process."""

import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from past import past_event, play_week, write_events
from playwright.async_api import Browser, Page, async_playwright
from sqlalchemy.ext.asyncio import create_async_engine

from contracts import keys
from contracts.environment import asyncpg_url
from contracts.resp import redis_client
from contracts.usage import UsageEvent
from contracts.v1 import billing_pb2_grpc
from gateway.portal.passwords import Passwords
from gateway.portal.people import add_member, add_person
from gateway.portal.roles import Role
from tests.chromium import PASSWORD, browsing, page_of, sign_in
from tests.processes import Stack


class Site:
    """A running stack with people, and the browser."""

    def __init__(self, stack: Stack, browser: Browser, token: str) -> None:
        self.stack = stack
        self.browser = browser
        self.troubles: list[str] = []  # what pages said in the console, and dialogs, which only an injection would open
        self._token = token

    async def person(self, email: str, role: Role, org: str = "") -> None:
        """Create somebody with PASSWORD."""
        passwords = Passwords()
        hashed = await passwords.hash(PASSWORD)
        passwords.close()
        engine = create_async_engine(asyncpg_url(self.stack.database_url))
        async with engine.begin() as db:
            operates = role is Role.OPERATOR
            who = await add_person(db, email=email, name="", password_hash=hashed, is_operator=operates)
            if not operates:
                await add_member(db, org or self.stack.org, who.id, role, actor="test")
        await engine.dispose()

    async def play_week(self, owners: list[tuple[str, str]]) -> list[UsageEvent]:
        """Write a week of requests; return what they used, the newest first."""
        engine = create_async_engine(asyncpg_url(self.stack.database_url))
        redis = redis_client(self.stack.redis_url)
        events = await play_week(engine, redis, org=self.stack.org, owners=owners)
        await redis.aclose()
        await engine.dispose()
        return events

    async def last_month(self, project: str, key_id: str) -> str:
        """Write a request of 35 days ago; return its month."""
        import random

        engine = create_async_engine(asyncpg_url(self.stack.database_url))
        at_ms = int(time.time() * 1000) - 35 * 86_400_000
        event = past_event(random.Random(1), at_ms, org=self.stack.org, project=project, key_id=key_id)
        await write_events(engine, [event], days=40)
        await engine.dispose()
        return time.strftime("%Y-%m", time.gmtime(at_ms / 1000))

    async def billing(self, method: str, request: Any) -> Any:
        """Call billing's Admin service."""
        redis = redis_client(self.stack.redis_url)
        address: Any = await redis.get(keys.BILLING_ADMIN)
        await redis.aclose()
        async with grpc.aio.insecure_channel(address.decode()) as channel:
            stub: Any = billing_pb2_grpc.AdminStub(channel)
            return await getattr(stub, method)(
                request, timeout=30, metadata=(("authorization", f"Bearer {self._token}"),)
            )

    async def page(self, email: str = "", *, dark: bool = False, phone: bool = False) -> Page:
        """Return a page of a new browser profile, signed in when an address is given."""
        size = {"width": 390, "height": 844} if phone else {"width": 1280, "height": 860}
        page = await page_of(self.browser, self.stack.url, dark=dark, **size)
        page.on("console", lambda said: self.troubles.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        if email:
            await sign_in(page, email)
        return page


@asynccontextmanager
async def running_site(
    *, folder: Path, redis_url: str, database_url: str, catalog_file: Path, models_dir: Path
) -> AsyncIterator[Site]:
    """Run the stack and Chromium."""
    token = secrets.token_urlsafe(16)
    stack = Stack(
        folder=folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    await stack.seed()
    stack.add_billing()
    stack.environ("billing")["BILLING_ADMIN_TOKEN"] = token
    stack.add_scheduler(cpu_profile=True)
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        stack.add_worker(name, role=role)
    stack.add_gateway()
    stack.environ("gateway")["GATEWAY_BILLING_ADMIN_TOKEN"] = token
    stack.start()
    try:
        await stack.ready()
        async with async_playwright() as playwright, browsing(playwright) as browser:
            yield Site(stack, browser, token)
    finally:
        stack.stop()


def fresh_email() -> str:
    """Return an address that nobody has."""
    return f"{uuid.uuid4().hex[:8]}@example.org"
