"""`python -m billing` as users run it: from settled requests to rows, through kills and a database that is away."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from billing_rig import DEADLINE_S, usage_event
from typer.testing import CliRunner

from billing.consumer import usage_streams
from billing.database import create_engine
from billing.delivery import Backoff
from contracts import keys
from contracts.identity import shard_of
from contracts.resp import redis_client
from contracts.wire import FIELD, encode
from migrations.upgrade import upgrade
from pdgate.cli import app
from pdgate.services import start_postgres

REPOSITORY = Path(__file__).parents[2]
MOST_HELD = 2 * 3 * 500  # two consumers by default; one read takes about two batches


@contextlib.contextmanager
def billing(redis_url, database_url, catalog_file, **more):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BILLING_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "billing"],
        env=environ
        | {
            "BILLING_REDIS_URL": redis_url,
            "BILLING_DATABASE_URL": database_url,
            "BILLING_CATALOG": str(catalog_file),
            "BILLING_CLAIM_IDLE_MS": "500",
        }
        | more,
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


async def emit(redis_url, events):
    client = redis_client(redis_url)
    pipe = client.pipeline(transaction=False)
    for event in events:
        pipe.xadd(keys.usage_stream(shard_of(event.org)), {FIELD: encode(event)})
    await pipe.execute()
    await client.aclose()


async def until_drained(redis_url):
    client = redis_client(redis_url)
    async with asyncio.timeout(DEADLINE_S):
        while sum([await client.xlen(keys.usage_stream(shard)) for shard in range(64)]):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    await client.aclose()


async def count(database_url, table="request"):
    engine = create_engine(database_url)
    async with engine.connect() as conn:
        number = (await conn.exec_driver_sql(f"SELECT count(*) FROM billing.{table}")).scalar()
    await engine.dispose()
    return number


async def test_killed_again_and_again_under_load_it_posts_every_event_once(redis_url, database_url, catalog_file):
    events = [usage_event(org=f"org_{n % 13}") for n in range(800)]
    for start in (0, 400):
        await emit(redis_url, events[start : start + 400])
        with billing(redis_url, database_url, catalog_file, BILLING_BATCH_SIZE="10") as process:
            async with asyncio.timeout(DEADLINE_S):
                before = start // 2
                while await count(database_url) <= before:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.02)
            process.send_signal(signal.SIGKILL)
    with billing(redis_url, database_url, catalog_file) as process:
        await until_drained(redis_url)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 5) == 0
    assert await count(database_url) == 800
    assert await count(database_url, "usage_record") == 2400
    assert await count(database_url, "ledger_transaction") == 800


async def test_while_postgres_is_away_nothing_is_lost_and_everything_drains_afterwards(
    redis_url, service_folder, catalog_file
):
    """Also when billing is killed and started meanwhile. What waits is in Redis, not in the process."""
    waiting = 4000

    def start():
        return start_postgres(service_folder / "away", durable=False)

    client = redis_client(redis_url)
    service = await asyncio.to_thread(start)
    try:
        await asyncio.to_thread(upgrade, service.url)
        with billing(redis_url, service.url, catalog_file):
            await emit(redis_url, [usage_event() for _ in range(10)])
            await until_drained(redis_url)
            await asyncio.to_thread(service.stop)
            await emit(redis_url, [usage_event(org=f"org_{n % 13}") for n in range(waiting)])
            async with asyncio.timeout(DEADLINE_S):
                while not await held(client):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.02)
            assert await held(client) <= MOST_HELD < waiting
        with billing(redis_url, service.url, catalog_file):  # the first was killed; this one cannot even read prices
            pass
        with billing(redis_url, service.url, catalog_file) as process:
            assert sum([await client.xlen(stream) for stream in usage_streams()]) == waiting
            service = await asyncio.to_thread(start)
            await until_drained(redis_url)
            assert psutil.Process(process.pid).memory_info().rss < 150e6
        assert await count(service.url) == waiting + 10
        assert await count(service.url, "ledger_transaction") == waiting + 10
        assert sum([await client.xlen(dead) for dead in usage_streams().values()]) == 0
    finally:
        await client.aclose()
        await asyncio.to_thread(service.stop)


async def held(client):
    """Return how many entries consumers hold: what they have read and not acknowledged."""
    return sum(
        [
            group["pending"]
            for stream in usage_streams()
            if await client.exists(stream)
            for group in await client.xinfo_groups(stream)
        ]
    )


async def test_a_batch_that_fails_is_tried_again_ever_more_slowly_and_never_after_more_than_five_seconds(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("billing.delivery.sleep", sleep)
    backoff = Backoff()
    for _ in range(20):
        await backoff.wait()
    assert all(
        0.5 * longest <= waited <= longest
        for waited, longest in zip(waits, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2], strict=False)
    )
    assert all(2.5 <= waited <= 5.0 for waited in waits[6:])
    assert sum(waits) < 20 * 5, "an hour is some thousand tries, not millions"
    backoff.reset()
    await backoff.wait()
    assert waits[-1] <= 0.1


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"BILLING_CATALOG": "/nowhere/models.toml"}, "BILLING_CATALOG: /nowhere/models.toml: No such file"),
        ({"BILLING_METRICS_LISTEN": "9000"}, "BILLING_METRICS_LISTEN: '9000' is not host:port"),
        ({"BILLING_STRIPE_API_KEY": "sk_test_1"}, "BILLING_STRIPE_WEBHOOK_SECRETS: must be set"),
        ({"BILLING_DATABASE_URL": "mysql://x"}, "DATABASE_URL must start with postgresql://"),
    ],
)
async def test_bad_settings_end_it_with_one_line(redis_url, database_url, catalog_file, more, line):
    with billing(redis_url, database_url, catalog_file, **more) as process:
        _, error = await asyncio.to_thread(process.communicate, timeout=30)
        assert process.returncode != 0
        assert error.strip().splitlines()[-1].startswith(line), error
        assert "Traceback" not in error


async def test_with_a_token_it_serves_admin_calls_at_the_address_that_it_publishes(
    redis_url, database_url, catalog_file, monkeypatch
):
    for name, value in {
        "DATABASE_URL": database_url, "REDIS_URL": redis_url, "PDGATE_CATALOG": str(catalog_file),
        "PDGATE_ADMIN_TOKEN": "t0ken",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    client = redis_client(redis_url)
    with billing(redis_url, database_url, catalog_file, BILLING_ADMIN_TOKEN="t0ken") as process:
        async with asyncio.timeout(DEADLINE_S):
            while not await client.exists(keys.BILLING_ADMIN):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        done = await asyncio.to_thread(CliRunner().invoke, app, ("budgets", "set", "5", "--org", "org_a", "--json"))
        assert done.exit_code == 0, done.output or done.exception
        assert await client.hget(keys.budget("org_a", "org", "org_a"), "limit") == b"5000000000"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
    await client.aclose()


async def test_the_drift_gauge_has_a_series_also_while_nothing_drifts(redis_url, database_url, catalog_file):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with billing(redis_url, database_url, catalog_file, BILLING_METRICS_LISTEN=address):
        await emit(redis_url, [usage_event()])
        await until_drained(redis_url)
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{address}/metrics")).text
    series = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in text.splitlines() if line[:1] != "#"}
    assert float(series["pdgate_ledger_drift_ratio"]) == 0.0
    assert float(series["pdgate_usage_dead_letters"]) == 0.0
