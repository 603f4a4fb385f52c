"""All prefill workers killed at once, under steady load: `python -m benches.prefill_loss`.

Two stacks of timed workers that hold eight requests each, and 32 clients that ask again as soon as they are answered:

1. `remaining_tokens_per_s`: a stack that never had a prefill worker: what the capacity that is left allows.
2. `after_tokens_per_s`: a whole one, from one second after kill -9 of its prefill workers on. `share` is the quotient.

`accepted` requests are those that began before the end and were not refused; `lost` are the ones among them that ended
in anything but their whole text. `step_s`: from the kill to the ladder's step in the scheduler's log. Under `direct`
only the unified worker is left to prefill; under `store` a role is a label, and the decode workers are as good.
Written to `benches/results/prefill_loss.json`.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path

import httpx
import msgspec

from benches.worker_faults import models_folder, service_folder
from migrations.upgrade import upgrade
from pdgate.services import start_postgres, start_valkey
from tests.processes import Stack, until

RESULTS = Path(__file__).parent / "results" / "prefill_loss.json"
NUM_CLIENTS = 32
NUM_TOKENS = 64
WARM_S = 3.0
MEASURED_S = 8.0
REFUSED_PAUSE_S = 0.2
PREFILL = ("prefill-0", "prefill-1")
REST = ("decode-0", "decode-1", "unified-0")
ENVIRON = {"WORKER_STEP_MS": "10", "WORKER_MAX_RUNNING": "8"}


class Load:
    """Clients that ask one question after the other, and what became of them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._asking = True
        self.num_running = 0
        self.read_s: list[float] = []  # Unix time of every text
        self.accepted = self.refused = 0
        self.lost: list[str] = []

    def stop(self) -> None:
        """Ask nothing new."""
        self._asking = False

    async def run(self) -> None:
        """Ask until stopped, and read every answer to its end."""
        limits = httpx.Limits(max_connections=2 * NUM_CLIENTS)
        headers = {"Authorization": f"Bearer {self._stack.api_key}"}
        async with (
            httpx.AsyncClient(base_url=self._stack.url, headers=headers, timeout=90, limits=limits) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(NUM_CLIENTS):
                tasks.create_task(self._client(http, number))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while self._asking:
            turn += 1
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"Story {number}.{turn}. " + "Long ago. " * 30}],
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            why = await self._ask(http, body)
            if why:
                self.lost.append(why)

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, object]) -> str:
        """Return "" or why the answer is not whole."""
        done, tokens, error = False, 0, ""
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code in (429, 503):
                    self.refused += 1
                    await answer.aread()
                    await asyncio.sleep(REFUSED_PAUSE_S)
                    return ""
                self.accepted += 1
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        error = error or str(event.get("error") or "")
                        if event.get("usage"):
                            tokens = event["usage"]["completion_tokens"]
                        elif event.get("choices") and event["choices"][0]["delta"].get("content"):
                            self.read_s.append(time.time())
        except httpx.TransportError as failure:
            return repr(failure)
        return "" if done and tokens == NUM_TOKENS else error or f"{tokens} tokens"

    def tokens_per_s(self, from_s: float, to_s: float) -> float:
        """Return the texts read per second in a span of Unix time."""
        return sum(from_s <= at_s < to_s for at_s in self.read_s) / (to_s - from_s)


