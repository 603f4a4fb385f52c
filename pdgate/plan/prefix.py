"""Prefix hits against cache size: an LRU of prefix blocks, as a radix cache evicts (leaves before their parents)."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from pdgate.plan.workload import Workload


class HitPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Share of prompt tokens found in a cache of one size."""

    cache_tokens: int | None  # None = unlimited
    hit: float  # 0.0 to 1.0 of all prompt tokens


def cached_tokens(workload: Workload, *, cache_tokens: int | None) -> list[int]:
    """Return, per request, how many prompt tokens one cache of this size already holds.

    Counts that the trace recorded (`Request.cached_tokens`) are returned as they are.

    Args:
        workload: requests in arrival order; those without blocks never hit.
        cache_tokens: size of the cache in tokens; None = unlimited.
    """
    capacity = None if cache_tokens is None else cache_tokens // workload.block_tokens
    held: OrderedDict[int, None] = OrderedDict()
    found: list[int] = []
    for request in workload.requests:
        if request.cached_tokens is not None:
            found.append(min(request.cached_tokens, request.prompt_tokens))
            continue
        hits = 0
        for block in request.blocks:
            if block not in held:
                break
            hits += 1
        found.append(min(hits * workload.block_tokens, request.prompt_tokens))
        # the deepest block first, so that a prefix is always younger than what extends it
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        if capacity is not None:
            while len(held) > capacity:
                held.popitem(last=False)
    return found


def hit_share(workload: Workload, *, cache_tokens: int | None) -> float:
    """Return the share (0 to 1) of all prompt tokens found in one cache of this size."""
    total = sum(r.prompt_tokens for r in workload.requests)
    return sum(cached_tokens(workload, cache_tokens=cache_tokens)) / total if total else 0.0


def hit_curve(workload: Workload, sizes: Sequence[int] = (250_000, 1_000_000, 4_000_000, 16_000_000)) -> list[HitPoint]:
    """Return the hit share at each cache size and for an unlimited cache."""
    if not any(r.blocks or r.cached_tokens is not None for r in workload.requests):
        return [HitPoint(cache_tokens=None, hit=0.0)]
    points: list[int | None] = [*sizes, None]
    return [HitPoint(cache_tokens=size, hit=hit_share(workload, cache_tokens=size)) for size in points]
