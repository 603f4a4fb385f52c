"""How cost grows on one box: `python -m benches.scale [PART ...]`; parts: gateways, workers, queued, tenants, keys.

CPU time, not wall time: two cores cannot run four gateways faster than two, but what a token costs says whether more
processes get in each other's way. The slope is that of log cost over log size by least squares: 0 = cost does not grow,
1 = it grows as the size does. Results go to benches/results/scale.json and, by `make docs`, to docs/scaling.md.
"""

import argparse
import asyncio
import json
import math
import random
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from benches import load
from benches.__main__ import CATALOG, INSTANT, MODEL, PROMPT, machine, services
from benches.cpu import cpu_ns, snapshot
from benches.scale_keys import keys_among
from benches.scale_table import RESULTS, box_table
from contracts import keys
from contracts.identity import new_rid
from contracts.rating import Price, Tokens
from contracts.resp import redis_client
from contracts.settlement import (
    METER_GENERATED,
    METER_REQUESTS,
    METER_UNCACHED,
    Budget,
    Lease,
    Rate,
    Reservation,
    Reserved,
    SettlementScripts,
)
from contracts.usage import Outcome, UsageEvent
from pdgate.models import timed_models
from pdgate.services import Service
from scheduler.policy.fairness import FairLimits, FairQueue, Ticket
from tests.processes import Stack, free_port, until

GATEWAYS: Final = (1, 2, 4)
WORKERS: Final = (2, 8, 32, 64)
QUEUED: Final = (1_000, 10_000, 100_000)
TENANTS: Final = (100, 1_000, 10_000)
KEYS: Final = (1_000, 100_000, 1_000_000)
_IDLE_S: Final = 10.0
_TURNS: Final = 5_000
_REQUESTS: Final = 3_000
_STREAMS, _TOKENS = 64, 256


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the exponent b of cost = a * size^b by least squares."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


# -- waiting requests ------------------------------------------------------------------------------------------


def queued(number: int, *, tenants: int = 100, seed: int = 1) -> dict[str, float]:
    """Return the CPU of a turn (the head asked for, taken, another pushed) and bytes per request that waits."""
    draw = random.Random(seed)

    def ticket(at: int) -> Ticket:
        return Ticket(
            tier="default",
            tenant=f"org-{draw.randrange(tenants)}",
            deadline_ms=1e6 + at * 10,
            latest_start_ms=9e5 + at * 10,
            cost=draw.uniform(100, 5000),
        )

    tracemalloc.start()
    queue: FairQueue[int] = FairQueue(FairLimits())
    for at in range(number):
        queue.push(at, ticket(at))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    fresh = [ticket(number + at) for at in range(_TURNS)]
    began_ns = time.thread_time_ns()
    for at, one in enumerate(fresh):
        head = queue.head(0.0)
        if head is None:
            raise RuntimeError("the queue is empty")
        queue.take(head)
        queue.push(number + at, one)
    return {"us": (time.thread_time_ns() - began_ns) / _TURNS / 1000, "bytes": held / number}


# -- tenants ----------------------------------------------------------------------------------------------------


def _reservation(org: str, rid: str, now_ms: int) -> Reservation:
    bucket = f"{{{org}}}:scale"
    return Reservation(
        rid=rid,
        member=f"{org}/{rid}",
        now_ms=now_ms,
        deadline_ms=now_ms + 60_000,
        key_id=f"key-{org}",
        key_state="1",
        owner="{}",
        pool=MODEL,
        rates=[
            Rate(key=f"{bucket}:{meter}", meter=meter, limit=1_000_000, amount=amount)
            for meter, amount in ((METER_REQUESTS, 1), (METER_UNCACHED, 500), (METER_GENERATED, 200))
        ],
        leases=[Lease(key=keys.concurrency_leases(org, "key", f"key-{org}"), limit=100)],
        budgets=[Budget(key=keys.budget(org, "org", org), limit=10**12, amount=1000)],
    )


