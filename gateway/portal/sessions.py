"""Sessions of browsers, in Redis.

1. `begin` makes a random token, which only the browser has; Redis has its SHA-256. A token that the browser had before
   the sign-in is worth nothing afterwards.
2. A session ends after `idle_s` without a request, and `absolute_s` after the sign-in whatever happens.
3. `end_all` ends every session of a person: on request, with a new password, when an account is closed.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from contracts import keys

IDLE_S: Final = 2 * 3600
ABSOLUTE_S: Final = 12 * 3600
OPENID: Final = "openid"


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One signed-in browser."""

    person_id: str
    organisation_id: str  # what it looks at; empty = the first one
    csrf: str  # what forms and scripts of our own pages send along
    began_ms: int
    how: str  # password, link, each with +code or +recovery where they have a second factor; openid


class Sessions:
    """Makes, finds and ends sessions. Errors: RedisError."""

    def __init__(
        self,
        redis: Redis,
        *,
        idle_s: float = IDLE_S,
        absolute_s: float = ABSOLUTE_S,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._redis = redis
        self._idle_ms = int(idle_s * 1000)
        self._absolute_ms = int(absolute_s * 1000)
        self._now_s = now_s

    async def begin(self, person_id: str, *, how: str, replaces: str = "") -> str:
        """Return the token of a new session; the one with the token `replaces` ends."""
        token = secrets.token_urlsafe(32)
        session = Session(
            person_id=person_id,
            organisation_id="",
            csrf=secrets.token_urlsafe(32),
            began_ms=self._now_ms(),
            how=how,
        )
        name = _hash(token)
        async with self._redis.pipeline(transaction=True) as pipe:
            if replaces:
                pipe.delete(keys.session(_hash(replaces)))
            pipe.set(keys.session(name), msgspec.msgpack.encode(session), px=self._left_ms(session))
            pipe.sadd(keys.person_sessions(person_id), name)
            pipe.pexpire(keys.person_sessions(person_id), self._absolute_ms)
            await pipe.execute()
        return token

    async def find(self, token: str) -> Session | None:
        """Return the session of a token and let it live on."""
        if not token:
            return None
        name = keys.session(_hash(token))
        raw: Any = await self._redis.getex(name, px=self._idle_ms)
        if raw is None:
            return None
        session = msgspec.msgpack.decode(raw, type=Session)
        left_ms = self._left_ms(session)
        if left_ms <= 0:
            return None
        if left_ms < self._idle_ms:  # its absolute end is near
            await self._redis.pexpire(name, left_ms)
        return session

    async def look_at(self, token: str, session: Session, organisation_id: str) -> None:
        """Make a session look at another organisation."""
        moved = msgspec.structs.replace(session, organisation_id=organisation_id)
        await self._redis.set(keys.session(_hash(token)), msgspec.msgpack.encode(moved), xx=True, keepttl=True)

    async def end(self, token: str, session: Session) -> None:
        """End one session."""
        name = _hash(token)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.session(name))
            pipe.srem(keys.person_sessions(session.person_id), name)
            await pipe.execute()

    async def end_all(self, person_id: str) -> int:
        """End every session of a person; return how many there were."""
        own: Any = self._redis.smembers(keys.person_sessions(person_id))
        names = [keys.session(name.decode()) for name in await own]
        gone: int = await self._redis.delete(*names, keys.person_sessions(person_id))
        return max(0, gone - 1)

    async def end_others(self, token: str, person_id: str) -> None:
        """End every session of a person but the one with this token."""
        own: Any = self._redis.smembers(keys.person_sessions(person_id))
        others = [name for name in await own if name.decode() != _hash(token)]
        if others:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(*(keys.session(name.decode()) for name in others))
                pipe.srem(keys.person_sessions(person_id), *others)
                await pipe.execute()

    def _left_ms(self, session: Session) -> int:
        return min(self._idle_ms, session.began_ms + self._absolute_ms - self._now_ms())

    def _now_ms(self) -> int:
        return int(self._now_s() * 1000)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
