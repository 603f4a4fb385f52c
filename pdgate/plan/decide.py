"""The decision: split, unified, mixed, or infeasible, with the reason, the fleet and what it costs.

The rule: split (or mix) only if the rate that keeps the targets rises by 30 % or the cost of the smallest fleet falls
as much at equal attainment; or if only that keeps the targets on the fleet at hand. Work without targets has no rate to
keep: the options are compared by what the fleet gets through.
"""

import enum
import math
from collections.abc import Callable, Sequence

import msgspec

from pdgate.plan.beside import HYBRID, OFFLINE, hybrid, offline_batch
from pdgate.plan.binding import binding_of
from pdgate.plan.compare import MOST_GPUS, NO_HAND_OFF, Ask, Comparison, Option
from pdgate.plan.fleet import Setting, workers_of
from pdgate.plan.money import Money, money_of
from pdgate.plan.options import Load, load_of
from pdgate.plan.pools import prompt_ms
from pdgate.plan.queueing import NONE, Waits, wait
from pdgate.plan.shapes import Kind, Shape
from pdgate.plan.traffic import Traffics
from pdgate.plan.workload import WorkloadError, mean, squared_cv

WORTH = 0.30  # gain in goodput or saving in cost that makes a split worth its trouble
SIMPLER = 0.03  # a mixed fleet or a store must beat the plain split by this much


