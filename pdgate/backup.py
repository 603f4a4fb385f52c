"""`pdgate backup` and `pdgate restore`: PostgreSQL and the money that only Redis holds.

1. Redis first: every key of the organisations' shards (usage events that wait for billing, reservations, budgets, key
   states) and the workers' own counts that wait.
2. Then PostgreSQL, by `pg_dump`. An event that billing posts in between is in both; posting it again changes nothing.
   The other order would lose it.

What a restore loses is what happened after the backup began; it says so. Prompts are in neither part.
"""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import asyncpg
import msgspec
import typer
from redis.asyncio import Redis

from contracts.environment import asyncpg_url
from contracts.resp import redis_client
from gateway.tenant_read import TENANT_ROLE
from migrations.upgrade import upgrade
from pdgate.connection import database_url, redis_url
from pdgate.output import AsJson, data_console, show_json
from pdgate.preflight import CannotStart
from pdgate.services import postgres_binaries

MANIFEST: Final = "manifest.json"
_DATABASE: Final = "postgres.dump"
_KEYS: Final = "redis.msgpack"
_MONEY_KEYS: Final = (b"pdgate:{s[0-9][0-9]}:*", b"pdgate:{m:*}:attempts*")
_LOCK: Final = b"pdgate:gateways"
_BATCH: Final = 500
_DUMP_S: Final = 3600.0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds. Times are UTC."""

    began: datetime
    pdgate: str
    migration: str
    keys: int
    usage_events_waiting: int
    requests: int
    newest_request: datetime | None
    took_s: float


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore did. `rpo_s` = age of the newest thing it could bring back; `rto_s` = how long it took."""

    keys: int
    requests: int
    usage_events_waiting: int
    rpo_s: float
    rto_s: float


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    expires_unix_ms: int  # 0 = never
    value: bytes  # Redis' own form, of DUMP


Folder = Annotated[Path, typer.Argument(help="Folder of the backup.")]


