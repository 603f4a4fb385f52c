"""Expert parallelism: how evenly recorded hits spread over GPUs, and what a plan says of it.

A recording is JSON with the tokens that each expert got, by layer, in each phase:
`{"prefill": [[expert 0, expert 1, …], …], "decode": [[…], …]}` (SGLang's expert distribution recorder counts them).
Without one all experts are hit alike, which flatters large groups.
"""

import heapq
from collections.abc import Sequence
from pathlib import Path

import msgspec

from contracts.roofline import ExpertLoad, ModelShape
from pdgate.plan.workload import WorkloadError, mean

LARGEST_GROUP = 64  # GPUs of one expert-parallel worker that the search goes up to
SMALLEST_GROUP = 4
FLIPS_OFF = (
    "role flips are off with expert parallelism: a group's experts (and their copies) are laid out for the hits of its "
    "phase and over its own number of GPUs, so a flip would reload weights on the whole group at once. Instead: add or "
    "drop whole groups per phase, give short prompts to unified workers, and rebalance experts within a group"
)


class Hits(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens by layer and expert in each phase."""

    prefill: list[list[float]] = []
    decode: list[list[float]] = []


def read_hits(file: Path, shape: ModelShape) -> Hits:
    """Return a recording for a model.

    Raises:
        WorkloadError: unreadable, of another form, or not of this model's number of experts.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Hits)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WorkloadError(f"{file}: {error}") from None
    for phase, layers in (("prefill", found.prefill), ("decode", found.decode)):
        for number, counts in enumerate(layers):
            if len(counts) != shape.experts or min(counts) < 0 or sum(counts) <= 0:
                raise WorkloadError(
                    f"{file}: {phase} layer {number} has {len(counts)} counts; {shape.name} has {shape.experts} "
                    "experts, and some must be hit"
                )
    return found


def expert_load(hits: Hits, shape: ModelShape, gpus: int, *, copies: int = 0) -> ExpertLoad:
    """Return how a group of GPUs with whole experts on each is loaded.

    Args:
        hits: the recording; a phase without one is even.
        shape: the model.
        gpus: of the group.
        copies: additional copies of the most hit experts per layer.
    """
    return ExpertLoad(
        apart=True,
        prefill_imbalance=mean([imbalance(c, gpus, copies=copies) for c in hits.prefill]) if hits.prefill else 1.0,
        decode_imbalance=mean([imbalance(c, gpus, copies=copies) for c in hits.decode]) if hits.decode else 1.0,
        decode_rates=decode_rates(hits, shape),
    )


def decode_rates(hits: Hits, shape: ModelShape) -> tuple[float, ...]:
    """Return the probability that a decoded token picks each expert, the busiest first, averaged over the layers."""
    if not hits.decode:
        return ()
    ordered = [sorted((c / sum(counts) for c in counts), reverse=True) for counts in hits.decode]
    return tuple(
        min(1.0, shape.experts_per_token * mean([layer[i] for layer in ordered])) for i in range(shape.experts)
    )


def imbalance(counts: Sequence[float], gpus: int, *, copies: int = 0) -> float:
    """Return the busiest GPU's share of a layer's tokens over the mean, >= 1, with experts placed greedily.

    The `copies` most hit experts (by what each copy still gets) are held twice or more and share their tokens; then the
    busiest goes first to the least busy GPU that has a slot left.
    """
    parts = [(-float(count), 1, float(count)) for count in counts]
    heapq.heapify(parts)
    for _ in range(copies):
        _, held, whole = heapq.heappop(parts)
        heapq.heappush(parts, (-whole / (held + 1), held + 1, whole))
    shares = sorted((-share for share, held, _ in parts for _ in range(held)), reverse=True)
    slots = -(-len(shares) // gpus)
    groups = [(0.0, index, 0) for index in range(gpus)]
    heapq.heapify(groups)
    full: list[float] = []
    for share in shares:
        load, index, filled = heapq.heappop(groups)
        if filled + 1 == slots:
            full.append(load + share)
        else:
            heapq.heappush(groups, (load + share, index, filled + 1))
    busiest = max([*full, *(load for load, _, _ in groups)])
    return busiest * gpus / sum(counts)
