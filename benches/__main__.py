"""The budget table: CPU and latency of every pdgate process, beside a client that talks straight to the worker.

Each row is run against both in turn, `--repeats` times, on one machine in one run: these machines are
noisy, so the ratio between the two columns is the finding and the spread is printed.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from benches import load, placement
from benches.cpu import snapshot
from benches.direct import DirectClient
from contracts import keys
from contracts.wire import Registration
from migrations.upgrade import upgrade
from pdgate.models import timed_models
from pdgate.services import Service, start_postgres, start_valkey
from tests.processes import REPOSITORY, Stack, until

MODEL = "tiny"
RESULTS = REPOSITORY / "benches" / "results" / "latest.json"
PEERS = RESULTS.with_name("peers.json")
PROMPT = "Tell me a story about a lighthouse keeper who counts ships. " * 2
INSTANT = {  # everything but the decode clock takes no time, so that what is left is ours
    "WORKER_PREFILL_MS": "0",
    "WORKER_PREFILL_MS_PER_TOKEN": "0",
    "WORKER_TRANSFER_MS": "0",
    "WORKER_STEP_MS_PER_REQUEST": "0",
    "WORKER_STEP_MS_PER_KV_TOKEN": "0",
    "WORKER_MAX_RUNNING": "1024",
}
CATALOG = """
[models.tiny]
tokenizer = "tiny"
context_tokens = 8192
[models.tiny.price]
prefill_computed = "0.10"
prefill_cached = "0.02"
decode = "0.40"
[models.tiny.tiers.default]
ttft_ms = 2000
tpot_ms = 100
"""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One load."""

    name: str
    step_ms: float
    connections: int
    requests_each: int
    tokens: int

    @property
    def num_requests(self) -> int:
        return self.connections * self.requests_each


ROWS = (
    Row(name="256 streams, 5 ms steps", step_ms=5, connections=256, requests_each=2, tokens=512),
    Row(name="64 streams, 20 ms steps", step_ms=20, connections=64, requests_each=2, tokens=128),
    Row(name="1 token, 16 at once", step_ms=1, connections=16, requests_each=120, tokens=1),
    Row(name="1 token, one at a time", step_ms=1, connections=1, requests_each=400, tokens=1),
)


class Measured(msgspec.Struct, kw_only=True):
    """One run of one row."""

    cpu_ns: dict[str, int]
    client_ns: int
    wall_s: float
    ttfb_ms: list[float]
    gaps_ms: list[float]
    tokens: int
    requests: int

    @property
    def us_per_token(self) -> float:
        return sum(self.cpu_ns.values()) / self.tokens / 1000

    @property
    def us_per_request(self) -> float:
        return sum(self.cpu_ns.values()) / self.requests / 1000


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def gaps_of(events: list[float]) -> list[float]:
    return [(b - a) * 1000 for a, b in itertools.pairwise(events)]


async def measure(
    pids: dict[str, int], run: Callable[[], Coroutine[Any, Any, tuple[list[float], list[float], int, int]]]
) -> Measured:
    """Run a load and return what it cost each process and this client."""
    before, own, start = snapshot(pids), time.process_time_ns(), time.perf_counter()
    ttfb_ms, gaps_ms, tokens, requests = await run()
    wall = time.perf_counter() - start
    client_ns = time.process_time_ns() - own
    after = snapshot(pids)
    return Measured(
        cpu_ns={name: after[name] - before[name] for name in pids},
        client_ns=client_ns,
        wall_s=wall,
        ttfb_ms=ttfb_ms,
        gaps_ms=gaps_ms,
        tokens=tokens,
        requests=requests,
    )


async def through_gateway(stack: Stack, row: Row) -> tuple[list[float], list[float], int, int]:
    request = load.chat_request(
        f"127.0.0.1:{stack.gateway_port}", stack.api_key, MODEL, prompt=PROMPT, max_tokens=row.tokens
    )
    work = [[request] * row.requests_each for _ in range(row.connections)]
    streams = await load.run("127.0.0.1", stack.gateway_port, work)
    failed = [s for s in streams if s.status != 200]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(streams)} failed: {failed[0].status} {bytes(failed[0].body)[-300:]!r}"
        )
    return (
        [s.ttfb_ms for s in streams],
        [gap for s in streams for gap in gaps_of(s.events)],
        row.tokens * len(streams),
        len(streams),
    )


async def straight_to_worker(client: DirectClient, row: Row) -> tuple[list[float], list[float], int, int]:
    prompt = list(range(100, 140))
    seen = []

    async def connection() -> None:
        for _ in range(row.requests_each):
            seen.append(await client.one(prompt, row.tokens))  # noqa: PERF401 (one after the other on purpose)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(row.connections):
            tasks.create_task(connection())
    return (
        [(s.first - s.started) * 1000 for s in seen],
        [gap for s in seen for gap in gaps_of(s.events)],
        sum(s.tokens for s in seen),
        len(seen),
    )


