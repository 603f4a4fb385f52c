"""Passwords: argon2id, on threads of their own, and how often somebody may try.

Hashing takes 64 MiB and tens of milliseconds, so at most two run at once; more wait.
"""

import asyncio
import hashlib
import ipaddress
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from redis.asyncio import Redis

from contracts import keys
from contracts.errors import BadRequest, RateLimited

MIN_CHARACTERS: Final = 10
MAX_CHARACTERS: Final = 256
WINDOW_S: Final = 15 * 60
TRIES_OF_ACCOUNT: Final = 100
TRIES_OF_ACCOUNT_FROM_ADDRESS: Final = 10
TRIES_OF_ADDRESS: Final = 50
TRIES_OF_CODE: Final = 5
"""Per person, from wherever: three codes of a million are right at a time, so in a day 480 tries find one in 0.14 %."""

_AT_ONCE: Final = 2


class Passwords:
    """Hashes and checks passwords."""

    def __init__(self) -> None:
        self._hasher = PasswordHasher()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="argon2")
        self._nobodys = ""

    async def hash(self, password: str) -> str:
        """Return what is stored. Raises BadRequest when the password is too short or too long."""
        if not MIN_CHARACTERS <= len(password) <= MAX_CHARACTERS:
            raise BadRequest(f"A password has {MIN_CHARACTERS} to {MAX_CHARACTERS} characters.", param="password")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._hasher.hash, password)

    async def matches(self, stored: str | None, password: str) -> bool:
        """Return whether a password is the stored one; without one it takes as long to say no."""
        if len(password) > MAX_CHARACTERS:
            return False
        if stored is None and not self._nobodys:
            self._nobodys = await self.hash("nobody has this password")
        loop = asyncio.get_running_loop()
        same = await loop.run_in_executor(self._threads, self._verify, stored or self._nobodys, password)
        return same and stored is not None

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _verify(self, stored: str, password: str) -> bool:
        try:
            return self._hasher.verify(stored, password)
        except (VerificationError, InvalidHashError):
            return False


class Tries:
    """Counts attempts to sign in, of an account, of an address, and of both together. Errors: RedisError.

    The limit of an account alone is ten times the one from a single address: who guesses from one place cannot keep
    the account's owner out.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def count(self, account: str, address: str) -> None:
        """Count one attempt before it is looked at. Raises RateLimited."""
        limits = {
            _name("account", account): TRIES_OF_ACCOUNT,
            _name("both", account, address_group(address)): TRIES_OF_ACCOUNT_FROM_ADDRESS,
            _name("address", address_group(address)): TRIES_OF_ADDRESS,
        }
        await self._count(limits, "Too many attempts to sign in. Try again later.")

    async def _count(self, limits: Mapping[str, int], refusal: str) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            for name in limits:
                pipe.incr(name)
                pipe.expire(name, WINDOW_S, nx=True)
                pipe.ttl(name)
            answers: list[Any] = await pipe.execute()
        counted = zip(answers[::3], answers[2::3], limits.values(), strict=True)
        over_s = [ttl_s for tries, ttl_s, limit in counted if tries > limit]
        if over_s:
            raise RateLimited(refusal, retry_after_s=float(max(over_s)))

    async def count_code(self, person_id: str) -> None:
        """Count one one-time code before it is looked at. Raises RateLimited."""
        await self._count({_name("code", person_id): TRIES_OF_CODE}, "Too many codes were wrong. Try again later.")

    async def forget_codes(self, person_id: str) -> None:
        """Forget a person's codes: one was right."""
        await self._redis.delete(_name("code", person_id))

    async def forget(self, account: str, address: str) -> None:
        """Forget an account's attempts from an address: it signed in."""
        await self._redis.delete(_name("account", account), _name("both", account, address_group(address)))


def address_group(address: str) -> str:
    """Return what is counted as one address: the whole one of IPv4, the /64 of IPv6, which one household has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def _name(*parts: str) -> str:
    return keys.sign_in_tries(hashlib.sha256("\n".join(parts).encode()).hexdigest())