class Verdict(enum.StrEnum):
    """What to do."""

    SPLIT = "split"
    UNIFIED = "unified"
    MIXED = "mixed"
    INFEASIBLE = "infeasible"


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of a latency, ms."""

    p50: float
    p95: float
    p99: float


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies and shares at the planned rate."""

    attainment: float  # 0 to 1
    goodput_rps: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    prefill_busy: float
    decode_busy: float
    link_busy: float
    prefix_hit: float


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The one-line test: a split pays only if `rho > (1 - d0/tau)/kappa`; ignores whole workers and memory."""

    rho: float  # highest load of the prefill pool that keeps TTFT at the attainment
    limit: float  # (1 - d0/tau)/kappa
    pays: bool


class Smallest(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest fleet of one kind that keeps the targets at the planned rate."""

    workers: str
    gpus: int
    price_per_hour: float | None  # None = left out of a report that is shared


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The decision with what the report needs to go on."""

    verdict: Verdict
    reason: str
    shape: Shape | None  # None = nothing keeps the targets
    unified: tuple[Shape, float] | None  # the best unified fleet and its capacity
    split: tuple[Shape, float] | None  # the best split (mixed and store included)
    goodput_gain: float
    cost_saving: float | None  # of the smallest split over the smallest unified fleet; None = one has none
    binding: str
    options: list[Option]
    expected: Expected | None
    rule: Rule | None
    smallest_unified: Smallest | None
    smallest_split: Smallest | None
    money: Money | None


def decide(ask: Ask, traffics: Traffics, setting: Setting, progress: Callable[[str], None] = lambda _: None) -> Choice:
    """Return the decision for the traffic at its own rate on the fleet at hand.

    Raises:
        WorkloadError: more than two kinds of GPU.
    """
    if len(ask.fleet) > 2:
        raise WorkloadError("a fleet may have at most two kinds of GPU")
    rate = traffics.rate_rps
    workers = [workers_of(gpu, count, setting) for count, gpu in ask.fleet]
    search = Comparison(ask, traffics, setting, workers)
    found: dict[Kind, tuple[Shape, float] | None] = {}
    for kind in Kind:
        progress(f"comparing: {kind}")
        found[kind] = search.best(kind)
    unified = found[Kind.UNIFIED]
    split = _best_split(found)
    progress("smallest fleets")
    small_unified, small_split = search.smallest(Kind.UNIFIED, rate), search.smallest(Kind.SPLIT, rate)
    base = search.unified_rps()
    gain = split[1] / base - 1 if split and base > 0 else (math.inf if split else 0.0)
    saving = None
    if small_split and small_unified:
        saving = round(1 - small_split.price_per_hour / small_unified.price_per_hour, 9)
    offline = setting.target.ttft_ms is None and setting.target.tpot_ms is None
    verdict, reason = _verdict(
        0.0 if offline else rate,
        unified,
        split,
        gain,
        saving,
        without_split="no split keeps the targets" if ask.hands_off else NO_HAND_OFF,
    )
    shape = {Verdict.UNIFIED: unified, Verdict.INFEASIBLE: None}.get(verdict, split)
    chosen = (
        shape[0]
        if shape
        else min((s for s in (small_unified, small_split) if s), key=lambda s: s.price_per_hour, default=None)
    )
    options = search.options(found, base)
    options += _beside(ask, traffics, setting, search, base, offline=offline, progress=progress)
    if offline and shape:
        rate = min(rate, shape[1])
    load = load_of(chosen, rate, traffics, setting) if chosen else None
    if chosen is None:  # no fleet of these GPUs works: say what binds however many there are
        workers = [workers_of(gpu, gpu.gpus_per_node, setting) for _, gpu in ask.fleet]
    binding = binding_of(workers, traffics, setting, found)
    return Choice(
        verdict=verdict,
        reason=_explained(reason, verdict, chosen, binding),
        shape=chosen,
        unified=unified,
        split=split,
        goodput_gain=gain,
        cost_saving=saving,
        binding=binding,
        options=options,
        expected=expected_of(load, rate) if load else None,
        rule=_rule(split[0], traffics, setting) if split else None,
        smallest_unified=_smallest_of(small_unified),
        smallest_split=_smallest_of(small_split),
        money=_money(ask, chosen, min(rate, ask.mean_rate_rps or rate), traffics, setting) if chosen else None,
    )


def _beside(
    ask: Ask,
    traffics: Traffics,
    setting: Setting,
    search: Comparison,
    base: float,
    *,
    offline: bool,
    progress: Callable[[str], None],
) -> list[Option]:
    """Options that the verdict does not choose from: another model, other hardware, other targets."""
    count, gpu = ask.fleet[0]
    rows: list[Option | None] = []
    if ask.local is not None:
        progress(f"comparing: {HYBRID}")
        rows.append(hybrid(ask.local, traffics, setting, gpu, count, base))
    if len(ask.fleet) == 1 and ask.alternatives:
        progress("comparing: other hardware for decode")
        rows += search.alternatives(base)
    if not offline:
        progress(f"comparing: {OFFLINE}")
        rows.append(offline_batch(traffics, setting, ask.fleet, base, worth=WORTH))
    return [row for row in rows if row is not None]


def expected_of(load: Load, rate_rps: float) -> Expected:
    """Return latencies of a load over all its requests."""
    parts = [(1 - load.unified_share, load.split), (load.unified_share, load.unified)]
    present = [(share, outcome) for share, outcome in parts if outcome is not None]
    total = sum(share for share, _ in present)

    def mixed(quantiles: Sequence[float]) -> float:
        return sum(share * q for (share, _), q in zip(present, quantiles, strict=True)) / total

    def percentiles(of: Callable[[float], list[float]]) -> Percentiles:
        return Percentiles(p50=mixed(of(0.5)), p95=mixed(of(0.95)), p99=mixed(of(0.99)))

    traffics = [(t.rate_rps, t.hit) for t in (load.split_traffic, load.unified_traffic) if t is not None]
    return Expected(
        attainment=load.attainment,
        goodput_rps=rate_rps * load.attainment,
        ttft_ms=percentiles(lambda q: [o.first.quantile_ms(q) for _, o in present]),
        tpot_ms=percentiles(lambda q: [o.step.quantile_ms(q) for _, o in present]),
        prefill_busy=max(o.first.busy for _, o in present),
        decode_busy=max(o.decode_busy for _, o in present),
        link_busy=max(o.link_busy for _, o in present),
        prefix_hit=sum(r * h for r, h in traffics) / sum(r for r, _ in traffics),
    )


def _best_split(found: dict[Kind, tuple[Shape, float] | None]) -> tuple[Shape, float] | None:
    """The plain split, unless another way beats it by more than its trouble."""
    chosen = found[Kind.SPLIT]
    for kind in (Kind.HETEROGENEOUS, Kind.STORE, Kind.MIXED):
        other = found[kind]
        if other and (chosen is None or other[1] > chosen[1] * (1 + SIMPLER)):
            chosen = other
    return chosen


def _verdict(
    rate: float,
    unified: tuple[Shape, float] | None,
    split: tuple[Shape, float] | None,
    gain: float,
    saving: float | None,
    *,
    without_split: str,
) -> tuple[Verdict, str]:
    by_unified = unified is not None and unified[1] >= rate
    by_split = split is not None and split[1] >= rate
    parted = Verdict.MIXED if split and split[0].kind is Kind.MIXED else Verdict.SPLIT
    if not by_unified and not by_split:
        return Verdict.INFEASIBLE, "no option keeps the targets on this fleet at this rate"
    if not by_unified:
        return parted, f"only a split keeps the targets on this fleet ({_signed(gain)} goodput over unified)"
    if by_split and gain >= WORTH:
        return parted, f"{_signed(gain)} goodput on the same GPUs (the rule asks for {WORTH:.0%})"
    if by_split and saving is not None and saving >= WORTH:
        return parted, f"the smallest fleet costs {saving:.0%} less (the rule asks for {WORTH:.0%})"
    less = f"a split changes goodput by {_signed(gain)}" if split else without_split
    return Verdict.UNIFIED, f"{less}; the rule asks for {WORTH:.0%} in goodput or cost"


def _explained(reason: str, verdict: Verdict, chosen: Shape | None, binding: str) -> str:
    if verdict is not Verdict.INFEASIBLE:
        return reason
    if chosen is None:
        return f"{reason}, nor does any fleet of up to {MOST_GPUS} of these GPUs: {binding}"
    return f"{reason}: {binding}. The cheapest fleet that does: {chosen.text()}"


def _rule(shape: Shape, traffics: Traffics, setting: Setting) -> Rule | None:
    tau, limit_ms = setting.target.tpot_ms, setting.target.ttft_ms
    if tau is None or limit_ms is None or shape.prefill_worker is None or shape.decode_worker is None:
        return None
    latency = shape.prefill_worker.latency
    traffic = traffics.whole(None if shape.kind is Kind.STORE else 0)
    service = prompt_ms(latency, traffic)
    low, high = 0.0, 1.0
    for _ in range(30):
        rho = (low + high) / 2
        waiting = wait(
            servers=shape.prefill,
            rate_rps=rho * shape.prefill / mean(service) * 1000,
            mean_service_ms=mean(service),
            service_squared_cv=squared_cv(service),
            dispersion=traffic.prompt_dispersion,
        )
        waits = Waits(first=waiting, second=NONE)
        kept = waits.within_all([limit_ms - latency.front_ms - s for s in service]) >= setting.attainment
        low, high = (rho, high) if kept else (low, rho)
    unified = shape.decode_worker.latency.decode.fixed_ms
    limit = max(0.0, 1 - unified / tau) / setting.mixing
    return Rule(rho=low, limit=limit, pays=low > limit)


def _money(ask: Ask, shape: Shape, rate: float, traffics: Traffics, setting: Setting) -> Money:
    return money_of(
        shape,
        load_of(shape, rate, traffics, setting),
        currency=ask.currency,
        network_per_hour=ask.network_per_hour,
        operations_per_hour=ask.operations_per_hour,
        prices=ask.prices,
    )


def _smallest_of(shape: Shape | None) -> Smallest | None:
    if shape is None:
        return None
    return Smallest(workers=shape.text(), gpus=shape.gpus, price_per_hour=shape.price_per_hour)


def _signed(share: float) -> str:
    return "unbounded" if math.isinf(share) else f"{share:+.0%}"
