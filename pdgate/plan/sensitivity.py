"""What the answer depends on: the gain under other inputs, its range under the fit's errors, and break-even points.

Each case searches the best unified fleet and the best split again, with the kinds of worker of the decision.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from contracts.slo import SloTarget
from pdgate.plan.compare import Ask
from pdgate.plan.decide import WORTH, Choice
from pdgate.plan.fleet import Setting, Worker, workers_of
from pdgate.plan.options import best
from pdgate.plan.shapes import Kind, Shape, split_shapes, unified_shapes
from pdgate.plan.traffic import Traffics

FIXED_CHUNKS = (2048, 8192)  # prompt tokens per step of unified workers, as engines have them by default
MIXINGS = (1.0, 1.5)  # range of kappa in public measurements
PROMPT_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
FLEET_FACTORS = (0.5, 1.0, 2.0, 4.0)
NETWORKS_GB = (0.5, 1, 2, 5, 10, 25, 50, 100, 200, 400)
SURFACE_NETWORKS = ("", "200Gb", "25Gb")  # the fleet's own, one fast card per worker, one slow card
LARGEST_SURFACE = 256  # GPUs


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The gain under one changed input."""

    change: str
    gain: float | None  # None = the unified fleet keeps the targets at no rate, the split does
    pays: bool  # by the rule on goodput
    flips: bool  # whether that differs from the decision's own


class SurfacePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The gain at one prompt length, fleet size (which sets the rate) and network."""

    network: str  # per worker; "" = the fleet's own
    prompt_tokens: float
    gpus: int
    split_rps: float  # the rate such a fleet serves when split
    unified_rps: float


class NetworkPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of the split with one line rate per prefill worker."""

    gigabytes_per_s: float
    capacity_rps: float


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    low: float | None  # range of the gain under the fit's errors and the cost of mixing; None = unbounded
    high: float | None
    cases: list[Case]
    would_change: list[str]  # changes that flip whether a split pays
    network: list[NetworkPoint]
    network_needed_gb: float | None  # least line rate per worker, GB/s, at which the split keeps 95 % of its capacity


class _Bench:
    """Searches with the decision's kinds of worker."""

    def __init__(self, ask: Ask, traffics: Traffics, setting: Setting, choice: Choice) -> None:
        self.count, self._gpu = ask.fleet[0]
        self.traffics = traffics
        self.setting = setting
        assert choice.split is not None
        shape = choice.split[0]
        assert shape.prefill_worker is not None
        assert shape.decode_worker is not None
        self._kind = Kind.STORE if shape.kind is Kind.STORE else Kind.SPLIT
        self._prefill, self._decode = shape.prefill_worker.use, shape.decode_worker.use

    def capacities(
        self, setting: Setting | None = None, traffics: Traffics | None = None, *, gpus: int | None = None
    ) -> tuple[float, float]:
        """Capacity of the best unified fleet and of the best split, requests per second."""
        traffics = traffics or self.traffics
        setting = msgspec.structs.replace(setting or self.setting, moments=traffics.moments)
        gpus = gpus or self.count
        one = best(unified_shapes(workers_of(self._gpu, gpus, setting), gpus), traffics, setting)
        return (one[1] if one else 0.0), self.split_rps(setting, traffics, gpus)

    def split_rps(self, setting: Setting, traffics: Traffics, gpus: int) -> float:
        """Capacity of the best split, requests per second."""
        setting = msgspec.structs.replace(setting, moments=traffics.moments)
        workers = workers_of(self._gpu, gpus, setting)
        prefill, decode = self._like(workers, self._prefill.gpus), self._like(workers, self._decode.gpus)
        two = best(split_shapes(self._kind, prefill, decode, gpus), traffics, setting)
        return two[1] if two else 0.0

    @staticmethod
    def _like(workers: Sequence[Worker], gpus: int) -> list[Worker]:
        same = [w for w in workers if w.use.gpus == gpus]
        return same or list(workers[:1])


def sensitivity_of(
    ask: Ask, traffics: Traffics, setting: Setting, choice: Choice, progress: Callable[[str], None] = lambda _: None
) -> Sensitivity | None:
    """Return what the gain depends on; None if there is no split to compare or the fleet has two kinds of GPU."""
    if choice.split is None or len(ask.fleet) != 1:
        return None
    bench = _Bench(ask, traffics, setting, choice)
    own = _gain(*bench.capacities())
    pays = _pays(own)
    cases = []
    for change, changed_setting, changed_traffics in _changes(traffics, setting):
        progress(f"sensitivity: {change}")
        gain = _gain(*bench.capacities(changed_setting, changed_traffics))
        cases.append(Case(change=change, gain=_finite(gain), pays=_pays(gain), flips=_pays(gain) != pays))
    progress("confidence range")
    spread = [_gain(*bench.capacities(s)) for s in _corners(setting)]
    network = _network(choice.split[0], traffics, setting)
    flips = [c.change for c in cases if c.flips]
    return Sensitivity(
        low=_finite(min(spread)),
        high=_finite(max(spread)),
        cases=cases,
        would_change=flips,
        network=network,
        network_needed_gb=_needed(network),
    )


