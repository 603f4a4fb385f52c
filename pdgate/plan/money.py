"""What a fleet costs: in four parts, and per million tokens of each meter.

Planning figures in the user's currency units; nothing here is billed, so these are floats.
"""

import msgspec

from pdgate.plan.fleet import Worker
from pdgate.plan.options import Load
from pdgate.plan.shapes import Shape
from pdgate.plan.traffic import Traffic

HOUR_S = 3600.0
MILLION = 1e6


class PerHour(msgspec.Struct, frozen=True, kw_only=True):
    """Cost per hour in its four parts."""

    prefill: float  # prefill work at the price of the workers that do it
    decode: float  # decode work likewise
    transfer: float  # network, as given
    scheduling_and_idle: float  # operations, as given, and the workers' time without work

    @property
    def total(self) -> float:
        """All four."""
        return self.prefill + self.decode + self.transfer + self.scheduling_and_idle


class PerMillion(msgspec.Struct, frozen=True, kw_only=True):
    """Cost per million tokens of each meter; the three together are the whole cost."""

    prefill_computed: float
    prefill_cached: float
    decode: float


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What tenants pay per million tokens of each meter."""

    prefill_computed: float
    prefill_cached: float
    decode: float


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a fleet at one rate."""

    currency: str
    per_hour: PerHour
    per_million: PerMillion
    revenue_per_hour: float | None = None  # None = no price book given
    margin: float | None = None  # 1 - cost / revenue


def money_of(
    shape: Shape,
    load: Load,
    *,
    currency: str,
    network_per_hour: float = 0.0,
    operations_per_hour: float = 0.0,
    prices: Prices | None = None,
) -> Money:
    """Return the cost of a shape under a load.

    Idle time, network and operations are carried by the meters in proportion to their work; transfers of cached tokens
    and the attention over them make up the cached meter.
    """
    prefill = decode = idle = 0.0
    for count, worker, prefill_share, decode_share in _busy(shape, load):
        price = count * worker.price_per_hour
        prefill += price * prefill_share
        decode += price * decode_share
        idle += price * (1 - prefill_share - decode_share)
    per_hour = PerHour(
        prefill=prefill, decode=decode, transfer=network_per_hour, scheduling_and_idle=idle + operations_per_hour
    )
    per_million = _per_million(shape, load, per_hour)
    if prices is None:
        return Money(currency=currency, per_hour=per_hour, per_million=per_million)
    computed, cached, output = tokens_per_hour(load)
    sold = computed * prices.prefill_computed + cached * prices.prefill_cached + output * prices.decode
    revenue = sold / MILLION
    margin = 1 - per_hour.total / revenue if revenue > 0 else None
    return Money(currency=currency, per_hour=per_hour, per_million=per_million, revenue_per_hour=revenue, margin=margin)


def tokens_per_hour(load: Load) -> tuple[float, float, float]:
    """Return computed prompt, cached prompt and output tokens per hour."""
    computed = cached = output = 0.0
    for traffic in (load.split_traffic, load.unified_traffic):
        if traffic is not None:
            requests = traffic.rate_rps * HOUR_S
            computed += requests * traffic.mean_uncached_tokens
            cached += requests * traffic.mean_cached_tokens
            output += requests * traffic.decode.o
    return computed, cached, output


def _busy(shape: Shape, load: Load) -> list[tuple[int, Worker, float, float]]:
    """Count and kind of worker of each role, and the shares (0 to 1) of its time in prefill and decode work."""
    roles: list[tuple[int, Worker, float, float]] = []
    if load.split is not None and shape.prefill_worker is not None and shape.decode_worker is not None:
        roles.append((shape.prefill, shape.prefill_worker, load.split.prefill_busy, 0.0))
        roles.append((shape.decode, shape.decode_worker, 0.0, load.split.decode_busy))
    if shape.unified and shape.unified_worker is not None:
        done = load.unified
        prefill = done.prefill_busy if done is not None else 0.0
        both = max(prefill, done.decode_busy) if done is not None else 0.0
        roles.append((shape.unified, shape.unified_worker, prefill, both - prefill))
    return roles


def _per_million(shape: Shape, load: Load, per_hour: PerHour) -> PerMillion:
    computed, cached, output = tokens_per_hour(load)
    work = per_hour.prefill + per_hour.decode
    carried = (per_hour.total - per_hour.transfer) / work if work > 0 else 0.0
    cross = cached_share(shape, load)
    hit = cached / (cached + computed) if cached + computed > 0 else 0.0
    for_cached = per_hour.prefill * carried * cross + per_hour.transfer * hit
    for_computed = per_hour.prefill * carried * (1 - cross) + per_hour.transfer * (1 - hit)
    return PerMillion(
        prefill_computed=for_computed / computed * MILLION if computed else 0.0,
        prefill_cached=for_cached / cached * MILLION if cached else 0.0,
        decode=per_hour.decode * carried / output * MILLION if output else 0.0,
    )


def cached_share(shape: Shape, load: Load) -> float:
    """Return the share (0 to 1) of prefill time that is attention over cached tokens."""
    cross = whole = 0.0
    for worker, traffic in (
        (shape.prefill_worker, load.split_traffic),
        (shape.unified_worker, load.unified_traffic),
    ):
        if worker is not None and traffic is not None:
            part, all_of_it = _cross_ms(worker, traffic)
            cross += traffic.rate_rps * part
            whole += traffic.rate_rps * all_of_it
    return cross / whole if whole else 0.0


def _cross_ms(worker: Worker, traffic: Traffic) -> tuple[float, float]:
    cost = worker.latency.prefill
    cross = whole = 0.0
    for prompt in traffic.prompts:
        n, h = prompt.uncached_tokens, prompt.cached_tokens
        pairs = cost.per_token_pair_ms * 2 * n * h
        cross += pairs
        whole += cost.fixed_ms + cost.per_token_ms * n + cost.per_token_pair_ms * n * n + pairs
    return cross / len(traffic.prompts), whole / len(traffic.prompts)
