"""Role changes of the real SGLang under light load: `python -m benches.flips_real`.

A prefill and two decode workers with the tiny model on this CPU, and a client that asks one question after the other.
One decode worker becomes a prefill worker and comes back, again and again, by the operator's order. Nothing may be
lost, and every text must be the one of before. Printed, and written to `benches/results/flips.json` as `sglang`, beside
the timed workers' figures: drain time, the engine's own switch with the tiny generation that proves it, and the total,
from the order until the worker is in an open pair again. The leader looks for orders twice a second: in the total.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
from redis.asyncio import Redis

from benches.flips import quantile, write
from benches.worker_faults import service_folder
from contracts.lifecycle import Role
from migrations.upgrade import upgrade
from pdgate.libibverbs import library_environment
from pdgate.services import start_postgres, start_valkey
from pdgate.worker_commands import order_role
from tests.engines import BOOT_S, model_lines, tiny_model
from tests.processes import Stack, engine_python, until

WORKERS: Final = ("prefill-0", "decode-0", "decode-1")
CHANGES: Final = WORKERS[2]
NUM_TOKENS: Final = 32
QUESTIONS: Final = tuple(f"Tell story {number}. " + "Long ago, near the sea. " * 6 for number in range(8))
ANSWERS_BETWEEN: Final = 2


class Load:
    """One client: it keeps what it is told, and compares."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.first: dict[str, str] = {}
        self.answers = self.lost = self.wrong = 0
        self.stopping = False

    async def ask(self, question: str) -> str:
        body = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS}
        messages = [{"role": "user", "content": question}]
        answer = await self._http.post("/v1/chat/completions", json={**body, "messages": messages})
        return str(answer.json()["choices"][0]["message"]["content"]) if answer.status_code == 200 else ""

    async def run(self) -> None:
        while not self.stopping:
            question = QUESTIONS[self.answers % len(QUESTIONS)]
            text = await self.ask(question)
            self.lost += not text
            self.wrong += bool(text) and text != self.first[question]
            self.answers += 1


class Bench:
    """The stack under one client's load."""

    def __init__(self, stack: Stack, redis: Redis) -> None:
        self._stack, self._redis = stack, redis

    async def open_with(self, prefill: int) -> None:
        """Wait until so many prefill workers are ready and every pair is open."""

        async def page() -> list[str]:
            async with httpx.AsyncClient(timeout=10) as client:
                port = self._stack.metrics_ports["scheduler"]
                return (await client.get(f"http://127.0.0.1:{port}/metrics")).text.splitlines()

        async def ready() -> bool:
            lines = [line for line in await page() if line.startswith(("pdgate_workers{", "pdgate_worker_pairs{"))]

            def count(*labels: str) -> float:
                return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))

            givers, takers = (count(f'role="{role}"', 'state="ready"') for role in (Role.PREFILL, Role.DECODE))
            both = (givers, takers) == (prefill, len(WORKERS) - prefill)
            return both and count('state="open"') == givers * takers

        await until(ready, 120, every_s=0.05)

    async def flips(self, load: Load, number: int) -> list[dict[str, float]]:
        rows = []
        for turn in range(number):
            role = Role.DECODE if turn % 2 else Role.PREFILL
            since = load.answers
            await until(lambda since=since: load.answers >= since + ANSWERS_BETWEEN, 120)
            began_s = time.monotonic()
            result = await order_role(self._redis, "tiny", CHANGES, role)
            if not result.ok:
                raise SystemExit(f"{CHANGES} keeps its role: {result.message}")
            await self.open_with(prefill=2 if role is Role.PREFILL else 1)
            total_ms = (time.monotonic() - began_s) * 1000
            rows.append({"drain_ms": result.drain_ms, "switch_ms": result.switch_ms, "total_ms": total_ms})
            print(json.dumps({"to": role.value, **{name: round(ms) for name, ms in rows[-1].items()}}), flush=True)
        return rows


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Stack, Redis]]:
    """Run the stack on services of its own, with three real workers."""
    valkey = await asyncio.to_thread(start_valkey, folder / "valkey")
    postgres = await asyncio.to_thread(start_postgres, folder / "pg", durable=False)
    try:
        await asyncio.to_thread(upgrade, postgres.url)
        catalog_file = folder / "models.toml"
        catalog_file.write_text(model_lines("tiny"))
        stack = Stack(
            folder=folder,
            redis_url=valkey.url,
            database_url=postgres.url,
            catalog_file=catalog_file,
            models_dir=tiny_model().parent,
        )
        await stack.seed()
        stack.add_gateway(cpu_profile=True)
        stack.add_scheduler(cpu_profile=True, environ={"SCHEDULER_RATIO_MODE": "manual"})
        stack.add_billing()
        environ = library_environment(Path(engine_python()).parents[2] / "lib")
        for name in WORKERS:
            stack.add_worker(name, role=name.partition("-")[0], engine="sglang", environ=environ)
        stack.start()
        redis = Redis.from_url(valkey.url)
        try:
            await stack.ready(timeout_s=BOOT_S)
            yield stack, redis
        finally:
            await redis.aclose()
            stack.stop()
    finally:
        valkey.stop()
        postgres.stop()


async def bench(number: int, folder: Path) -> dict[str, object]:
    async with running(folder) as (stack, redis):
        one = Bench(stack, redis)
        await one.open_with(prefill=1)
        headers = {"Authorization": f"Bearer {stack.api_key}"}
        async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=120) as http:
            load = Load(http)
            load.first = {question: await load.ask(question) for question in QUESTIONS}
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.run())
                rows = await one.flips(load, number)
                load.stopping = True
    parts = {
        part: {"p50": quantile([row[part] for row in rows], 0.5), "p99": quantile([row[part] for row in rows], 0.99)}
        for part in ("drain_ms", "switch_ms", "total_ms")
    }
    return {"flips": len(rows), "requests": load.answers, "lost": load.lost, "wrong": load.wrong, **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=20)
    asked = parser.parse_args()
    with service_folder(keep=False) as folder:
        result = asyncio.run(bench(asked.flips, folder))
    write(sglang=result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
