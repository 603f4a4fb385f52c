"""The ways to serve the traffic on a fleet, each with the highest rate at which it keeps the targets.

An option is a number of workers per role. Its capacity is the highest rate at which the share of requests that meet
both targets is at least the wanted attainment: goodput as DistServe defines it.
"""

from collections.abc import Callable, Iterator

import msgspec

from pdgate.plan.chunks import chunked_outcome
from pdgate.plan.fleet import Setting, Worker
from pdgate.plan.pools import Outcome, decode_capacity_rps, decode_work_ms, prompt_ms, split_outcome
from pdgate.plan.shapes import Kind, Shape
from pdgate.plan.traffic import Traffic, Traffics
from pdgate.plan.unified import unified_outcome
from pdgate.plan.workload import mean

PREFILL_CACHE = 0.8  # share of a prefill worker's KV memory that holds prefixes
UNIFIED_CACHE = 0.4  # the same of a unified worker, whose running requests need the rest
AFFINITY = 0.8  # share of that which routing by prefix makes useful; the rest holds copies
STORE_MEMORY = 4.0  # a store in host memory holds so many times a worker's KV memory
BISECTIONS = 22


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a shape does at one rate."""

    attainment: float  # 0 to 1
    split: Outcome | None  # of the requests that the prefill and decode workers serve
    unified: Outcome | None
    unified_share: float  # 0 to 1 of the requests that the unified workers serve
    split_traffic: Traffic | None
    unified_traffic: Traffic | None


def load_of(shape: Shape, rate_rps: float, traffics: Traffics, setting: Setting) -> Load:
    """Return what a shape does with the traffic at a rate."""
    cache = cache_tokens(shape)
    if shape.kind is Kind.UNIFIED:
        traffic = traffics.whole(cache).at(rate_rps)
        outcome = _unified(shape, traffic, setting)
        return Load(
            attainment=outcome.attainment,
            split=None,
            unified=outcome,
            unified_share=1.0,
            split_traffic=None,
            unified_traffic=traffic,
        )
    if shape.unified:
        short, long, share = _parted(shape, traffics, setting)
        low, high = short.at(rate_rps * share), long.at(rate_rps * (1 - share))
        mixed, split = _unified(shape, low, setting), _split(shape, high, setting)
        return Load(
            attainment=share * mixed.attainment + (1 - share) * split.attainment,
            split=split,
            unified=mixed,
            unified_share=share,
            split_traffic=high,
            unified_traffic=low,
        )
    traffic = traffics.whole(cache).at(rate_rps)
    split = _split(shape, traffic, setting)
    return Load(
        attainment=split.attainment,
        split=split,
        unified=None,
        unified_share=0.0,
        split_traffic=traffic,
        unified_traffic=None,
    )


def capacity_rps(shape: Shape, traffics: Traffics, setting: Setting, *, at_least: float = 0.0) -> float:
    """Return the highest rate at which the shape keeps the wanted attainment; 0 if it does at none.

    Args:
        shape: the workers.
        traffics: the workload.
        setting: targets and attainment.
        at_least: a rate below which the result does not matter; the shape is given up early if it fails there.
    """
    high = rate_bound(shape, traffics, setting)

    def keeps(rate: float) -> bool:
        return load_of(shape, rate, traffics, setting).attainment >= setting.attainment

    low = at_least if at_least > 0 else high * 1e-4
    if high <= low or not keeps(low):
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def rate_bound(shape: Shape, traffics: Traffics, setting: Setting) -> float:
    """Return a rate that the shape cannot exceed, whatever the wait."""
    cache = cache_tokens(shape)
    traffic = traffics.whole(cache)
    if shape.kind is Kind.UNIFIED:
        assert shape.unified_worker is not None
        return shape.unified * _unified_bound(shape.unified_worker, traffic, setting)
    if shape.unified:
        assert shape.unified_worker is not None
        short, long, share = _parted(shape, traffics, setting)
        by_unified = shape.unified * _unified_bound(shape.unified_worker, short, setting) / max(share, 1e-9)
        return min(by_unified, _split_bound(shape, long, setting) / max(1 - share, 1e-9))
    return _split_bound(shape, traffic, setting)


def cache_tokens(shape: Shape) -> float | None:
    """Return the tokens of prefix cache that the shape's prompts find; 0 = none, None = unlimited."""
    if shape.kind is Kind.SPLIT_NO_REUSE:
        return 0
    tokens = 0.0
    for count, worker, share in (
        (shape.prefill, shape.prefill_worker, PREFILL_CACHE),
        (shape.unified, shape.unified_worker, UNIFIED_CACHE),
    ):
        if count and worker is not None:
            tokens += count * worker.latency.kv_capacity_tokens * share
    if shape.kind is Kind.STORE:
        everywhere = sum(count * worker.latency.kv_capacity_tokens for count, worker in shape.pools())
        return tokens * AFFINITY + everywhere * STORE_MEMORY
    return tokens * AFFINITY


