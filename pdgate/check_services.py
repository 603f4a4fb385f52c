"""What `pdgate doctor` asks Valkey (or Redis) and PostgreSQL: are they what money and queues need?"""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from alembic.script import ScriptDirectory
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine

from migrations.upgrade import alembic_config
from pdgate.findings import Check, judged

OLDEST_REDIS: Final = (7, 0)
OLDEST_POSTGRES: Final = 14
MOST_SKEW_MS: Final = 500


class RedisFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of itself; None = it does not say."""

    name: str
    version: str
    aof: bool
    aof_ok: bool
    appendfsync: str | None
    policy: str
    maxmemory_bytes: int
    used_bytes: int
    skew_ms: float
    """Its clock minus ours."""

    @property
    def number(self) -> tuple[int, ...]:
        """The version as numbers."""
        return tuple(int(part) for part in self.version.split(".")[:2] if part.isdigit())


async def redis_facts(redis: Redis) -> RedisFacts:
    """Ask the server. Raises RedisError when it does not answer."""
    info: Any = await redis.info()
    before_s = time.time()
    seconds, micros = await redis.time()
    ours_s = (before_s + time.time()) / 2
    try:
        got: Any = await redis.config_get("appendfsync")
        appendfsync = got.get("appendfsync") or got.get(b"appendfsync")
    except RedisError:  # managed servers do not tell
        appendfsync = None
    if isinstance(appendfsync, bytes):
        appendfsync = appendfsync.decode()
    return RedisFacts(
        name="Valkey" if "valkey_version" in info else "Redis",
        version=str(info.get("valkey_version") or info["redis_version"]),
        aof=bool(info.get("aof_enabled")),
        aof_ok=info.get("aof_last_write_status", "ok") == "ok",
        appendfsync=appendfsync,
        policy=str(info.get("maxmemory_policy", "noeviction")),
        maxmemory_bytes=int(info.get("maxmemory", 0)),
        used_bytes=int(info.get("used_memory", 0)),
        skew_ms=(seconds + micros / 1e6 - ours_s) * 1000,
    )


def redis_checks(facts: RedisFacts) -> Sequence[Check]:
    """Judge what the server said."""
    oldest = ".".join(map(str, OLDEST_REDIS))
    bound = f"{facts.maxmemory_bytes:,} bytes" if facts.maxmemory_bytes else "no bound"
    full = facts.maxmemory_bytes > 0 and facts.used_bytes > 0.8 * facts.maxmemory_bytes
    return [
        judged(
            "Redis version",
            f"{facts.name} {facts.version}",
            [
                (
                    facts.number < OLDEST_REDIS,
                    f"use Valkey, or Redis {oldest} or newer: older ones lack XAUTOCLAIM's list",
                )
            ],
        ),
        judged(
            "Redis append-only file",
            f"{'on' if facts.aof else 'off'}, appendfsync {facts.appendfsync or 'not told'}",
            [
                (
                    not facts.aof,
                    "set `appendonly yes`: usage that is not billed yet lives in Redis, and a restart loses it",
                ),
                (not facts.aof_ok, "the last write failed: look at its disk"),
                (
                    facts.aof and facts.appendfsync == "no",
                    "set `appendfsync everysec` (a power cut costs 1 s of events) or `always`",
                ),
            ],
        ),
        judged(
            "Redis eviction",
            f"maxmemory-policy {facts.policy}, {bound}, {facts.used_bytes:,} bytes in use",
            [
                (
                    facts.policy != "noeviction",
                    "set `maxmemory-policy noeviction`: every other policy may throw usage and budgets away",
                ),
                (full, "raise maxmemory: more than 80 % is in use, and writes are refused when it is full"),
            ],
        ),
        _clock("Redis clock", facts.skew_ms),
    ]


async def postgres_checks(engine: AsyncEngine) -> Sequence[Check]:
    """Ask PostgreSQL and judge. Raises SQLAlchemyError or OSError when it does not answer."""
    heads = set(ScriptDirectory.from_config(alembic_config()).get_heads())
    async with engine.connect() as db:
        before_s = time.time()
        theirs = (await db.execute(text("SELECT extract(epoch FROM clock_timestamp())"))).scalar_one()
        skew_ms = (float(theirs) - (before_s + time.time()) / 2) * 1000
        number = int((await db.execute(text("SHOW server_version_num"))).scalar_one())
        fsync = str((await db.execute(text("SHOW fsync"))).scalar_one())
        try:
            there = set((await db.execute(text("SELECT version_num FROM alembic_version"))).scalars())
        except ProgrammingError:
            there = set()
    return [
        judged(
            "PostgreSQL version",
            str(number // 10_000),
            [(number < OLDEST_POSTGRES * 10_000, f"use PostgreSQL {OLDEST_POSTGRES} or newer")],
        ),
        judged(
            "PostgreSQL migrations",
            f"at {', '.join(sorted(there)) or 'none'}, this version of pdgate is at {', '.join(sorted(heads))}",
            [(there != heads, _migrate(there))],
        ),
        judged(
            "PostgreSQL durability",
            f"fsync {fsync}",
            [(fsync != "on", "set `fsync = on`: a crash may lose or tear the ledger")],
        ),
        _clock("PostgreSQL clock", skew_ms),
    ]


def _migrate(there: set[str]) -> str:
    known = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if there - known:
        return "this database is of a newer pdgate: install that version, there is no way back"
    return "run `pdgate init` of this version: it upgrades and changes nothing else that is there (docs/upgrade.md)"


def _clock(name: str, skew_ms: float) -> Check:
    return judged(
        name,
        f"{skew_ms:+.0f} ms from ours",
        [(abs(skew_ms) > MOST_SKEW_MS, "run NTP (chrony) on both machines: deadlines, leases and prices go by clocks")],
    )
