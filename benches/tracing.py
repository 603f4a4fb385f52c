"""What tracing costs at 1 %: CPU per request of two stacks side by side, one that traces and one that does not.

`python -m benches.tracing`. Each stack has its own Valkey and PostgreSQL, and all its processes are counted. The two
take turns, so that what else the machine does meets both; the figure is the median of the turns' ratios, with the
interval that holds it with 95 % confidence whatever the ratios' distribution (order statistics of the sign test). Spans
go to a collector in this process, which decodes nothing and is not counted.
"""

import argparse
import asyncio
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from benches.__main__ import CATALOG, MODEL, services
from benches.cpu import snapshot
from benches.load import chat_request, run
from pdgate.models import timed_models
from tests.processes import Stack

BUDGET = 0.03
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
RESULTS = Path(__file__).with_name("results") / "tracing.json"


class Sink(grpc.GenericRpcHandler):
    """Takes every batch of spans as bytes and counts them."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method != EXPORT:
            return None

        def take(request: bytes, _: grpc.ServicerContext) -> bytes:
            self.num_bytes += len(request)
            return b""

        return grpc.unary_unary_rpc_method_handler(take)


@contextmanager
def sink() -> Iterator[tuple[Sink, str]]:
    """Run a collector."""
    taker = Sink()
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((taker,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield taker, f"http://127.0.0.1:{port}"
    finally:
        server.stop(1)


async def turn(stack: Stack, pids: dict[str, int], *, connections: int, each: int) -> float:
    """Run one turn on one stack and return its CPU per request, us."""
    wanted = [
        [
            chat_request("pdgate", stack.api_key, MODEL, prompt=f"connection {c} asks {n}", max_tokens=16)
            for n in range(each)
        ]
        for c in range(connections)
    ]
    before = sum(snapshot(pids).values())
    seen = await run("127.0.0.1", stack.gateway_port, wanted)
    await asyncio.sleep(0.3)  # settlements, and what is written behind
    assert all(stream.status == 200 for stream in seen)
    return (sum(snapshot(pids).values()) - before) / 1000 / len(seen)


async def compare(folder: Path, turns: int, endpoint: str, urls: dict[str, tuple[Any, Any]]) -> dict[str, list[float]]:
    """Return the CPU per request of every turn, by stack."""
    stacks: dict[str, tuple[Stack, dict[str, int]]] = {}
    found: dict[str, list[float]] = {"plain": [], "traced": []}
    try:
        for name, (valkey, postgres) in urls.items():
            home = folder / name
            (home / "models.toml").write_text(CATALOG)
            stack = Stack(
                folder=home,
                redis_url=valkey.url,
                database_url=postgres.url,
                catalog_file=home / "models.toml",
                models_dir=timed_models(home / "models", {MODEL}),
            )
            stack.otlp_endpoint = endpoint if name == "traced" else ""
            await stack.seed()
            stack.add_gateway()
            stack.add_scheduler()
            stack.add_billing()
            for role in ("prefill", "decode"):
                stack.add_worker(f"{role}-0", role=role, pool=MODEL, model=MODEL, environ={"WORKER_STEP_MS": "2"})
            stack.start()
            await stack.ready()
            pids = {process: popen.pid for process, popen in stack.processes.items()}
            stacks[name] = stack, pids | {"valkey": valkey.process.pid, "postgres": postgres.process.pid}
            await turn(*stacks[name], connections=8, each=5)
        for number in range(turns):
            order = ("plain", "traced") if number % 2 else ("traced", "plain")
            for name in order:
                found[name].append(await turn(*stacks[name], connections=16, each=40))
    finally:
        for stack, _ in stacks.values():
            stack.stop()
    return found


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the order statistics between which the median lies with at least this confidence; all for few values."""
    ordered, number = sorted(values), len(values)
    rank, below = 0, 0.5**number  # P(fewer than `rank` + 1 values are below the median)
    while rank < number // 2 - 1:
        below += math.comb(number, rank + 1) * 0.5**number
        if 2 * below > 1 - confidence:
            break
        rank += 1
    return ordered[rank], ordered[number - 1 - rank]


def main() -> None:
    """Run the turns, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdgate-tracing-") as name, ExitStack() as held:
        folder = Path(name)
        folder.chmod(0o755)
        urls = {}
        for stack in ("plain", "traced"):
            (folder / stack).mkdir()
            (folder / stack).chmod(0o755)
            urls[stack] = held.enter_context(services(folder / stack))
        taker, endpoint = held.enter_context(sink())
        found = asyncio.run(compare(folder, arguments.turns, endpoint, urls))
    ratios = [traced / plain for traced, plain in zip(found["traced"], found["plain"], strict=True)]
    result = {
        "cpu_us_per_request": {name: round(statistics.median(values), 1) for name, values in found.items()},
        "added_share": round(statistics.median(ratios) - 1, 4),
        "added_share_95": [round(ratio - 1, 4) for ratio in interval(ratios)],
        "turns": len(ratios),
        "added_share_of_turns": [round(ratio - 1, 4) for ratio in sorted(ratios)],
        "budget": BUDGET,
        "span_bytes": taker.num_bytes,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
