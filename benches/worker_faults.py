"""Workers that die, freeze or cannot be reached, under 32 streams: `python -m benches.worker_faults`.

A stack of real processes with timed workers, each in a network namespace of its own, so that a link between any two can
be cut. For every fault all streams read their whole text, equal to that of an undisturbed run, and each is billed once.
Printed, and written to `benches/results/worker_faults.json`:

- `detected_s`: from the fault to the first log line of scheduler or gateway that names it;
- `held_up`: streams with a pause of 0.3 s or more since then;
- `recovered_s`: from the fault until the last of them got its next text;
- `step_s`: from the detection of the last lost prefill worker to the ladder's step in the scheduler's log.
"""

import argparse
import asyncio
import json
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from pathlib import Path

import asyncpg
import httpx
import msgspec
from redis.asyncio import Redis

from benches.partitions import Partitions
from migrations.upgrade import upgrade
from pdgate.services import start_postgres, start_valkey
from tests.e2e.ledger_view import ledger_is_balanced, meters_of, nothing_is_reserved, requests
from tests.processes import Stack, until

RESULTS = Path(__file__).parent / "results" / "worker_faults.json"
NUM_STREAMS = 32
NUM_TOKENS = 240
BEFORE_TOKENS = 60  # per stream on average, when the fault comes
FROZEN_S = 5.0
HELD_UP_S = 0.3  # a pause of a stream that undisturbed has one of 10 ms
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "unified-0")
NOTICED = frozenset({"worker_suspect", "worker_dead", "worker_detached", "pair_in_doubt", "attempt_lost", "continues",
                     "retrying", "link_over_budget", "worker_gone", "stalled"})  # fmt: skip


