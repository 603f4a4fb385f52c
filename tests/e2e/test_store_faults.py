"""kill -9 of workers that share a KV store: every answer goes on, byte for byte, and is billed once."""

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from redis.asyncio import Redis

from tests.conftest import CATALOG
from tests.e2e.ledger_view import requests
from tests.e2e.test_faults import check_the_books, load
from tests.processes import Stack, until

pytestmark = pytest.mark.e2e


@pytest.fixture
async def store_stack(stack_folder: Path, redis_url: str, database_url: str, models_dir: Path) -> AsyncIterator[Stack]:
    """A prefill and two decode workers, by label, on one folder of pages."""
    catalog_file = stack_folder / "models.toml"
    catalog_file.write_text(CATALOG.replace("context_tokens = 2048", 'context_tokens = 2048\nhand_off = "store"'))
    stack = Stack(
        folder=stack_folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=models_dir,
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    environ = {"WORKER_STEP_MS": "5", "WORKER_HAND_OFF": "store", "WORKER_STORE_DIR": str(stack_folder / "pages")}
    stack.add_worker("prefill-0", role="prefill", environ=environ)
    stack.add_worker("decode-0", role="decode", environ=environ)
    stack.add_worker("decode-1", role="decode", environ=environ)
    stack.start()
    await stack.ready()
    await until(lambda: all("worker_ready" in stack.log(f"decode-{n}") for n in (0, 1)), 30)
    yield stack
    stack.stop()


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_killing_a_worker_cuts_no_stream(
    store_stack: Stack, database: asyncpg.Connection, redis: Redis, victim: str
):
    undisturbed = [s.text for s in await load(store_stack, "billing", after_tokens=0)]
    assert (await requests(database)) is not None
    seen = await load(store_stack, victim, after_tokens=1000, restart=False)
    assert all(s.done for s in seen), f"killing {victim} cut a stream"
    assert [s.text for s in seen] == undisturbed
    await check_the_books(seen, database, redis)
    rows = await requests(database)
    assert {rows[s.rid]["hand_off"] for s in seen} <= {"store", None}
    if victim == "decode-0":
        assert max(rows[s.rid]["attempts"] for s in seen) == 2, "it was killed too late to prove anything"
    again = await load(store_stack, "billing", after_tokens=0)  # by those that are left, whatever their labels say
    assert [s.text for s in again] == undisturbed
    await check_the_books(again, database, redis)
