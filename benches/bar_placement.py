"""What one placement costs: 64 workers, 100,000 cached blocks. CPU time: a busy machine does not count."""

import random
import time
import tracemalloc

import msgspec

from benches.bar_loads import TARGET
from contracts.lifecycle import HandOff, Role
from scheduler.policy.cluster import ClusterView, Compatibility, RequestView, WorkerView
from scheduler.policy.outlook import Outlook, ScoringLimits
from scheduler.policy.prefix import PrefixIndex
from scheduler.policy.scoring import score
from scheduler.simulator.setup import H100_8B

WORKERS, BLOCKS, BLOCK_TOKENS = 64, 100_000, 64
REQUESTS = 4000
SAME = Compatibility(model_revision="m", kv_dtype="auto", page_size=64, transfer_backend="t")


class PlacementCost(msgspec.Struct, frozen=True, kw_only=True):
    """ms per placement: match the prefix, filter, score, pick."""

    p50_ms: float
    p99_ms: float
    workers: int = WORKERS
    blocks: int = BLOCKS
    index_bytes_per_block: float
    blocks_after_ten_times_as_many: int
    """What a bounded index still holds."""


def placement_cost() -> PlacementCost:
    """Measure it."""
    rng = random.Random(1)
    tracemalloc.start()
    index = PrefixIndex(max_blocks=BLOCKS)
    chains = [[rng.getrandbits(63) for _ in range(50)] for _ in range(BLOCKS // 50)]
    for chain in chains:
        index.stored(f"w{rng.randrange(WORKERS)}", chain)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    cluster = ClusterView.of(tuple(_worker(number, rng) for number in range(WORKERS)))
    limits = ScoringLimits()
    took_ms = []
    for _ in range(REQUESTS):
        chain = rng.choice(chains)
        blocks = [*chain[: rng.randrange(1, 50)], rng.getrandbits(63)]
        request = RequestView(prompt_tokens=len(blocks) * BLOCK_TOKENS, max_tokens=512, hand_off=HandOff.DIRECT)
        draw = rng.random()
        started_ns = time.thread_time_ns()
        hits = {worker: held * BLOCK_TOKENS for worker, held in index.match(blocks).items()}
        score(
            request,
            cluster,
            limits,
            Outlook(
                latency=H100_8B,
                target=TARGET,
                output_tokens=200,
                promised_output_tokens=250,
                cached_tokens=hits,
                draw=draw,
            ),
        )
        took_ms.append((time.thread_time_ns() - started_ns) / 1e6)
    took_ms.sort()
    for _ in range(10):
        index.stored("w0", [rng.getrandbits(63) for _ in range(BLOCKS)])
    return PlacementCost(
        p50_ms=round(took_ms[REQUESTS // 2], 4),
        p99_ms=round(took_ms[REQUESTS * 99 // 100], 4),
        index_bytes_per_block=round(size / BLOCKS, 1),
        blocks_after_ten_times_as_many=len(index),
    )


def _worker(number: int, rng: random.Random) -> WorkerView:
    role = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE, Role.UNIFIED)[number % 6]
    return WorkerView(
        worker_id=f"w{number}",
        epoch=1,
        role=role,
        ready=True,
        pairs_with=SAME,
        hand_offs=frozenset({HandOff.DIRECT}),
        max_running=256,
        context_tokens=400_000,
        kv_capacity_tokens=400_000,
        num_requests=rng.randrange(60),
        kv_tokens=rng.randrange(150_000),
        queued_prefill_tokens=rng.randrange(6000) if role is not Role.DECODE else 0,
    )