async def tenants(number: int, valkey: Service) -> dict[str, float]:
    """Return Valkey's CPU for a reservation and its settlement, and what it keeps per tenant."""
    redis = redis_client(valkey.url)
    scripts = SettlementScripts(redis)
    try:
        await redis.flushall()
        before = (await redis.info("memory"))["used_memory"]
        names = [f"org_{at:06d}" for at in range(number)]
        for org in names:
            await redis.hset(keys.key_states(org), f"key-{org}", "1")
            await _once(scripts, org)
        kept = (await redis.info("memory"))["used_memory"] - before
        draw = random.Random(1)
        wanted = [draw.choice(names) for _ in range(_REQUESTS)]
        began_ns = cpu_ns(valkey.process.pid)
        for org in wanted:
            await _once(scripts, org)
        spent_ns = cpu_ns(valkey.process.pid) - began_ns
    finally:
        await redis.aclose()
    return {"us": spent_ns / _REQUESTS / 1000, "bytes": kept / number}


async def _once(scripts: SettlementScripts, org: str) -> None:
    now_ms = int(time.time() * 1000)
    rid = new_rid(now_ms)
    granted = await scripts.reserve(org, _reservation(org, rid, now_ms))
    if not isinstance(granted, Reserved):
        raise TypeError(f"not reserved: {granted}")
    event = UsageEvent(
        rid=rid, org=org, project="p", key_id=f"key-{org}", model=MODEL, pool=MODEL, tier="default",
        outcome=Outcome.FINISHED, tokens=Tokens(prefill_computed=500, decode=100), cost=500,
        price=Price(version=1, model=MODEL, prefill_computed=1, prefill_cached=1, decode=1),
    )  # fmt: skip
    await scripts.settle(event, {METER_GENERATED: 100})


# -- processes --------------------------------------------------------------------------------------------------


def _stack(folder: Path, valkey: Service, postgres: Service) -> Stack:
    (folder / "models.toml").write_text(CATALOG)
    return Stack(
        folder=folder,
        redis_url=valkey.url,
        database_url=postgres.url,
        catalog_file=folder / "models.toml",
        models_dir=timed_models(folder / "models", {MODEL}),
    )


async def gateways(number: int, folder: Path, valkey: Service, postgres: Service) -> dict[str, float]:
    """Return CPU per token with the streams spread over so many gateway processes."""
    stack = _stack(folder, valkey, postgres)
    await stack.seed()
    ports = [stack.gateway_port, *(free_port() for _ in range(number - 1))]
    for at, port in enumerate(ports):
        stack.add_gateway("gateway" if at == 0 else f"gateway-{at}", port=port)
    stack.add_scheduler()
    stack.add_billing()
    for role in ("prefill", "decode"):
        stack.add_worker(f"{role}-0", role=role, pool=MODEL, model=MODEL, environ={"WORKER_STEP_MS": "10", **INSTANT})
    try:
        stack.start()
        await stack.ready()
        await _attached(ports, 2)
        pids = _pids(stack, valkey, postgres)
        await _calls(stack, ports, streams=_STREAMS, each=1, tokens=8)
        before = snapshot(pids)
        total = _TOKENS * await _calls(stack, ports, streams=_STREAMS, each=2, tokens=_TOKENS)
        spent = {name: (after - before[name]) / total / 1000 for name, after in snapshot(pids).items()}
    finally:
        stack.stop()
    of_gateways = sum(cost for name, cost in spent.items() if name.startswith("gateway"))
    return {"us": sum(spent.values()), "gateways_us": of_gateways}


