"""People with browsers, at a real gateway."""

import re
from typing import Any

import httpx
from argon2 import PasswordHasher

from gateway.portal.people import Person, add_member, add_person
from gateway.portal.roles import Role
from tests.gateway.gateway_rig import Rig

PASSWORD = "correct horse battery"
_CSRF = re.compile(r'name="csrf-token" content="([^"]*)"')


class Browser:
    """What one person's browser does: keeps cookies (`Secure` ones on this machine too), sends our forms back."""

    def __init__(self, url: str) -> None:
        self.cookies: dict[str, str] = {}
        hooks = {"request": [self._send_cookies], "response": [self._take_cookies]}
        self.client = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, event_hooks=hooks)

    async def _send_cookies(self, request: httpx.Request) -> None:
        request.headers["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())

    async def _take_cookies(self, response: httpx.Response) -> None:
        self.client.cookies.clear()
        for line in response.headers.get_list("set-cookie"):
            name, _, value = line.split(";")[0].partition("=")
            self.cookies[name] = value
            if "max-age=0" in line.lower():
                del self.cookies[name]

    async def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return await self.client.get(path, **kwargs)

    async def csrf(self, path: str = "/portal/login") -> str:
        found = _CSRF.search((await self.client.get(path)).text)
        assert found is not None, path
        return found[1]

    async def post(self, path: str, data: dict[str, str] | None = None, *, form: str = "") -> httpx.Response:
        """Send a form of the page `form`, or of the same path."""
        return await self.client.post(path, data={"csrf": await self.csrf(form or path), **(data or {})})

    async def sign_in(self, email: str, password: str = PASSWORD, **more: str) -> httpx.Response:
        return await self.post("/portal/login", {"email": email, "password": password, **more})

    @property
    def session(self) -> str:
        return self.cookies.get("pdgate_session", "")


class PortalRig:
    """A running gateway and its people."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.portal = rig.gateway.portal
        # As slow as it may be where people sign in; here hundreds do, and what a hash costs is not what is tested.
        self.portal.passwords._hasher = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
        self.url = str(rig.client.base_url)
        self._browsers: list[Browser] = []

    def browser(self, url: str = "") -> Browser:
        self._browsers.append(Browser(url or self.url))
        return self._browsers[-1]

    async def person(self, email: str, role: Role | None = None, *, tenant: str = "") -> Person:
        """Create a person with PASSWORD, a member of the rig's or another organisation."""
        hashed = await self.portal.passwords.hash(PASSWORD)
        async with self.rig.gateway.engine.begin() as db:
            operates = role is Role.OPERATOR
            who = await add_person(db, email=email, name="", password_hash=hashed, is_operator=operates)
            if role is not None and not operates:
                await add_member(db, tenant or self.rig.org.id, who.id, role, actor="test")
        return who

    async def signed_in(self, role: Role, *, tenant: str = "", email: str = "") -> Browser:
        """Return the browser of somebody new who is signed in."""
        email = email or f"{role}-{len(self._browsers)}@example.org"
        await self.person(email, role, tenant=tenant)
        browser = self.browser()
        answer = await browser.sign_in(email)
        assert answer.status_code == 303, answer.text
        return browser

    async def close(self) -> None:
        for browser in self._browsers:
            await browser.client.aclose()