@contextmanager
def services(folder: Path) -> Iterator[tuple[Service, Service]]:
    valkey = start_valkey(folder / "valkey")
    try:
        postgres = start_postgres(folder / "pg")
        try:
            upgrade(postgres.url)
            yield valkey, postgres
        finally:
            postgres.stop()
    finally:
        valkey.stop()


async def registered(stack: Stack, pool: str, worker_id: str) -> Registration:
    """Wait for a worker's lease and return it."""
    lease = keys.worker_lease(pool, worker_id)
    async with Redis.from_url(stack.redis_url, socket_timeout=None) as redis:
        await until(lambda: redis.exists(lease), 30)
        raw = await redis.get(lease)
    return msgspec.msgpack.decode(raw, type=Registration)


async def run_row(row: Row, stack: Stack, pids: dict[str, int], repeats: int) -> tuple[list[Measured], list[Measured]]:
    """Return the runs through pdgate and the runs straight to the worker, in turn."""
    environ = {"WORKER_STEP_MS": str(row.step_ms), **INSTANT}
    stack.add_worker("prefill-0", role="prefill", environ=environ)
    stack.add_worker("decode-0", role="decode", environ=environ)
    alone = {"WORKER_CATALOG": str(stack.folder / "direct.toml")}  # a pool that no scheduler and no gateway knows
    stack.add_worker("direct-0", role="unified", pool="direct", environ=environ | alone)
    workers = ("prefill-0", "decode-0", "direct-0")
    stack.start(*workers)
    ours, theirs = [], []
    try:
        await stack.ready()
        registration = await registered(stack, "direct", "direct-0")
        direct = DirectClient(registration.address, worker_epoch=registration.epoch)
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            link = tasks.create_task(direct.run(ready))
            async with asyncio.timeout(10):
                await ready.wait()
            ours_pids = pids | {name: stack.processes[name].pid for name in workers[:2]}
            direct_pids = {"worker": stack.processes["direct-0"].pid}
            warm = msgspec.structs.replace(row, requests_each=1, tokens=min(row.tokens, 16))
            await through_gateway(stack, warm)
            await straight_to_worker(direct, warm)
            for number in range(repeats):
                print(f"  {row.name}: run {number + 1} of {repeats}", file=sys.stderr, flush=True)
                ours.append(await measure(ours_pids, lambda: through_gateway(stack, row)))
                theirs.append(await measure(direct_pids, lambda: straight_to_worker(direct, row)))
            link.cancel()
    finally:
        for name in workers:
            stack.processes[name].terminate()
        for name in workers:
            stack.processes[name].wait(10)
        await stack.unready()  # otherwise the next row finds a gateway that still counts on these workers
    return ours, theirs


def summary(runs: list[Measured]) -> dict[str, Any]:
    """Return the figures of one row: medians over the runs, with their spread."""
    per_token = [r.us_per_token for r in runs]
    per_request = [r.us_per_request for r in runs]
    ttfb = [value for r in runs for value in r.ttfb_ms]
    gaps = [value for r in runs for value in r.gaps_ms]
    return {
        "cpu_us_per_token": round(statistics.median(per_token), 2),
        "cpu_us_per_token_spread": [round(min(per_token), 2), round(max(per_token), 2)],
        "cpu_us_per_request": round(statistics.median(per_request), 1),
        "cpu_us_per_request_spread": [round(min(per_request), 1), round(max(per_request), 1)],
        "tokens_per_s": round(statistics.median(r.tokens / r.wall_s for r in runs)),
        "requests_per_s": round(statistics.median(r.requests / r.wall_s for r in runs), 1),
        "ttfb_ms": {"p50": round(percentile(ttfb, 0.5), 2), "p99": round(percentile(ttfb, 0.99), 2)},
        "itl_ms": {"p50": round(percentile(gaps, 0.5), 2), "p99": round(percentile(gaps, 0.99), 2)},
        "client_us_per_token": round(statistics.median(r.client_ns / r.tokens / 1000 for r in runs), 2),
        "us_per_token_by_process": {
            name: round(statistics.median(r.cpu_ns[name] / r.tokens / 1000 for r in runs), 2) for name in runs[0].cpu_ns
        },
    }


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    table = Table(title="pdgate (all its processes) beside a client straight at the timed worker (the worker alone)")
    for column in ("load", "measure", "pdgate", "spread", "worker alone", "budget"):
        table.add_column(column, justify="left" if column in ("load", "measure") else "right")
    r1, r2, r3, r4 = (rows[row.name] for row in ROWS)

    def line(name: str, what: str, key: str, r: dict[str, Any], budget: str) -> None:
        spread = r["pdgate"].get(f"{key}_spread")
        table.add_row(
            name,
            what,
            f"{r['pdgate'][key]:,}",
            f"{spread[0]:,}-{spread[1]:,}" if spread else "",
            f"{r['direct'][key]:,}",
            budget,
        )

    line(ROWS[0].name, "CPU us per token", "cpu_us_per_token", r1, "<= 25")
    line("", "tokens/s", "tokens_per_s", r1, ">= 40,000")
    line(ROWS[1].name, "CPU us per token", "cpu_us_per_token", r2, "<= 60")
    added = r2["pdgate"]["itl_ms"]["p99"] - r2["direct"]["itl_ms"]["p99"]
    table.add_row("", "added ITL p99, ms", f"{added:.2f}", "", "", "<= 3")
    line(ROWS[2].name, "CPU us per request", "cpu_us_per_request", r3, "<= 1,500")
    line(ROWS[3].name, "CPU us per request", "cpu_us_per_request", r4, "<= 2,500")
    for share, budget in (("p50", "<= 2"), ("p99", "<= 5")):
        added = r4["pdgate"]["ttfb_ms"][share] - r4["direct"]["ttfb_ms"][share]
        table.add_row(
            "", f"added TTFB {share}, ms", f"{added:.2f}", "", f"{r4['direct']['ttfb_ms'][share]:.2f}", budget
        )
    Console(width=120).print(table)
    shares = ", ".join(f"{k} {v}" for k, v in r1["pdgate"]["us_per_token_by_process"].items())
    print(f"us per token by process, {ROWS[0].name}: {shares}; client {r1['pdgate']['client_us_per_token']}")


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown CPU")
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}"


