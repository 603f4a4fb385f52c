"""Signing in at a real OpenID provider that runs beside the test."""

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey
from portal_rig import Browser, PortalRig

from contracts.catalog import Catalog
from gateway.portal.roles import Role
from tests.gateway.gateway_rig import running_rig


class Provider:
    """Discovery, authorization, tokens and keys; checks the client's secret and its PKCE verifier."""

    def __init__(self) -> None:
        self.key = RSAKey.generate_key(2048, {"kid": "k1", "use": "sig", "alg": "RS256"})
        self.signs_with = self.key
        self.claims: dict[str, Any] = {"sub": "s-1", "email": "ada@example.org", "email_verified": True}
        self.codes: dict[str, dict[str, str]] = {}
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.get(self)

            def do_POST(self) -> None:
                provider.token(self)

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        asked = urlsplit(handler.path)
        if asked.path == "/.well-known/openid-configuration":
            names = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "jwks"}
            found = {name: f"{self.issuer}/{path}" for name, path in names.items()}
            _answer(handler, 200, {"issuer": self.issuer, **found})
        elif asked.path == "/jwks":
            _answer(handler, 200, {"keys": [self.key.as_dict(private=False)]})
        else:
            query = {name: values[0] for name, values in parse_qs(asked.query).items()}
            code = secrets.token_urlsafe(16)
            self.codes[code] = query
            back = urlencode({"code": code, "state": query["state"]})
            handler.send_response(302)
            handler.send_header("location", f"{query['redirect_uri']}?{back}")
            handler.end_headers()

    def token(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"])).decode()
        form = {name: values[0] for name, values in parse_qs(body).items()}
        asked = self.codes.pop(form["code"], None)
        basic = "Basic " + base64.b64encode(b"portal:hush").decode()
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if asked is None or handler.headers["authorization"] != basic or challenge != asked["code_challenge"]:
            _answer(handler, 400, {"error": "invalid_grant"})
            return
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": "portal", "iat": now, "exp": now + 60, "nonce": asked["nonce"]}
        signed = jwt.encode({"alg": "RS256", "kid": "k1"}, claims | self.claims, self.signs_with)
        _answer(handler, 200, {"access_token": "x", "token_type": "Bearer", "id_token": signed})


def _answer(handler: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(raw)))
    handler.end_headers()
    handler.wfile.write(raw)


@pytest.fixture
def provider() -> Iterator[Provider]:
    provider = Provider()
    yield provider
    provider.server.shutdown()
    provider.server.server_close()


@pytest.fixture
async def portal(
    provider: Provider,
    redis_url: str,
    database_url: str,
    catalog_file: Path,
    catalog: Catalog,
    models_dir: Path,
    tmp_path: Path,
) -> AsyncIterator[PortalRig]:
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        catalog=catalog,
        models_dir=models_dir,
        journal_dir=tmp_path / "journal",
        openid_issuer=provider.issuer,
        openid_client_id="portal",
        openid_client_secret="hush",
    ) as running:
        rig = PortalRig(running)
        yield rig
        await rig.close()


async def _to_provider_and_back(browser: Browser, following: str = "/portal") -> str:
    """Return where the provider sends the browser."""
    away = await browser.get("/portal/login/openid", params={"next": following})
    assert away.status_code == 303, away.text
    async with httpx.AsyncClient(trust_env=False) as elsewhere:
        back = await elsewhere.get(away.headers["location"])
    url = httpx.URL(back.headers["location"])
    return f"{url.path}?{url.query.decode()}"


async def test_a_person_signs_in_at_the_provider_and_is_known_by_subject_from_then_on(
    portal: PortalRig, provider: Provider
) -> None:
    await portal.person("ada@example.org", Role.OWNER)
    browser = portal.browser()
    assert "/portal/login/openid" in (await browser.get("/portal/login")).text
    back = await _to_provider_and_back(browser, "/portal/usage?x=1")
    answer = await browser.get(back)
    assert (answer.status_code, answer.headers["location"]) == (303, "/portal/usage?x=1"), answer.text
    assert (await browser.get("/portal")).status_code == 200
    provider.claims = {"sub": "s-1"}  # the address is not told any more
    again = portal.browser()
    assert (await again.get(await _to_provider_and_back(again))).status_code == 303
    replayed = portal.browser()
    replayed.cookies = dict(browser.cookies)
    assert (await replayed.get(back)).status_code == 400  # a state is taken once
    third = portal.browser()
    stranger = portal.browser()
    assert (await stranger.get(await _to_provider_and_back(third))).status_code == 400  # another browser's

    provider.claims = {"sub": "s-2", "email": "ada@example.org", "email_verified": False}
    unverified = portal.browser()
    assert (await unverified.get(await _to_provider_and_back(unverified))).status_code == 403
    provider.claims = {"sub": "s-1", "aud": "somebody else"}
    for_another = portal.browser()
    assert (await for_another.get(await _to_provider_and_back(for_another))).status_code == 400
    provider.claims = {"sub": "s-1"}
    provider.signs_with = RSAKey.generate_key(2048, {"kid": "k1"})
    forged = portal.browser()
    assert (await forged.get(await _to_provider_and_back(forged))).status_code == 400
    outside = portal.browser()
    provider.signs_with = provider.key
    home = await outside.get(await _to_provider_and_back(outside, "https://evil.example"))
    assert home.headers["location"] == "/portal"
