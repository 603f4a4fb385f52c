"""What one decision costs: 64 workers, 100,000 cached blocks, a prompt of 4,200 tokens that is partly cached.

CPU time of this thread, since these machines are noisy: what a decision takes from the scheduler's loop. Run it
alone with `python -m benches.placement`; `make bench` prints it, too.
"""

import random
import time
import tracemalloc
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from contracts.lifecycle import HandOff, Role
from contracts.perf import DEFAULT_LATENCY
from contracts.slo import SloTarget
from scheduler.policy.cluster import ClusterView, Compatibility, RequestView, WorkerView
from scheduler.policy.outlook import Outlook, ScoringLimits
from scheduler.policy.prefix import PrefixIndex
from scheduler.policy.scoring import score

NUM_WORKERS, NUM_BLOCKS, BLOCK_TOKENS = 64, 100_000, 64
PROMPT_BLOCKS = 65


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of CPU per decision, and the index's size."""

    p50_us: float
    p99_us: float
    blocks: int
    index_mb: float


def measure(number: int = 5_000, *, seed: int = 1) -> Cost:
    """Decide `number` times, one worker's load changing before each, as in production."""
    rng = random.Random(seed)
    workers = list(_workers(rng))
    tracemalloc.start()
    index, common = _index(rng)
    index_mb = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    limits, took_ns = ScoringLimits(), []
    for n in range(number):
        at = rng.randrange(NUM_WORKERS)
        workers[at] = msgspec.structs.replace(workers[at], num_requests=rng.randint(0, 40))
        request = RequestView(prompt_tokens=PROMPT_BLOCKS * BLOCK_TOKENS + 40, max_tokens=500)
        draw = rng.random()
        began_ns = time.thread_time_ns()
        cluster = ClusterView.of(tuple(workers))
        held = index.match(common)
        score(
            request,
            cluster,
            limits,
            Outlook(
                latency=DEFAULT_LATENCY,
                target=SloTarget(ttft_ms=2000, tpot_ms=60),
                output_tokens=200.0,
                promised_output_tokens=300,
                cached_tokens={worker: blocks * BLOCK_TOKENS for worker, blocks in held.items()},
                affinity=f"session-{n}",
                draw=draw,
            ),
        )
        took_ns.append(time.thread_time_ns() - began_ns)
    took_ns.sort()
    return Cost(
        p50_us=took_ns[number // 2] / 1000,
        p99_us=took_ns[number * 99 // 100] / 1000,
        blocks=len(index),
        index_mb=index_mb,
    )


def _workers(rng: random.Random) -> Iterator[WorkerView]:
    fits = Compatibility("r", "bf16", 64, "mooncake")
    for number in range(NUM_WORKERS):
        yield WorkerView(
            worker_id=f"w{number}",
            epoch=1,
            role=(Role.PREFILL, Role.DECODE, Role.UNIFIED)[number % 3],
            ready=True,
            pairs_with=fits,
            hand_offs=frozenset({HandOff.DIRECT}),
            max_running=256,
            context_tokens=131_072,
            kv_capacity_tokens=400_000,
            num_requests=rng.randint(0, 40),
            kv_tokens=rng.randint(0, 200_000),
            queued_prefill_tokens=rng.randint(0, 8_000),
        )


def _index(rng: random.Random) -> tuple[PrefixIndex, list[int]]:
    index = PrefixIndex(max_blocks=NUM_BLOCKS)
    for number in range(NUM_WORKERS):
        index.stored(f"w{number}", [rng.getrandbits(64) for _ in range(NUM_BLOCKS // NUM_WORKERS)])
    common = [rng.getrandbits(64) for _ in range(PROMPT_BLOCKS)]
    for number in range(0, NUM_WORKERS, 2):
        index.stored(f"w{number}", common[: rng.randint(1, PROMPT_BLOCKS)])
    return index, common


def table(cost: Cost) -> Table:
    """Return the figures for people."""
    rows = Table(title=f"One placement: {NUM_WORKERS} workers, {cost.blocks:,} cached blocks (aim: p99 < 500 µs)")
    for name in ("p50", "p99", "prefix index"):
        rows.add_column(name, justify="right")
    rows.add_row(f"{cost.p50_us:.0f} µs", f"{cost.p99_us:.0f} µs", f"{cost.index_mb:.0f} MB")
    return rows


if __name__ == "__main__":
    Console().print(table(measure()))
