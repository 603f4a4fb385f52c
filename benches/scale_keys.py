"""What a key costs when there are many: the part `keys` of `python -m benches.scale`.

The keys are in PostgreSQL, spread evenly over a thousand organisations. A gateway is asked for `/v1/models`, once with
each of some keys that it has not seen, which it has to look up, and then with the same ones again, which it knows.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import asyncpg
import httpx
import psutil

from benches.cpu import snapshot
from pdgate.services import Service
from tests.processes import Stack

_ORGANISATIONS: Final = 1_000
_ASKED: Final = 900
"""Fewer than a gateway keeps (GATEWAY_KEY_CACHE_ENTRIES), and asked twice before it reads them again."""

_WARMING: Final = 50

_TENANTS: Final = """
INSERT INTO tenancy.organisation (id, name, is_demo)
SELECT 'org_scale' || n, 'scale ' || n, false FROM generate_series(0, $1 - 1) n
"""
_PROJECTS: Final = """
INSERT INTO tenancy.project (id, organisation_id, name)
SELECT 'proj_scale' || n, 'org_scale' || n, 'scale' FROM generate_series(0, $1 - 1) n
"""
_KEYS: Final = """
INSERT INTO tenancy.api_key (id, organisation_id, project_id, name, prefix, hash)
SELECT 'key_scale' || n, 'org_scale' || n % $1, 'proj_scale' || n % $1, 'scale', 'pdg_scale',
  sha256(convert_to('pdg_scale' || n, 'UTF8'))
FROM generate_series(0, $2 - 1) n
"""


async def keys_among(number: int, stack: Stack, valkey: Service, postgres: Service) -> dict[str, float]:
    """Return CPU per call with an unknown and with a known key, all processes, and what PostgreSQL keeps per key."""
    await stack.seed()
    kept = await _fill(postgres.url, number)
    stack.add_gateway()
    try:
        stack.start()
        await _answers(stack)
        gateway = stack.processes["gateway"].pid
        pids = {"gateway": gateway, "valkey": valkey.process.pid, "postgres": postgres.process.pid}
        await _ask(stack.url, [f"pdg_scale{number - 1 - n}" for n in range(_WARMING)])  # connections, statements
        count = min(number - _WARMING, _ASKED)
        asked = [f"pdg_scale{n * ((number - _WARMING) // count)}" for n in range(count)]
        memory = psutil.Process(gateway).memory_info().rss
        first = await _spent(pids, stack.url, asked)
        grown = psutil.Process(gateway).memory_info().rss - memory
        again = await _spent(pids, stack.url, asked)
    finally:
        stack.stop()
    return {"us": first, "known_us": again, "bytes": kept, "gateway_bytes": grown / len(asked)}


async def _fill(url: str, number: int) -> float:
    """Make the keys; return bytes per key with its indexes."""
    database = await asyncpg.connect(url)
    try:
        await database.execute(_TENANTS, _ORGANISATIONS)
        await database.execute(_PROJECTS, _ORGANISATIONS)
        await database.execute(_KEYS, _ORGANISATIONS, number, timeout=600)
        await database.execute("VACUUM ANALYZE tenancy.api_key", timeout=600)
        size: int = await database.fetchval("SELECT pg_total_relation_size('tenancy.api_key')")
    finally:
        await database.close()
    return size / number


async def _answers(stack: Stack) -> None:
    async with httpx.AsyncClient(timeout=5) as client:
        for _ in range(600):
            try:
                if (await client.get(f"{stack.url}/livez")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.1)
    raise TimeoutError("the gateway does not answer")


async def _spent(pids: dict[str, int], url: str, asked: Sequence[str]) -> float:
    before = snapshot(pids)
    await _ask(url, asked)
    after = snapshot(pids)
    return sum(after[name] - before[name] for name in pids) / len(asked) / 1000


async def _ask(url: str, asked: Sequence[str]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        for key in asked:
            answer = await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