def surface_of(
    ask: Ask, traffics: Traffics, setting: Setting, choice: Choice, progress: Callable[[str], None] = lambda _: None
) -> list[SurfacePoint]:
    """Return capacities over prompt length and fleet size (each fleet serves its own rate); empty without a split."""
    if choice.split is None or len(ask.fleet) != 1:
        return []
    bench = _Bench(ask, traffics, setting, choice)
    points = []
    fleets = [gpus for f in FLEET_FACTORS if 2 <= (gpus := round(bench.count * f)) <= LARGEST_SURFACE]
    for factor in PROMPT_FACTORS:
        scaled = traffics.scaled(prompt=factor)
        tokens = scaled.whole(0).mean_uncached_tokens
        progress(f"break-even: prompts of {tokens:.0f} tokens")
        for gpus in fleets:
            unified, own = bench.capacities(traffics=scaled, gpus=gpus)
            for network in SURFACE_NETWORKS:
                linked = msgspec.structs.replace(setting, network=network)
                split = bench.split_rps(linked, scaled, gpus) if network else own
                points.append(
                    SurfacePoint(network=network, prompt_tokens=tokens, gpus=gpus, split_rps=split, unified_rps=unified)
                )
    return points


def _changes(traffics: Traffics, setting: Setting) -> list[tuple[str, Setting | None, Traffics | None]]:
    target, prefill, decode = setting.target, setting.errors.prefill, setting.errors.decode
    changes: list[tuple[str, Setting | None, Traffics | None]] = [
        ("prompts 30 % shorter", None, traffics.scaled(prompt=0.7)),
        ("prompts 50 % longer", None, traffics.scaled(prompt=1.5)),
        ("answers 30 % shorter", None, traffics.scaled(output=0.7)),
        ("answers 50 % longer", None, traffics.scaled(output=1.5)),
        ("no prefix hits", None, traffics.scaled(hits=0.0)),
        ("prefix hits 50 % more", None, traffics.scaled(hits=1.5)),
        ("arrivals half as bursty", None, traffics.scaled(burstiness=0.5)),
        ("arrivals twice as bursty", None, traffics.scaled(burstiness=2.0)),
        (f"prefill {prefill:.0%} faster", _with(setting, speed_prefill=1 - prefill), None),
        (f"prefill {prefill:.0%} slower", _with(setting, speed_prefill=1 + prefill), None),
        (f"decode {decode:.0%} faster", _with(setting, speed_decode=1 - decode), None),
        (f"decode {decode:.0%} slower", _with(setting, speed_decode=1 + decode), None),
    ]
    changes += [(f"mixing costs {k:.0%}", _with(setting, mixing=k), None) for k in MIXINGS]
    changes += [
        (f"fixed chunks of {tokens:,} tokens", msgspec.structs.replace(setting, chunk_tokens=tokens), None)
        for tokens in FIXED_CHUNKS
    ]
    if target.ttft_ms is not None:
        changes += [
            _retarget(setting, "TTFT", f, SloTarget(ttft_ms=target.ttft_ms * f, tpot_ms=target.tpot_ms))
            for f in (0.5, 2.0)
        ]
    if target.tpot_ms is not None:
        changes += [
            _retarget(setting, "TPOT", f, SloTarget(ttft_ms=target.ttft_ms, tpot_ms=target.tpot_ms * f))
            for f in (0.7, 1.5)
        ]
    return changes


def _with(setting: Setting, **changed: float) -> Setting:
    return msgspec.structs.replace(setting, **changed)


def _retarget(setting: Setting, name: str, factor: float, target: SloTarget) -> tuple[str, Setting, None]:
    value = target.ttft_ms if name == "TTFT" else target.tpot_ms
    return f"{name} target {value:g} ms ({factor:g} x)", msgspec.structs.replace(setting, target=target), None


def _corners(setting: Setting) -> list[Setting]:
    """Settings at the ends of the fit's errors; decode and prefill err apart."""
    return [
        _with(setting, speed_prefill=p, speed_decode=d, mixing=k)
        for p in (1 - setting.errors.prefill, 1 + setting.errors.prefill)
        for d in (1 - setting.errors.decode, 1 + setting.errors.decode)
        for k in (1.0, setting.mixing)
    ]


def _network(shape: Shape, traffics: Traffics, setting: Setting) -> list[NetworkPoint]:
    points = []
    for gigabytes in NETWORKS_GB:
        slower = _with_link(shape, gigabytes * 1e9 * setting.fit.transfer_share)
        found = best(iter([slower]), traffics, setting)
        points.append(NetworkPoint(gigabytes_per_s=gigabytes, capacity_rps=found[1] if found else 0.0))
    return points


def _with_link(shape: Shape, bytes_per_s: float) -> Shape:
    worker = shape.prefill_worker
    assert worker is not None
    transfer = msgspec.structs.replace(worker.latency.transfer, bytes_per_ms=bytes_per_s / 1000)
    latency = msgspec.structs.replace(worker.latency, transfer=transfer)
    return msgspec.structs.replace(shape, prefill_worker=msgspec.structs.replace(worker, latency=latency))


def _needed(network: Sequence[NetworkPoint]) -> float | None:
    most = max(p.capacity_rps for p in network)
    return next((p.gigabytes_per_s for p in network if most > 0 and p.capacity_rps >= 0.95 * most), None)


def _gain(unified: float, split: float) -> float:
    if unified > 0:
        return split / unified - 1
    return math.inf if split > 0 else -1.0


def _pays(gain: float) -> bool:
    return gain >= WORTH


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value
