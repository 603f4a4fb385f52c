"""`python -m benches.billing`: ingest, totals and invoice close against their bars (benches/results/billing.json).

Ingest is the real process over real Valkey and PostgreSQL (fsync on): usage events wait in their streams, then
`python -m billing` starts, and the clock runs from its first committed row to the empty streams. A meter row is one
usage record; a request has three, and beside them one request row, a ledger transaction with four entries and a rollup.
Totals and close read the rollup, so their ten million events are folded into it by SQL; the request rows are not made.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import psutil
from redis.asyncio import Redis

from benches.cpu import cpu_ns
from billing.database import create_engine
from billing.invoice_book import tenants_to_invoice_across_tenants
from billing.invoices import close_period
from billing.periods import month_of
from billing.prices import set_price
from billing.queries import usage_totals
from contracts import keys
from contracts.identity import NUM_SHARDS, new_rid, shard_of
from contracts.rating import Meter, Price, Tokens, cost
from contracts.resp import redis_client
from contracts.slo import Timings
from contracts.usage import Outcome, UsageEvent
from contracts.wire import FIELD, encode
from migrations.upgrade import upgrade
from pdgate.services import start_postgres, start_valkey

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "benches" / "results" / "billing.json"
METERS = 3
PRICE = Price(version=1, model="m", prefill_computed=100_000_000, prefill_cached=20_000_000, decode=400_000_000)
CATALOG = """
currency = "EUR"
[models.m]
tokenizer = "m"
context_tokens = 2048
[models.m.price]
prefill_computed = "0.10"
prefill_cached = "0.02"
decode = "0.40"
"""

# Ten million requests of a month, as posting would have rolled them up: `size` tenants, each request in some hour.
FOLD = """
INSERT INTO billing.usage_hourly (organisation, hour, project, key_id, model, tier, batch, billable, meter,
    price_version, scope, tokens, cost, requests)
SELECT organisation, hour, 'proj', key_id, 'm', 'default', false, true, meter, 1, 'own', sum(tokens),
    sum(tokens * price), count(*)
FROM (
    SELECT $4 || (n % $3) AS organisation, $1::timestamptz + make_interval(hours => (n * 7919 % $5)::int) AS hour,
        'key_' || (n / $3 % $6) AS key_id, n
    FROM generate_series(0, $2::bigint - 1) AS n
) AS request
CROSS JOIN (VALUES ('prefill_computed'::billing.meter, 400, 100), ('prefill_cached', 100, 20), ('decode', 150, 400))
    AS one (meter, tokens, price)