@asynccontextmanager
async def running(folder: Path, hand_off: str, workers: tuple[str, ...]) -> AsyncIterator[Stack]:
    """Run a stack on services of its own, and wait until all workers can be used."""
    from tests.conftest import CATALOG  # noqa: PLC0415 - only the bench needs the tests' catalogue

    valkey = await asyncio.to_thread(start_valkey, folder / "valkey")
    postgres = await asyncio.to_thread(start_postgres, folder / "pg", durable=False)
    try:
        await asyncio.to_thread(upgrade, postgres.url)
        catalog_file = folder / "models.toml"
        catalog_file.write_text(CATALOG.replace("[models.tiny]", f'[models.tiny]\nhand_off = "{hand_off}"'))
        stack = Stack(
            folder=folder,
            redis_url=valkey.url,
            database_url=postgres.url,
            catalog_file=catalog_file,
            models_dir=models_folder(folder),
        )
        await stack.seed()
        stack.add_gateway()
        stack.add_scheduler(environ={"SCHEDULER_RATIO_MODE": "manual"})
        stack.add_billing()
        store = {"WORKER_STORE_DIR": str(folder / "pages")} if hand_off == "store" else {}
        for name in workers:
            environ = {**ENVIRON, "WORKER_HAND_OFF": hand_off, **store}
            stack.add_worker(name, role=name.partition("-")[0], environ=environ)
        stack.start()
        try:
            await stack.ready()
            await until(lambda: sum("worker_ready" in stack.log(name) for name in workers) == len(workers), 60)
            yield stack
        finally:
            stack.stop()
    finally:
        valkey.stop()
        postgres.stop()


async def remaining(hand_off: str) -> float:
    """Return what the workers that are left can do, tokens/s."""
    with service_folder(keep=False) as folder:
        async with running(folder, hand_off, REST) as stack, asyncio.TaskGroup() as tasks:
            load = Load(stack)
            tasks.create_task(load.run())
            await until(lambda: load.read_s, 60)
            from_s = time.time() + WARM_S
            await asyncio.sleep(WARM_S + MEASURED_S)
            load.stop()
    return load.tokens_per_s(from_s, from_s + MEASURED_S)


def step_after(log: str, kill_s: float) -> float | None:
    """Return the seconds from the kill to the ladder's first step up after it."""
    for line in log.splitlines():
        with suppress(msgspec.DecodeError, KeyError, ValueError):
            event = msgspec.json.decode(line.encode(), type=dict[str, object])
            at_s = datetime.fromisoformat(str(event["timestamp"])).timestamp()
            if event["event"] == "degraded" and at_s >= kill_s:
                return round(at_s - kill_s, 3)
    return None


async def measured(hand_off: str) -> dict[str, object]:
    """Return the row of one hand-off."""
    allowed = await remaining(hand_off)
    with service_folder(keep=False) as folder:
        async with running(folder, hand_off, (*PREFILL, *REST)) as stack, asyncio.TaskGroup() as tasks:
            load = Load(stack)
            tasks.create_task(load.run())
            await until(lambda: load.read_s, 60)
            whole_s = time.time() + WARM_S
            await asyncio.sleep(2 * WARM_S)
            kill_s = time.time()
            for name in PREFILL:
                stack.kill(name)
            await asyncio.sleep(1.0 + MEASURED_S)
            load.stop()
        step_s = step_after(stack.log("scheduler"), kill_s)
    after = load.tokens_per_s(kill_s + 1.0, kill_s + 1.0 + MEASURED_S)
    return {
        "hand_off": hand_off,
        "whole_tokens_per_s": round(load.tokens_per_s(whole_s, kill_s)),
        "remaining_tokens_per_s": round(allowed),
        "after_tokens_per_s": round(after),
        "share": round(after / allowed, 3),
        "accepted": load.accepted,
        "lost": len(load.lost),
        "refused": load.refused,
        "step_s": step_s,
        "why_lost": sorted(set(load.lost))[:3],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hand-off", choices=("direct", "store"), help="default: both; then nothing is written")
    asked = parser.parse_args()
    rows = []
    for hand_off in [asked.hand_off] if asked.hand_off else ["direct", "store"]:
        rows.append(asyncio.run(measured(hand_off)))
        print(json.dumps(rows[-1]), flush=True)
    if not asked.hand_off:
        RESULTS.write_text(json.dumps({"clients": NUM_CLIENTS, "tokens": NUM_TOKENS, "rows": rows}, indent=2) + "\n")
    raise SystemExit("accepted requests were lost" if any(row["lost"] for row in rows) else 0)


if __name__ == "__main__":
    main()