async def run_rows(
    folder: Path, valkey: Service, postgres: Service, numbers: list[int], repeats: int
) -> dict[str, dict[str, Any]]:
    """Start everything but the workers, then run the rows with these numbers (from 1)."""
    rows: dict[str, dict[str, Any]] = {}
    stack = Stack(
        folder=folder,
        redis_url=valkey.url,
        database_url=postgres.url,
        catalog_file=folder / "models.toml",
        models_dir=timed_models(folder / "models", {MODEL}),
    )
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    stack.start()
    pids = {name: process.pid for name, process in stack.processes.items()}
    pids |= {"valkey": valkey.process.pid, "postgres": postgres.process.pid}
    try:
        for number in numbers:
            row = ROWS[number - 1]
            ours, theirs = await run_row(row, stack, pids, repeats)
            rows[row.name] = {"pdgate": summary(ours), "direct": summary(theirs)}
    finally:
        stack.stop()
    return rows


def main() -> None:
    """Run the rows, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs per row and side (default 3)")
    parser.add_argument("--rows", type=int, nargs="*", help="only these rows, from 1; prints JSON, writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pdgate-bench-"))
    try:
        folder.chmod(0o755)
        (folder / "models.toml").write_text(CATALOG)
        (folder / "direct.toml").write_text(CATALOG.replace("models.tiny", "models.direct"))
        numbers = arguments.rows or list(range(1, len(ROWS) + 1))
        with services(folder) as (valkey, postgres):
            rows = asyncio.run(run_rows(folder, valkey, postgres, numbers, arguments.repeats))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.rows:
        print(json.dumps(rows, indent=1))
        return
    print_table(rows)
    cost = placement.measure()
    Console().print(placement.table(cost))
    write(arguments, rows, cost)


def peers() -> dict[str, Any]:
    """Return the last run of `python -m benches.peers`, at 70 % of each one's own capacity; none without one."""
    if not PEERS.exists():
        return {}
    systems = json.loads(PEERS.read_text())["systems"]
    return {
        name: {
            "cpu_us_per_token": found["cpu_us_per_token"]["median"],
            "cpu_us_per_request": found["cpu_us_per_request"]["median"],
            "added_ttfb_ms": {share: found[f"added_ttfb_{share}_ms"]["median"] for share in ("p50", "p99")},
            "tokens_per_s": found["tokens_per_s"]["median"],
        }
        for name, found in systems.items()
    }


def write(arguments: argparse.Namespace, rows: dict[str, dict[str, Any]], cost: placement.Cost) -> None:
    r1, r3, r4 = (rows[ROWS[i].name] for i in (0, 2, 3))

    def headline(side: str) -> dict[str, Any]:
        return {
            "cpu_us_per_token": r1[side]["cpu_us_per_token"],
            "cpu_us_per_request": r3[side]["cpu_us_per_request"],
            "added_ttfb_ms": {
                share: round(r4[side]["ttfb_ms"][share] - r4["direct"]["ttfb_ms"][share], 2) for share in ("p50", "p99")
            },
            "tokens_per_s": r1[side]["tokens_per_s"],
        }

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    result = {
        **headline("pdgate"),
        "peers": {"worker-alone": headline("direct"), **peers()},
        "placement_us": {"p50": round(cost.p50_us), "p99": round(cost.p99_us)},
        "rows": rows,
        "commit": commit.stdout.strip(),
        "machine": machine(),
        "command": f"python -m benches --repeats {arguments.repeats}",
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
