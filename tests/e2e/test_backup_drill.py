"""The drill: back up under load, lose both databases, restore, and the books still agree."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import httpx
import pytest

from pdgate.services import start_postgres, start_valkey
from tests.processes import REPOSITORY, Stack, until


def pdgate(stack: Stack, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "DATABASE_URL": stack.database_url,
        "REDIS_URL": stack.redis_url,
        "PDGATE_CATALOG": str(stack.catalog_file),
    }
    return subprocess.run(
        [sys.executable, "-m", "pdgate.cli", *words], env=environment, capture_output=True, text=True, check=check
    )


async def ask(stack: Stack, number: int) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"Question {number}"}], "max_tokens": 10}
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as client:
        answer = await client.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {stack.api_key}"}
        )
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


async def billed(database_url: str) -> dict[str, int]:
    connection = await asyncpg.connect(database_url)
    try:
        rows = await connection.fetch("SELECT request_id::text, cost FROM billing.request")
    finally:
        await connection.close()
    return {row["request_id"]: row["cost"] for row in rows}


@pytest.fixture
def other_databases(tmp_path: Path, stack_folder: Path):
    valkey = start_valkey(stack_folder / "valkey-2")
    postgres = start_postgres(stack_folder / "pg-2", durable=False)
    yield valkey.url, postgres.url
    postgres.stop()
    valkey.stop()


async def test_a_restored_installation_bills_what_the_lost_one_had_settled(
    stack: Stack, other_databases: tuple[str, str], tmp_path: Path
) -> None:
    stack.start()
    await stack.ready()
    first = {await ask(stack, number) for number in range(5)}
    await until(lambda: asyncio.shield(_all_billed(stack.database_url, first)), 30)
    stack.kill("billing")  # from here on usage events wait in Redis only
    waiting = {await ask(stack, number) for number in range(5, 9)}
    folder = tmp_path / "backup"
    made = json.loads(pdgate(stack, "backup", str(folder), "--json").stdout)
    assert (made["requests"], made["usage_events_waiting"]) == (5, 4)
    refused = pdgate(stack, "backup", str(folder), check=False)
    assert refused.returncode == 2
    assert "not empty" in refused.stderr
    refused = pdgate(stack, "restore", str(folder), "--force", check=False)
    assert refused.returncode == 2
    assert "a gateway is running" in refused.stderr
    stack.stop()

    redis_url, database_url = other_databases
    again = Stack(
        folder=stack.folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=stack.catalog_file,
        models_dir=stack.models_dir,
    )
    again.api_key = stack.api_key
    done = json.loads(pdgate(again, "restore", str(folder), "--json").stdout)
    assert done["requests"] == 5
    assert done["rto_s"] > 0
    refused = pdgate(again, "restore", str(folder), check=False)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    again.add_gateway()
    again.add_scheduler()
    again.add_billing()
    again.add_worker("prefill-0", role="prefill")
    again.add_worker("decode-0", role="decode")
    again.start()
    try:
        await again.ready()
        late = {await ask(again, 10)}  # the restored key works
        await until(lambda: asyncio.shield(_all_billed(database_url, first | waiting | late)), 30)
        costs = await billed(database_url)
        assert set(costs) == first | waiting | late
        assert all(costs.values())
        await until(lambda: _reconciled(again), 30, every_s=1)
    finally:
        again.stop()


def _reconciled(stack: Stack) -> bool:
    """Return whether the books agree with the workers' own counts, up to this second."""
    found = pdgate(stack, "reconcile", "--grace", "0", "--json", check=False)
    return json.loads(found.stdout)["differences"] == []


async def _all_billed(database_url: str, wanted: set[str]) -> bool:
    return wanted <= set(await billed(database_url))