def best(shapes: Iterator[Shape], traffics: Traffics, setting: Setting) -> tuple[Shape, float] | None:
    """Return the shape with the highest capacity, and that capacity; None if none keeps the targets at any rate."""
    bounded = sorted(((rate_bound(s, traffics, setting), i, s) for i, s in enumerate(shapes)), key=lambda b: -b[0])
    found: tuple[Shape, float] | None = None
    for bound, _, shape in bounded:
        floor = found[1] if found else 0.0
        if bound <= floor:
            break
        capacity = capacity_rps(shape, traffics, setting, at_least=floor)
        if capacity > floor:
            found = shape, capacity
    return found


def smallest(
    make: Callable[[int], Iterator[Shape]], traffics: Traffics, setting: Setting, *, rate_rps: float, most: int
) -> Shape | None:
    """Return the cheapest shape that keeps the targets at a rate; None if none of at most `most` GPUs does.

    Args:
        make: shapes on a number of GPUs.
        traffics: the workload.
        setting: targets and attainment.
        rate_rps: the rate to serve.
        most: GPUs to go up to; the search doubles, then halves the interval.
    """

    def serving(gpus: int) -> Shape | None:
        able = [s for s in make(gpus) if rate_bound(s, traffics, setting) > rate_rps]
        kept = [s for s in able if load_of(s, rate_rps, traffics, setting).attainment >= setting.attainment]
        return min(kept, key=lambda s: s.price_per_hour) if kept else None

    high = 1
    found = serving(high)
    while found is None and high < most:
        high = min(most, high * 2)
        found = serving(high)
    if found is None:
        return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        better = serving(middle)
        low, high, found = (low, middle, better) if better is not None else (middle, high, found)
    return found


def _split(shape: Shape, traffic: Traffic, setting: Setting) -> Outcome:
    assert shape.prefill_worker is not None
    assert shape.decode_worker is not None
    return split_outcome(
        prefill=shape.prefill_worker.latency,
        decode=shape.decode_worker.latency,
        num_prefill=shape.prefill,
        num_decode=shape.decode,
        traffic=traffic,
        target=setting.target,
        layers=setting.shape.layers,
        through_store=shape.kind is Kind.STORE,
    )


def _unified(shape: Shape, traffic: Traffic, setting: Setting) -> Outcome:
    assert shape.unified_worker is not None
    latency, target = shape.unified_worker.latency, setting.target
    if setting.chunk_tokens is not None:
        return chunked_outcome(
            latency=latency,
            num_workers=shape.unified,
            traffic=traffic,
            target=target,
            mixing=setting.mixing,
            chunk_tokens=setting.chunk_tokens,
        )
    return unified_outcome(
        latency=latency, num_workers=shape.unified, traffic=traffic, target=target, mixing=setting.mixing
    )


def _parted(shape: Shape, traffics: Traffics, setting: Setting) -> tuple[Traffic, Traffic, float]:
    """The traffic of the unified and of the other workers, and the former's share (0 to 1) of the requests.

    By length where the shape has a threshold; else the router balances the load, and each takes what it can bear.
    """
    cache = cache_tokens(shape)
    if shape.short_prompt_tokens and (parted := traffics.parts(cache, shape.short_prompt_tokens)) is not None:
        return parted
    assert shape.unified_worker is not None
    traffic = traffics.whole(cache)
    unified = shape.unified * _unified_bound(shape.unified_worker, traffic, setting)
    split = _split_bound(shape, traffic, setting)
    return traffic, traffic, unified / (unified + split) if unified + split > 0 else 0.0


def _split_bound(shape: Shape, traffic: Traffic, setting: Setting) -> float:
    assert shape.prefill_worker is not None
    assert shape.decode_worker is not None
    by_prefill = shape.prefill * 1000 / mean(prompt_ms(shape.prefill_worker.latency, traffic))
    by_decode = decode_capacity_rps(shape.decode_worker.latency, traffic.decode, setting.target.tpot_ms)
    return min(by_prefill, shape.decode * by_decode)


def _unified_bound(worker: Worker, traffic: Traffic, setting: Setting) -> float:
    """The rate at which a worker's time is full: of prefill and decode work together, or of decoding alone."""
    prefill = setting.mixing * mean(prompt_ms(worker.latency, traffic))
    alone = decode_capacity_rps(worker.latency, traffic.decode, setting.target.tpot_ms)
    if alone <= 0:
        return 0.0
    both = prefill + decode_work_ms(worker.latency.decode, traffic.decode)
    return min(alone, 1000 / both)
