"""Signing in at an OpenID provider: authorization code with PKCE, checked against the provider's own keys.

What a sign-in needs to come back (verifier, nonce, where to go) is in Redis under the hash of its `state`, is taken
once, and belongs to the browser that began it. Who is unknown here is let in only by a verified e-mail address of an
account that exists: a provider makes no members.
"""

import hashlib
import hmac
import secrets
from typing import Any, Final

import httpx
import msgspec
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from redis.asyncio import Redis

from contracts import keys
from contracts.errors import BadRequest, DependencyDown
from gateway.portal.door import NotAllowed
from gateway.portal.people import People, Person

LIVES_S: Final = 600
_TIMEOUT_S: Final = 10.0
_ALGORITHMS: Final = ["RS256", "ES256", "PS256"]


class _Begun(msgspec.Struct, frozen=True, kw_only=True):
    verifier: str
    nonce: str
    following: str
    browser: str
    redirect_uri: str


class OpenId:
    """One provider. Errors: BadRequest, NotAllowed, DependencyDown, RedisError."""

    def __init__(self, redis: Redis, people: People, *, issuer: str, client_id: str, client_secret: str) -> None:
        self._redis = redis
        self._people = people
        self._issuer = issuer.rstrip("/")
        self._client_id = client_id
        self._client_secret = client_secret

    async def begin(self, *, browser: str, following: str, redirect_uri: str) -> str:
        """Return where to send a browser, whose own secret is `browser`."""
        verifier, nonce, state = (secrets.token_urlsafe(48) for _ in range(3))
        begun = _Begun(verifier=verifier, nonce=nonce, following=following, browser=browser, redirect_uri=redirect_uri)
        async with self._client(redirect_uri) as client:
            found = await self._described(client)
            url, _ = client.create_authorization_url(
                found["authorization_endpoint"], state=state, code_verifier=verifier, nonce=nonce
            )
        await self._redis.set(keys.sign_in_state(_hash(state)), msgspec.msgpack.encode(begun), ex=LIVES_S)
        return str(url)

    async def end(self, *, state: str, code: str, browser: str) -> tuple[Person, str]:
        """Return who came back from the provider, and where to go on."""
        raw: Any = await self._redis.getdel(keys.sign_in_state(_hash(state)))
        begun = msgspec.msgpack.decode(raw, type=_Begun) if raw is not None else None
        if begun is None or not browser or not hmac.compare_digest(begun.browser.encode(), browser.encode()):
            raise BadRequest("This sign-in was not begun here, or too long ago. Begin again.")
        claims = await self._claims(begun, code)
        return await self._person(claims), begun.following

    async def _claims(self, begun: _Begun, code: str) -> dict[str, Any]:
        try:
            async with self._client(begun.redirect_uri) as client:
                found = await self._described(client)
                token = await client.fetch_token(found["token_endpoint"], code=code, code_verifier=begun.verifier)
                known = await client.request("GET", found["jwks_uri"], withhold_token=True)
            read = jwt.decode(token["id_token"], KeySet.import_key_set(known.json()), algorithms=_ALGORITHMS)
            jwt.JWTClaimsRegistry(
                iss={"essential": True, "value": self._issuer},
                aud={"essential": True, "value": self._client_id},
                exp={"essential": True},
                sub={"essential": True},
                nonce={"essential": True, "value": begun.nonce},
            ).validate(read.claims)
        except (AuthlibBaseError, JoseError, KeyError, ValueError) as error:
            raise BadRequest(f"The provider's answer cannot be trusted: {type(error).__name__}.") from None
        except httpx.HTTPError:
            raise _away() from None
        return dict(read.claims)

    async def _person(self, claims: dict[str, Any]) -> Person:
        subject = str(claims["sub"])
        who = await self._people.find_by_identity(self._issuer, subject)
        if who is None and claims.get("email_verified") is True and claims.get("email"):
            who = await self._people.find_by_email(str(claims["email"]))
            if who is not None:
                await self._people.add_identity(who.id, issuer=self._issuer, subject=subject, actor=who.id)
        if who is None or who.disabled:
            raise NotAllowed("Nobody here has this account. Ask for an invite first.")
        return who

    async def _described(self, client: AsyncOAuth2Client) -> dict[str, Any]:
        try:
            answer = await client.request(
                "GET", f"{self._issuer}/.well-known/openid-configuration", withhold_token=True
            )
            found: dict[str, Any] = answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError):
            raise _away() from None
        if str(found.get("issuer", "")).rstrip("/") != self._issuer:
            raise _away()
        return found

    def _client(self, redirect_uri: str) -> AsyncOAuth2Client:
        return AsyncOAuth2Client(
            self._client_id,
            self._client_secret,
            scope="openid email profile",
            redirect_uri=redirect_uri,
            code_challenge_method="S256",
            timeout=_TIMEOUT_S,
        )


def _away() -> DependencyDown:
    return DependencyDown("The provider does not answer as it should.", retry_after_s=5)


def _hash(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()