async def workers(number: int, folder: Path, valkey: Service, postgres: Service) -> dict[str, float]:
    """Return what so many workers (half of them each role) cost: CPU per request, and per second when idle."""
    stack = _stack(folder, valkey, postgres)
    await stack.seed()
    stack.add_gateway()
    stack.add_scheduler()
    stack.add_billing()
    for at in range(number // 2):
        for role in ("prefill", "decode"):
            environ = {"WORKER_STEP_MS": "2", **INSTANT}
            stack.add_worker(f"{role}-{at}", role=role, pool=MODEL, model=MODEL, environ=environ)
    try:
        stack.start()
        await stack.ready(timeout_s=300)
        await _attached([stack.gateway_port], number)
        pids = {name: pid for name, pid in _pids(stack, valkey, postgres).items() if "-" not in name}
        await _calls(stack, [stack.gateway_port], streams=16, each=10, tokens=1)
        idle = snapshot(pids)
        await asyncio.sleep(_IDLE_S)
        before = snapshot(pids)
        count = await _calls(stack, [stack.gateway_port], streams=16, each=80, tokens=1)
        after = snapshot(pids)
    finally:
        stack.stop()
    names = ("gateway", "scheduler", "valkey")
    found = {f"{name}_us": (after[name] - before[name]) / count / 1000 for name in names}
    found |= {f"{name}_idle_share": (before[name] - idle[name]) / 1e9 / _IDLE_S for name in names}
    return {"us": sum(found[f"{name}_us"] for name in names), **found}


def _pids(stack: Stack, valkey: Service, postgres: Service) -> dict[str, int]:
    pids = {name: process.pid for name, process in stack.processes.items()}
    return pids | {"valkey": valkey.process.pid, "postgres": postgres.process.pid}


async def _attached(ports: Sequence[int], number: int) -> None:
    """Wait until each gateway can serve and holds a stream of so many workers."""
    async with httpx.AsyncClient(timeout=5) as client:

        async def all_attached() -> bool:
            try:
                answers = [await client.get(f"http://127.0.0.1:{port}/readyz") for port in ports]
            except httpx.TransportError:
                return False
            return all(a.status_code == 200 and a.json()["workers_attached"] >= number for a in answers)

        await until(all_attached, 300, every_s=0.5)


async def _calls(stack: Stack, ports: Sequence[int], *, streams: int, each: int, tokens: int) -> int:
    """Send streams evenly to the gateways; return how many were answered."""
    request = load.chat_request("pdgate", stack.api_key, MODEL, prompt=PROMPT, max_tokens=tokens)
    share = [[request] * each for _ in range(streams // len(ports))]
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(load.run("127.0.0.1", port, share)) for port in ports]
    seen = [stream for run in runs for stream in run.result()]
    if failed := [stream for stream in seen if stream.status != 200]:
        raise RuntimeError(f"{len(failed)} of {len(seen)} failed: {bytes(failed[0].body)[-300:]!r}")
    return len(seen)


# -- the command -------------------------------------------------------------------------------------------------

PARTS: Final = {"gateways": GATEWAYS, "workers": WORKERS, "queued": QUEUED, "tenants": TENANTS, "keys": KEYS}


def measure(part: str, size: int) -> dict[str, float]:
    """Return the figures of one part at one size; `us` is what its slope is taken of."""
    if part == "queued":
        return queued(size)
    folder = Path(tempfile.mkdtemp(prefix="pdgate-scale-"))
    try:
        folder.chmod(0o755)
        with services(folder) as (valkey, postgres):
            if part == "tenants":
                return asyncio.run(tenants(size, valkey))
            if part == "keys":
                return asyncio.run(keys_among(size, _stack(folder, valkey, postgres), valkey, postgres))
            return asyncio.run((gateways if part == "gateways" else workers)(size, folder, valkey, postgres))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure what is asked for, print it and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    asked = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in asked.parts or PARTS:
        sizes: dict[str, dict[str, float]] = {}
        for size in PARTS[part]:
            print(f"{part} {size:,} …", file=sys.stderr, flush=True)
            sizes[str(size)] = {name: round(value, 4) for name, value in measure(part, size).items()}
        costs = [row["us"] for row in sizes.values()]
        found[part] = {"sizes": sizes, "slope": round(slope(PARTS[part], costs), 4), "machine": machine()}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(box_table(found))


if __name__ == "__main__":
    main()
