"""Plays the demo week into a running stack: `python -m pdgate.demo_week FILE`, started by `pdgate up` on new data.

1. `FILE` says when the week ends; a run that was broken off is repeated with it, and changes nothing twice.
2. The demo organisation, its projects and keys (whose secrets nobody gets), and partitions for the days gone by.
3. Usage events go to the organisation's stream and are rated and posted by billing, as any others; when they are
   posted, the workers' records follow. A hundred at a time, so that real requests find billing free.

Prints the share that is done, 0 to 100, a line each.
"""

import asyncio
import datetime as dt
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import tables
from billing.moments import moment
from billing.partitions import ensure_partitions
from billing.prices import read_book
from contracts import keys
from contracts.catalog import Catalog, read_catalog
from contracts.demo import DEMO_WEEK_ORG
from contracts.identity import shard_of
from contracts.slo import SloTarget
from contracts.wire import FIELD, encode
from gateway.tenants import Tenants
from pdgate.connection import open_database, open_redis
from pdgate.demo_traffic import KEYS, WEEK_S, DemoKey, Played, Week, played
from pdgate.layout import catalog_file

ORGANISATION: Final = "Demo week"
_NICENESS: Final = 15
_CHUNK: Final = 100
_PAUSE_S: Final = 0.1
_POSTED_WITHIN_S: Final = 120.0
_LOOK_EVERY_S: Final = 0.25


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says."""

    end_unix_ms: int
    done: bool = False


def read_state(file: Path) -> State | None:
    """Return what is to be played, None when nothing is."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError):
        return None


def write_state(file: Path, state: State) -> None:
    """Replace the file in one step."""
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(state))
    draft.replace(file)


async def play_week(
    engine: AsyncEngine, redis: Redis, catalog: Catalog, end_unix_ms: int, *, share: float = 1.0
) -> int:
    """Play the week that ends then; return its number of requests. Raises TimeoutError when billing posts nothing.

    `share`: of the usual number of requests.
    """
    week = await _week(engine, catalog, end_unix_ms, share)
    if week is None:
        return 0
    async with engine.begin() as connection:
        first = moment(end_unix_ms - WEEK_S * 1000).date()
        await ensure_partitions(connection, first, (dt.datetime.now(dt.UTC).date() - first).days + 2)
    found = await asyncio.to_thread(played, week)
    _say(10)
    stream = keys.usage_stream(shard_of(DEMO_WEEK_ORG))
    await _send(redis, stream, [encode(one.event) for one in found], (10, 60))
    await _until_posted(engine, len(found))
    _say(70)
    await _send(redis, keys.attempts(week.pool), _records(found), (70, 100))
    return len(found)


async def _week(engine: AsyncEngine, catalog: Catalog, end_unix_ms: int, share: float) -> Week | None:
    """Return what is to be played: the first model that is no adapter and has a list price; None without one."""
    async with engine.begin() as connection:
        book = await read_book(connection)
    for name, model in catalog.models.items():
        price = book.in_force(name, end_unix_ms - WEEK_S * 1000, DEMO_WEEK_ORG, "default")
        if not model.adapter and price is not None and model.context_tokens >= 2048:
            return Week(
                end_unix_ms=end_unix_ms,
                model=name,
                pool=catalog.pool_of(name),
                price=price,
                target=model.tiers.get("default", SloTarget()),
                context_tokens=model.context_tokens,
                owners=await _owners(Tenants(engine)),
                share=share,
            )
    return None


async def _owners(tenants: Tenants) -> Mapping[str, DemoKey]:
    """Return the organisation's keys by name; make what is missing."""
    if await tenants.find_organisation(DEMO_WEEK_ORG) is None:
        await tenants.create_organisation(ORGANISATION, is_demo=True, organisation_id=DEMO_WEEK_ORG)
    projects = {one.name: one.id for one in await tenants.list_projects(DEMO_WEEK_ORG)}
    known = {one.name: one for one in await tenants.list_keys(DEMO_WEEK_ORG)}
    owners: dict[str, DemoKey] = {}
    for project, names in KEYS.items():
        if project not in projects:
            projects[project] = (await tenants.create_project(DEMO_WEEK_ORG, project)).id
        for name in names:
            if name not in known:
                known[name], _ = await tenants.create_key(DEMO_WEEK_ORG, projects[project], name)
            owners[name] = DemoKey(project=projects[project], key_id=known[name].id)
    return owners


async def _send(redis: Redis, stream: str, entries: Sequence[bytes], shares: tuple[int, int]) -> None:
    for start in range(0, len(entries), _CHUNK):
        pipeline = redis.pipeline(transaction=False)
        for entry in entries[start : start + _CHUNK]:
            pipeline.xadd(stream, {FIELD: entry})
        await pipeline.execute()
        _say(shares[0] + (shares[1] - shares[0]) * (start + _CHUNK) // max(1, len(entries)))
        await asyncio.sleep(_PAUSE_S)


async def _until_posted(engine: AsyncEngine, number: int) -> None:
    request = tables.request.c
    query = sa.select(sa.func.count()).select_from(tables.request).where(request.organisation == DEMO_WEEK_ORG)
    async with asyncio.timeout(_POSTED_WITHIN_S):
        while True:
            async with engine.begin() as connection:
                if int(await connection.scalar(query) or 0) >= number:
                    return
            await asyncio.sleep(_LOOK_EVERY_S)


def _records(found: Sequence[Played]) -> Sequence[bytes]:
    return [encode(record) for one in found for record in one.records]


def _say(percent: int) -> None:
    print(min(100, percent), flush=True)


async def _main(file: Path) -> None:
    state = read_state(file)
    if state is None or state.done:
        return
    async with open_database() as engine, open_redis() as redis:
        await play_week(engine, redis, read_catalog(catalog_file()), state.end_unix_ms)
    write_state(file, msgspec.structs.replace(state, done=True))


def new_state() -> State:
    """Return the state of a week that ends a moment ago."""
    return State(end_unix_ms=int(time.time() * 1000) - 60_000)


if __name__ == "__main__":
    os.nice(_NICENESS)
    asyncio.run(_main(Path(sys.argv[1])))