class Reader:
    """One client and what it read."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rid = ""
        self.text = ""
        self.usage: dict[str, int] = {}
        self.done = False
        self.read_s: list[float] = []  # Unix time of every text

    async def run(self, http: httpx.AsyncClient) -> None:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"Tell story {self.number}. " + "Long ago. " * 40}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with suppress(httpx.TransportError):
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                self.rid = answer.headers.get("x-request-id", "")
                async for line in answer.aiter_lines():
                    self._take(line)

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if event.get("usage"):
                self.usage = event["usage"]
            elif event.get("choices") and (text := event["choices"][0]["delta"].get("content")):
                self.text += text
                self.read_s.append(time.time())

    def held_up_until_s(self, fault_s: float) -> float | None:
        """Return when the longest pause since the fault was over; None = there was none to speak of."""
        times = [t for t in self.read_s if t > fault_s]
        before_s = max((t for t in self.read_s if t <= fault_s), default=fault_s)
        gaps = [(after_s - since_s, after_s) for since_s, after_s in zip([before_s, *times], times, strict=False)]
        longest = max(gaps, default=(0.0, 0.0))
        return longest[1] if longest[0] >= HELD_UP_S else None


class Fault(msgspec.Struct, frozen=True):
    """What is done to the stack under load, and how it is undone once all streams have ended."""

    name: str
    begin: Callable[["Bench"], None]
    end: Callable[["Bench"], None]
    after_s: float = 0.0  # `end` comes so long after `begin` and not after the streams; 0 = after them


class Bench:
    """The stack, its network, and its books."""

    def __init__(self, stack: Stack, net: Partitions, database: asyncpg.Connection, redis: Redis) -> None:
        self.stack, self.net, self.database, self.redis = stack, net, database, redis

    async def whole(self) -> None:
        """Wait until the scheduler counts every worker as ready, and every pair as open."""

        async def ready() -> bool:
            host, port = self.stack.host("scheduler"), self.stack.metrics_ports["scheduler"]
            try:
                async with httpx.AsyncClient(timeout=5) as client:
                    page = (await client.get(f"http://{host}:{port}/metrics")).text
            except httpx.TransportError:
                return False
            lines = [line for line in page.splitlines() if not line.startswith("#")]
            workers = sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith("pdgate_workers{") and 'state="ready"' in line
            )
            pairs = sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith("pdgate_worker_pairs{") and 'state="open"' in line
            )
            return workers >= len(WORKERS) and pairs >= 4

        await until(ready, 60, every_s=0.2)
        await self.stack.ready()

    async def streams(self, fault: Fault | None = None) -> tuple[list[Reader], float]:
        """Run all streams, with a fault in their midst; return them and when it came (Unix)."""
        readers = [Reader(number) for number in range(NUM_STREAMS)]
        fault_s = 0.0
        limits = httpx.Limits(max_connections=2 * NUM_STREAMS)
        headers = {"Authorization": f"Bearer {self.stack.api_key}"}
        async with (
            httpx.AsyncClient(base_url=self.stack.url, headers=headers, timeout=90, limits=limits) as http,
            asyncio.TaskGroup() as tasks,
        ):
            half = NUM_STREAMS // 2
            for reader in readers[:half]:
                tasks.create_task(reader.run(http))
            await until(lambda: sum(len(r.read_s) for r in readers) > BEFORE_TOKENS * half or fault is None, 60, 0.005)
            later, last = readers[half : half + half // 2], readers[half + half // 2 :]
            for reader in later:  # some are in their prefill when the fault comes
                tasks.create_task(reader.run(http))
            if fault is not None:
                await until(lambda: any(r.read_s for r in later), 60, 0.002)
                fault_s = time.time()
                fault.begin(self)
            for reader in last:  # and some begin after it, before anybody can know
                tasks.create_task(reader.run(http))
            if fault is not None and fault.after_s:
                await asyncio.sleep(fault.after_s)
                fault.end(self)
        if fault is not None and not fault.after_s:
            fault.end(self)
        return readers, fault_s

    def events_since(self, from_s: float) -> list[tuple[float, dict[str, object]]]:
        """Return what scheduler and gateway logged, with Unix times."""
        found = []
        for name in ("scheduler", "gateway"):
            for line in self.stack.log(name).splitlines():
                with suppress(msgspec.DecodeError, KeyError, ValueError):
                    event = msgspec.json.decode(line.encode(), type=dict[str, object])
                    at_s = datetime.fromisoformat(str(event["timestamp"])).timestamp()
                    if at_s >= from_s:
                        found.append((at_s, event))
        return sorted(found, key=lambda one: one[0])

    async def billed(self, readers: list[Reader]) -> dict[str, int]:
        """Wait until everything is settled; count what is not billed exactly once."""
        await until(lambda: nothing_is_reserved(self.redis), 60)
        rids = {r.rid for r in readers if r.done}

        async def booked() -> bool:
            return rids <= (await requests(self.database)).keys()

        await until(booked, 30)
        wrong = 0
        for reader in readers:
            if reader.done:
                meters = await meters_of(self.database, reader.rid)
                prompt = meters["prefill_computed"] + meters["prefill_cached"]
                told = (reader.usage["completion_tokens"], reader.usage["prompt_tokens"])
                wrong += (meters["decode"], prompt) != told or meters["decode"] != NUM_TOKENS
        return {"misbilled": wrong, "unbalanced": int(not await ledger_is_balanced(self.database))}


def killed(*names: str) -> Fault:
    """kill -9; started again after the streams."""
    return Fault(
        f"kill -9 {' '.join(names)}",
        lambda bench: [bench.stack.kill(name) for name in names] and None,
        lambda bench: bench.stack.start(*names),
    )


def frozen(name: str) -> Fault:
    """SIGSTOP, and SIGCONT after the others have gone on."""
    return Fault(
        f"SIGSTOP {name}",
        lambda bench: bench.stack.kill(name, signal.SIGSTOP),
        lambda bench: bench.stack.kill(name, signal.SIGCONT),
        FROZEN_S,
    )


def cut(one: str, other: str) -> Fault:
    """No packet passes between two processes; healed after the streams."""
    return Fault(
        f"cut {one} {other}", lambda bench: bench.net.cut(one, other), lambda bench: bench.net.heal(one, other)
    )


FAULTS = (
    killed("decode-0"),
    killed("prefill-0"),
    frozen("decode-0"),
    frozen("prefill-0"),
    cut("gateway", "decode-0"),
    cut("gateway", "prefill-0"),
    cut("scheduler", "decode-0"),
    cut("scheduler", "prefill-0"),
    cut("prefill-0", "decode-0"),
    killed("prefill-0", "prefill-1"),
)


async def measured(bench: Bench, fault: Fault, expected: list[str]) -> dict[str, object]:
    """Return the row of one fault."""
    await bench.whole()
    readers, fault_s = await bench.streams(fault)
    events = bench.events_since(fault_s)
    noticed = [at_s for at_s, event in events if event["event"] in NOTICED]
    held_up = [at_s for r in readers if (at_s := r.held_up_until_s(fault_s)) is not None]
    ended_s = max((r.read_s[-1] for r in readers if r.read_s), default=fault_s)
    row: dict[str, object] = {
        "fault": fault.name,
        "detected_s": round(noticed[0] - fault_s, 3) if noticed else None,
        "held_up": len(held_up),
        "recovered_s": round(max(held_up) - fault_s, 3) if held_up else 0.0,
        "ended_s": round(ended_s - fault_s, 3),
        "continued": sum(event["event"] == "continues" for _, event in events),
        "retried": sum(event["event"] == "retrying" for _, event in events),
        "lost": sum(not r.done for r in readers),
        "wrong": sum(r.text != text for r, text in zip(readers, expected, strict=True) if r.done),
        **await bench.billed(readers),
    }
    step = [at_s for at_s, event in events if event["event"] == "degraded"]
    dead = [at_s for at_s, event in events if event["event"] in ("worker_dead", "worker_suspect")]
    if step and dead:
        row["step_s"] = round(step[0] - dead[0], 3)
    return row


@asynccontextmanager
async def running(folder: Path, hand_off: str) -> AsyncIterator[Bench]:
    """Run the stack on services of its own."""
    from tests.conftest import CATALOG  # noqa: PLC0415 - only the bench needs the tests' catalogue

    names = ("gateway", "scheduler", *WORKERS)
    net = Partitions(names)
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
        stack.hosts = {name: net.address(name) for name in names}
        stack.wrap = lambda name, argv: net.command(name, argv) if name in names else argv
        await stack.seed()
        stack.add_gateway()
        stack.add_scheduler()
        stack.add_billing()
        store = {"WORKER_STORE_DIR": str(folder / "pages")} if hand_off == "store" else {}
        for name in WORKERS:
            role = name.partition("-")[0]
            environ = {"WORKER_STEP_MS": "10", "WORKER_HAND_OFF": hand_off, **store}
            stack.add_worker(name, role=role, environ=environ)
        stack.start()
        database, redis = await asyncpg.connect(postgres.url), Redis.from_url(valkey.url)
        try:
            yield Bench(stack, net, database, redis)
        finally:
            await redis.aclose()
            await database.close()
            stack.stop()
    finally:
        valkey.stop()
        postgres.stop()
        net.close()


def models_folder(folder: Path) -> Path:
    """Write a tiny tokenizer, as the tests have one."""
    from tests.conftest import CHATML, tiny_tokenizer  # noqa: PLC0415 - as above

    place = folder / "models" / "tiny"
    place.mkdir(parents=True)
    tiny_tokenizer().save(str(place / "tokenizer.json"))
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "models"


async def bench(hand_offs: list[str], *, only: str, keep: bool) -> list[dict[str, object]]:
    rows = []
    for hand_off in hand_offs:
        with service_folder(keep=keep) as folder:
            async with running(folder, hand_off) as one:
                await one.whole()
                expected = [reader.text for reader in (await one.streams())[0]]
                for fault in FAULTS:
                    if only in fault.name:
                        row = {"hand_off": hand_off, **await measured(one, fault, expected)}
                        print(json.dumps(row), flush=True)
                        rows.append(row)
    return rows


@contextmanager
def service_folder(*, keep: bool) -> Iterator[Path]:
    """A short folder that PostgreSQL's own user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="pdgate-faults-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def merged(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the rows that are written, with those that were measured in their places."""
    known: dict[tuple[object, object], dict[str, object]] = {}
    written = json.loads(RESULTS.read_text())["faults"] if RESULTS.exists() else []
    for row in (*written, *rows):
        known[row["hand_off"], row["fault"]] = row
    return list(known.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name has this; other rows stay as they are written")
    parser.add_argument("--hand-off", choices=("direct", "store"), help="default: both")
    parser.add_argument("--keep", action="store_true", help="leave the logs")
    asked = parser.parse_args()
    hand_offs = [asked.hand_off] if asked.hand_off else ["direct", "store"]
    rows = asyncio.run(bench(hand_offs, only=asked.only, keep=asked.keep))
    bad = [row for row in rows if row["lost"] or row["wrong"] or row["misbilled"] or row["unbalanced"]]
    summary = {"streams": NUM_STREAMS, "tokens": NUM_TOKENS, "faults": merged(rows)}
    RESULTS.write_text(json.dumps(summary, indent=2) + "\n")
    raise SystemExit(f"{len(bad)} faults lost or spoiled something" if bad else 0)


if __name__ == "__main__":
    main()