GROUP BY organisation, hour, key_id, meter
"""


def event(number: int, at_ms: int, *, orgs: int) -> UsageEvent:
    tokens = Tokens(prefill_computed=100 + number % 900, prefill_cached=number % 300, decode=20 + number % 200)
    return UsageEvent(
        rid=new_rid(at_ms), org=f"org_{number % orgs}", project=f"proj_{number % orgs}_{number % 3}",
        key_id=f"key_{number % orgs}_{number % 7}", model="m", pool="m", tier="default", outcome=Outcome.FINISHED,
        finish_reason="stop", tokens=tokens, price=PRICE, cost=cost(tokens, PRICE), prefill_worker="prefill-1",
        decode_worker="decode-1", slo_met=True,
        timings=Timings(ttft_ms=120.5, decode_ms=900.0, decode_tokens=tokens.decode, total_ms=1100.0),
    )  # fmt: skip


async def fill(redis: Redis, requests: int, *, orgs: int, minutes: int) -> None:
    """Put events of the last minutes into their streams."""
    start_ms = int(time.time() * 1000) - minutes * 60_000
    pipe = redis.pipeline(transaction=False)
    for number in range(requests):
        one = event(number, start_ms + number * minutes * 60_000 // requests, orgs=orgs)
        pipe.xadd(keys.usage_stream(shard_of(one.org)), {FIELD: encode(one)})
        if number % 2000 == 1999:
            await pipe.execute()
    await pipe.execute()


async def waiting(redis: Redis) -> int:
    pipe = redis.pipeline(transaction=False)
    for shard in range(NUM_SHARDS):
        pipe.xlen(keys.usage_stream(shard))
    return sum(await pipe.execute())


async def ingest(
    folder: Path, requests: int, *, orgs: int, consumers: int, processes: int, batch: int
) -> dict[str, Any]:
    valkey = await asyncio.to_thread(start_valkey, folder / "valkey")
    postgres = await asyncio.to_thread(start_postgres, folder / "pg")
    await asyncio.to_thread(upgrade, postgres.url)
    (folder / "models.toml").write_text(CATALOG)
    redis = redis_client(valkey.url)
    await fill(redis, requests, orgs=orgs, minutes=60)
    environ = os.environ | {
        "BILLING_REDIS_URL": valkey.url, "BILLING_DATABASE_URL": postgres.url,
        "BILLING_CATALOG": str(folder / "models.toml"), "BILLING_CONSUMERS": str(consumers),
        "BILLING_BATCH_SIZE": str(batch), "BILLING_LOG_LEVEL": "WARNING",
    }  # fmt: skip
    billing = [
        subprocess.Popen([sys.executable, "-m", "billing"], cwd=REPOSITORY, env=environ)  # noqa: ASYNC220 - at once
        for _ in range(processes)
    ]
    try:
        while (left := await waiting(redis)) == requests:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        pids = {
            "billing": [one.pid for one in billing],
            "postgres": [postgres.process.pid],
            "valkey": [valkey.process.pid],
        }
        before = {name: sum(map(cpu_ns, group)) for name, group in pids.items()}
        started, first, peak = time.monotonic(), left, 0
        while (left := await waiting(redis)) > 0:
            peak = max(peak, *(psutil.Process(one.pid).memory_info().rss for one in billing))
            await asyncio.sleep(0.05)
        elapsed = time.monotonic() - started
        rows = METERS * first
        cpu = {name: (sum(map(cpu_ns, group)) - before[name]) / 1000 / rows for name, group in pids.items()}
        connection = await asyncpg.connect(postgres.url)
        posted = await connection.fetchval("SELECT count(*) FROM billing.request")
        unbalanced = await connection.fetchval("SELECT sum(amount) FROM billing.ledger_entry")
        await connection.close()
        assert (posted, unbalanced) == (requests, 0)
        return {
            "requests": requests, "processes": processes, "consumers": consumers, "batch": batch,
            "rows_per_s": round(rows / elapsed), "requests_per_s": round(first / elapsed),
            "cpu_us_per_row": {name: round(value, 2) for name, value in cpu.items()},
            "cpu_us_per_row_billing_and_postgres": round(cpu["billing"] + cpu["postgres"], 2),
            "rss_mb": round(peak / 2**20, 1),
        }  # fmt: skip
    finally:
        for one in billing:
            one.kill()
            one.wait()
        await redis.aclose()
        postgres.stop()
        valkey.stop()


async def totals_and_close(folder: Path, events: int, tenants: int) -> dict[str, Any]:
    postgres = await asyncio.to_thread(start_postgres, folder / "pg2")
    await asyncio.to_thread(upgrade, postgres.url)
    engine = create_engine(postgres.url, pool_size=4)
    now = datetime.now(UTC)
    period = month_of(month_of(now).start - timedelta(days=1))
    hours = int((period.end - period.start).total_seconds()) // 3600
    try:
        async with engine.begin() as conn:
            prices = {meter: getattr(PRICE, meter.value) for meter in Meter}
            await set_price(conn, model="m", meters=prices, from_ms=0)
        connection = await asyncpg.connect(postgres.url)
        start = period.start
        await connection.execute(FOLD, start, events, tenants, "org_", hours, 7)
        await connection.execute(FOLD, start, events, 1, "one_", hours, 10)  # ten million of one tenant
        await connection.execute("VACUUM ANALYZE billing.usage_hourly")
        rollup_rows = await connection.fetchval("SELECT count(*) FROM billing.usage_hourly")
        await connection.close()
        seen = {}
        for name in ("org_1", "one_0"):
            samples = []
            for _ in range(20):
                began = time.perf_counter()
                async with engine.connect() as conn:
                    found = await usage_totals(conn, name, int(start.timestamp() * 1000) + 1234)
                samples.append((time.perf_counter() - began) * 1000)
            assert found
            seen[name] = {"p50": round(sorted(samples)[10], 1), "max": round(max(samples), 1)}
        async with engine.begin() as conn:
            names = [name for name in await tenants_to_invoice_across_tenants(conn, period) if name.startswith("org_")]
        began = time.monotonic()
        queue = iter(names)

        async def closer() -> None:
            for name in queue:
                async with engine.begin() as conn:
                    await close_period(conn, name, period, currency="EUR", now=now + timedelta(hours=3))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(closer())
        close_s = time.monotonic() - began
        async with engine.connect() as conn:
            made = (await conn.exec_driver_sql("SELECT count(*), sum(total_cents) FROM billing.invoice")).one()
        return {
            "events": events, "tenants": len(names), "rollup_rows": rollup_rows,
            "totals_ms": {"tenant_of_many": seen["org_1"], "tenant_with_all": seen["one_0"]},
            "close_s": round(close_s, 1), "invoices": made[0], "total_cents": int(made[1]),
        }  # fmt: skip
    finally:
        await engine.dispose()
        postgres.stop()


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m benches.billing")
    words.add_argument("--requests", type=int, default=200_000)
    words.add_argument("--events", type=int, default=10_000_000)
    words.add_argument("--tenants", type=int, default=1000)
    words.add_argument("--orgs", type=int, default=100)
    words.add_argument("--consumers", type=int, default=2)
    words.add_argument("--processes", type=int, default=1)
    words.add_argument("--batch", type=int, default=500)
    words.add_argument("--only", choices=("ingest", "books"))
    words.add_argument("--write", action="store_true", help="keep the results in the repository")
    asked = words.parse_args()
    result = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()},
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with tempfile.TemporaryDirectory(prefix="pdgate-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        if asked.only != "books":
            result["ingest"] = asyncio.run(
                ingest(
                    folder, asked.requests, orgs=asked.orgs, consumers=asked.consumers, processes=asked.processes,
                    batch=asked.batch,
                )
            )  # fmt: skip
        if asked.only != "ingest":
            result["books"] = asyncio.run(totals_and_close(folder, asked.events, asked.tenants))
    print(json.dumps(result, indent=2))
    if asked.write:
        kept = json.loads(RESULTS.read_text()) if asked.only and RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(kept | result, indent=2) + "\n")


if __name__ == "__main__":
    main()