def backup(folder: Folder, as_json: AsJson = False) -> None:
    """Write a backup of a running installation into a new folder. Nothing has to stop."""
    if folder.exists() and any(folder.iterdir()):
        raise CannotStart(f"{folder} is not empty: every backup gets a folder of its own")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    began, started_s = datetime.now(UTC), time.monotonic()
    num_keys, waiting = asyncio.run(_save_keys(folder / _KEYS))
    _postgres("pg_dump", "--format=custom", "--no-owner", f"--file={folder / _DATABASE}", f"--dbname={database_url()}")
    migration, requests, newest = asyncio.run(_state())
    manifest = Manifest(
        began=began,
        pdgate=version("pdgate"),
        migration=migration,
        keys=num_keys,
        usage_events_waiting=waiting,
        requests=requests,
        newest_request=newest,
        took_s=round(time.monotonic() - started_s, 3),
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    if as_json:
        show_json(manifest)
        return
    data_console().print(
        f"{requests:,} requests, {waiting:,} usage events that wait, {num_keys:,} keys, in {manifest.took_s:.1f} s."
        f"\nA restore brings back all that was settled before {began:%Y-%m-%d %H:%M:%S} UTC."
    )


def restore(
    folder: Folder,
    force: Annotated[bool, typer.Option(help="Replace what is in the databases.")] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a backup back into empty databases. The installation's services must be stopped.

    The schema is brought to this version afterwards. Requests that ran during the backup are settled as lost.
    """
    started_s = time.monotonic()
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise CannotStart(f"{folder} holds no whole backup: {error.strerror} ({MANIFEST})") from None
    except msgspec.DecodeError as error:
        raise CannotStart(f"{folder / MANIFEST}: {error}") from None
    asyncio.run(_check_free(force=force))
    asyncio.run(_make_role())
    _postgres(
        *("pg_restore", "--clean", "--if-exists", "--no-owner", "--exit-on-error", "--single-transaction"),
        *(f"--dbname={database_url()}", str(folder / _DATABASE)),
    )
    upgrade(database_url())
    num_keys = asyncio.run(_load_keys(folder / _KEYS))
    _, requests, _ = asyncio.run(_state())
    done = Restored(
        keys=num_keys,
        requests=requests,
        usage_events_waiting=manifest.usage_events_waiting,
        rpo_s=round((datetime.now(UTC) - manifest.began).total_seconds(), 1),
        rto_s=round(time.monotonic() - started_s, 3),
    )
    if as_json:
        show_json(done)
        return
    data_console().print(
        f"{requests:,} requests and {num_keys:,} keys are back after {done.rto_s:.1f} s (RTO)."
        f"\nLost: what was settled in the {done.rpo_s:,.0f} s since the backup began (RPO)."
        "\nStart the services, then run `pdgate reconcile`."
    )


def _postgres(program: str, *arguments: str) -> None:
    """Run one of PostgreSQL's programs. Raises CannotStart with its last words."""
    beside = postgres_binaries() / program
    found = str(beside) if beside.exists() else shutil.which(program)
    if found is None:
        raise CannotStart(f"{program} is missing: install PostgreSQL's client programs")
    try:
        done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=_DUMP_S, check=False)
    except subprocess.TimeoutExpired:
        raise CannotStart(f"{program} took longer than {_DUMP_S:.0f} s") from None
    if done.returncode:
        raise CannotStart(f"{program} failed: {done.stderr.strip()[-500:]}")


async def _state() -> tuple[str, int, datetime | None]:
    """Return the schema's version, the number of requests and the time of the newest."""
    connection = await asyncpg.connect(asyncpg_url(database_url()).replace("+asyncpg", ""))
    try:
        migration = await connection.fetchval("SELECT version_num FROM alembic_version")
        row = await connection.fetchrow("SELECT count(*), max(at) FROM billing.request")
    finally:
        await connection.close()
    return migration, row[0], row[1]


async def _save_keys(file: Path) -> tuple[int, int]:
    """Write every key of the organisations' shards; return how many, and how many usage events wait in them."""
    redis = redis_client(redis_url())
    num_keys = waiting = 0
    try:
        with file.open("xb") as out:
            async for keys in _batches(redis):
                pipe: Any = redis.pipeline(transaction=False)
                for key in keys:
                    pipe.dump(key)
                    pipe.pexpiretime(key)
                answers = await pipe.execute()
                for key, value, expires in zip(keys, answers[::2], answers[1::2], strict=True):
                    if value is None:
                        continue  # gone since it was listed
                    saved = _Saved(key, max(0, expires), value)
                    packed = msgspec.msgpack.encode(saved)
                    out.write(len(packed).to_bytes(4) + packed)
                    num_keys += 1
                    if key.endswith(b":usage"):
                        waiting += await redis.xlen(key)
    finally:
        await redis.aclose()
    return num_keys, waiting


async def _batches(redis: Redis) -> AsyncIterator[list[bytes]]:
    batch: list[bytes] = []
    for pattern in _MONEY_KEYS:
        async for key in redis.scan_iter(match=pattern, count=_BATCH):
            batch.append(key)
            if len(batch) == _BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


async def _make_role() -> None:
    """Make the role that the dump grants rights to: roles are outside of what a dump of one database holds."""
    connection = await asyncpg.connect(asyncpg_url(database_url()).replace("+asyncpg", ""))
    try:
        if not await connection.fetchval("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", TENANT_ROLE):
            await connection.execute(f"CREATE ROLE {TENANT_ROLE} NOLOGIN")
    finally:
        await connection.close()


async def _check_free(*, force: bool) -> None:
    """Raise CannotStart when services run, or when the databases are in use and may not be replaced."""
    redis = redis_client(redis_url())
    try:
        now_ms = int((await redis.time())[0]) * 1000
        if await redis.zcount(_LOCK, now_ms, "+inf"):
            raise CannotStart("a gateway is running on this Redis: stop the services first")
        used = [key async for keys in _batches(redis) for key in keys]
        if used and not force:
            raise CannotStart(f"Redis holds {len(used)} keys of organisations: --force replaces them")
        for start in range(0, len(used), _BATCH):
            pipe: Any = redis.pipeline(transaction=False)
            for key in used[start : start + _BATCH]:  # of many tags, so not in one command
                pipe.unlink(key)
            await pipe.execute()
    finally:
        await redis.aclose()
    connection = await asyncpg.connect(asyncpg_url(database_url()).replace("+asyncpg", ""))
    try:
        there = await connection.fetchval("SELECT to_regclass('tenancy.organisation') IS NOT NULL")
        if there and not force and await connection.fetchval("SELECT EXISTS (SELECT FROM tenancy.organisation)"):
            raise CannotStart("the database holds organisations: --force replaces them")
    finally:
        await connection.close()


async def _load_keys(file: Path) -> int:
    redis = redis_client(redis_url())
    decoder = msgspec.msgpack.Decoder(_Saved)
    num_keys = 0
    try:
        with file.open("rb") as source:
            while length := source.read(4):
                saved = decoder.decode(source.read(int.from_bytes(length)))
                await redis.restore(
                    saved.key, saved.expires_unix_ms, saved.value, replace=True, absttl=bool(saved.expires_unix_ms)
                )
                num_keys += 1
    finally:
        await redis.aclose()
    return num_keys
