"""Who is calling: the bearer key, looked up by hash, cached, and exact at every request.

1. `authenticate` finds the key in memory or in Postgres. A cached key may be up to a few seconds old.
2. The reserve script compares the state in the cache with the shard's. If they differ, `reload` reads
   Postgres, publishes what it found, and the request is repeated once.
3. Routes that reserve nothing call `confirm`, which compares with the shard directly.

While Postgres is away a cached key stays good for ten minutes; a revocation still reaches it through
Redis, since revoking publishes there.
"""

import asyncio
import datetime as dt
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import sqlalchemy as sa
import structlog
from litestar.types import Scope
from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from contracts import keys
from contracts.errors import DependencyDown, InvalidApiKey
from contracts.resp import RespConnection
from gateway.ids import hash_key
from gateway.single_flight import SingleFlight
from gateway.tenants import ApiKey, Tenants, publish_key_state

log = structlog.get_logger()

FRESH_S: Final = 30.0
STALE_S: Final = 600.0
ASK_AGAIN_S: Final = 5.0  # a Postgres that hangs delays one request of a key in so many seconds, not each
UNKNOWN_FOR_S: Final = 1.0  # a flood of one wrong key asks Postgres once a second
_MAX_KEY_CHARACTERS: Final = 200
_REVOKED_KEPT: Final = 4096
_REDIS_TIMEOUT_S: Final = 2.0

DATABASE_ERRORS: Final = (sa.exc.SQLAlchemyError, OSError, TimeoutError)


class _Cached(msgspec.Struct):
    key: ApiKey | None
    read_s: float  # monotonic
    failed_s: float = float("-inf")  # monotonic; when Postgres last did not answer


class Authenticator:
    """Finds the key of a request. Errors: InvalidApiKey, DependencyDown."""

    def __init__(
        self,
        tenants: Tenants,
        redis: Redis,
        connection: RespConnection,
        *,
        max_entries: int,
        now_s: Callable[[], float],
    ) -> None:
        self._tenants = tenants
        self._redis = redis
        self._connection = connection
        self._max_entries = max_entries
        self._now_s = now_s
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        self._revoked: OrderedDict[str, None] = OrderedDict()
        self._reads: SingleFlight[bytes, ApiKey | None] = SingleFlight()

    async def authenticate(self, authorization: str | None) -> ApiKey:
        """Return the active key in an `Authorization` header."""
        key_hash = hash_key(bearer(authorization))
        cached = self._cache.get(key_hash)
        if cached is not None:
            now_s = self._now_s()
            age_s = now_s - cached.read_s
            unanswered = now_s - cached.failed_s < ASK_AGAIN_S and age_s < STALE_S
            if unanswered or age_s < (FRESH_S if cached.key is not None else UNKNOWN_FOR_S):
                self._cache.move_to_end(key_hash)
                return _usable(cached.key)
        return _usable(await self._reads.run(key_hash, lambda: self._read(key_hash, cached)))

    async def reload(self, authorization: str | None) -> ApiKey:
        """Return the key as Postgres has it now, after telling the shard."""
        key_hash = hash_key(bearer(authorization))
        key = _usable(await self._read(key_hash, None))
        try:
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                await publish_key_state(self._redis, key)
        except TimeoutError:
            raise RedisTimeoutError("no reply") from None
        return key

    async def find(self, org: str, key_id: str) -> ApiKey:
        """Return an active key as Postgres has it now, after telling the shard: for work done in its name later."""
        try:
            key = _usable(await self._tenants.find_key(org, key_id))
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                await publish_key_state(self._redis, key)
        except (*DATABASE_ERRORS, RedisError) as error:
            log.warning("keys_unavailable", error=str(error))
            raise DependencyDown("API keys cannot be checked right now.", retry_after_s=1) from None
        return key

    async def confirm(self, authorization: str | None) -> ApiKey:
        """Return the active key, compared with the shard; for routes that reserve nothing."""
        key = await self.authenticate(authorization)
        try:
            known: bytes | None = await self._connection.call("HGET", keys.key_states(key.organisation_id), key.id)
        except RedisError:
            return key  # as good as the cache: at most FRESH_S old
        if known is None or known.decode() == key.key_state:
            return key
        try:
            return await self.reload(authorization)
        except RedisError:
            raise DependencyDown("API keys cannot be checked right now.", retry_after_s=1) from None

    def was_revoked(self, key_id: str) -> bool:
        """Return whether a revocation of the key was seen lately."""
        return key_id in self._revoked

    def revoked(self, key_id: str) -> None:
        """Take notice of a revocation: who was admitted a moment ago and is not yet in the table must not run on."""
        self.forget(key_id)
        self._revoked[key_id] = None
        if len(self._revoked) > _REVOKED_KEPT:
            self._revoked.popitem(last=False)

    def forget_organisation(self, org: str) -> None:
        """Read an organisation's keys anew at their next requests: what binds them has changed."""
        for key_hash, cached in list(self._cache.items()):
            if cached.key is not None and cached.key.organisation_id == org:
                del self._cache[key_hash]

    def forget(self, key_id: str) -> None:
        """Read a key anew at its next request, whatever its secret: it has changed."""
        for key_hash, cached in list(self._cache.items()):
            if cached.key is not None and cached.key.id == key_id:
                del self._cache[key_hash]

    async def _read(self, key_hash: bytes, cached: _Cached | None) -> ApiKey | None:
        try:
            key = await self._tenants.find_by_hash(key_hash)
        except DATABASE_ERRORS as error:
            if cached is not None and cached.key is not None and self._now_s() - cached.read_s < STALE_S:
                cached.failed_s = self._now_s()
                return cached.key
            log.warning("keys_unavailable", error=str(error))
            raise DependencyDown("API keys cannot be checked right now.", retry_after_s=1) from None
        self._cache[key_hash] = _Cached(key, self._now_s())
        self._cache.move_to_end(key_hash)
        while len(self._cache) > self._max_entries:
            self._cache.popitem(last=False)
        return key


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Return a request's headers; of one that is there twice, the first.

    Litestar's own stay with the request: 1 KB for as long as it streams.
    """
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed([*scope["headers"]])}


def credential(headers: Mapping[str, str]) -> str | None:
    """Return the `Authorization` header of a request, or what it means when the key is in `x-api-key`."""
    authorization = headers.get("authorization")
    if authorization is None and "x-api-key" in headers:
        return f"Bearer {headers['x-api-key']}"
    return authorization


def bearer(authorization: str | None) -> str:
    """Return the key in an `Authorization` header. Raises InvalidApiKey."""
    if not authorization:
        raise InvalidApiKey("You did not provide an API key. Send it as 'Authorization: Bearer pdg_...'.")
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not 0 < len(key) <= _MAX_KEY_CHARACTERS:
        raise InvalidApiKey(f"Incorrect API key provided: {masked(key or scheme)}.")
    return key


def masked(key: str) -> str:
    """Return a key as it may be shown."""
    return f"{key[:8]}***" if len(key) > 12 else "***"


def _usable(key: ApiKey | None) -> ApiKey:
    if key is None:
        raise InvalidApiKey("Incorrect API key provided.")
    if key.state != "active":
        raise InvalidApiKey("This API key was revoked.")
    if key.expires_at is not None and key.expires_at <= dt.datetime.now(dt.UTC):
        raise InvalidApiKey("This API key has expired.")
    return key
