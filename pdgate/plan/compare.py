"""The options side by side on the fleet at hand, and on other hardware for the same money."""

from collections.abc import Iterator, Sequence

import msgspec

from contracts.roofline import Accelerator, ModelShape
from pdgate.plan.fleet import Setting, Worker, runs_on, workers_of
from pdgate.plan.money import Prices
from pdgate.plan.options import best, load_of, smallest
from pdgate.plan.shapes import Kind, Shape, mixed_shapes, split_shapes, unified_shapes
from pdgate.plan.traffic import Traffics

MOST_GPUS = 512  # of the search for the smallest fleet
MOST_ALTERNATIVES = 2  # other kinds of GPU that are shown, the best ones
NO_HAND_OFF = "no engine hands KV over on these machines"


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve the traffic on the fleet at hand."""

    name: str
    workers: str
    gpus: int
    capacity_rps: float  # highest rate that keeps the targets
    gain: float | None  # capacity over the unified fleet's, less one; None = the unified fleet has none
    attainment: float  # 0 to 1 at the planned rate
    price_per_hour: float | None  # None = left out of a report that is shared
    note: str = ""


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A small model that answers short prompts."""

    shape: ModelShape
    weights: str
    up_to_tokens: int  # prompts of at most so many go to it


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at hand and its costs."""

    fleet: tuple[tuple[int, Accelerator], ...]
    currency: str = "USD"
    network_per_hour: float = 0.0
    operations_per_hour: float = 0.0
    prices: Prices | None = None
    mean_rate_rps: float | None = None  # money at this rate; None = at the planned one
    alternatives: tuple[Accelerator, ...] = ()  # other GPUs to try for decode at the same price
    local: LocalModel | None = None  # a small model for short prompts

    @property
    def hands_off(self) -> bool:
        """Whether an engine moves KV between workers on all of the fleet."""
        return all(gpu.hands_off for _, gpu in self.fleet)


class Comparison:
    """Shapes of each kind on the fleet at hand, and their capacities."""

    def __init__(self, ask: Ask, traffics: Traffics, setting: Setting, workers: Sequence[list[Worker]]) -> None:
        self._ask = ask
        self._traffics = traffics
        self._setting = setting
        self._workers = workers

    def best(self, kind: Kind) -> tuple[Shape, float] | None:
        """Return the best shape of a kind and its capacity; None if none keeps the targets at any rate."""
        return best(self._shapes(kind), self._traffics, self._setting)

    def smallest(self, kind: Kind, rate_rps: float) -> Shape | None:
        """Return the cheapest unified or split fleet of the first kind of GPU that serves a rate."""
        gpu = self._ask.fleet[0][1]

        def make(gpus: int) -> Iterator[Shape]:
            workers = workers_of(gpu, gpus, self._setting)
            if kind is Kind.UNIFIED:
                return unified_shapes(workers, gpus)
            return split_shapes(Kind.SPLIT, workers, workers, gpus)

        return smallest(make, self._traffics, self._setting, rate_rps=rate_rps, most=MOST_GPUS)

    def unified_rps(self) -> float:
        """Return the rate that unified workers serve, each kind of GPU on its own."""
        total = 0.0
        for (count, _), workers in zip(self._ask.fleet, self._workers, strict=True):
            result = best(unified_shapes(workers, count), self._traffics, self._setting)
            total += result[1] if result else 0.0
        return total

    def options(self, found: dict[Kind, tuple[Shape, float] | None], base: float) -> list[Option]:
        """Return the rows to compare; gains are over `base` requests per second."""
        rows = []
        for kind, result in found.items():
            if result is None:
                if kind is not Kind.HETEROGENEOUS or len(self._ask.fleet) == 2:
                    rows.append(_none(kind, self._ask))
                continue
            rows.append(self._option(kind.value, *result, base, self._idle(result[0])))
        return rows

    def alternatives(self, base: float) -> list[Option]:
        """The best split with another GPU for decode at the same price, for each such GPU."""
        count, own = self._ask.fleet[0]
        budget = count * own.price_per_hour
        apart = msgspec.structs.replace(self._setting, network=self._setting.network or _cards(own))
        rows = []
        for other in self._ask.alternatives:
            if other.name == own.name or not other.price_per_hour or not runs_on(self._setting.engine, other):
                continue
            found: tuple[Shape, float] | None = None
            for quarters in (1, 2, 3):
                keep = count * quarters // 4
                buy = int((budget - keep * own.price_per_hour) / other.price_per_hour)
                if keep < 1 or buy < 1:
                    continue
                shapes = split_shapes(
                    Kind.HETEROGENEOUS,
                    workers_of(own, keep, apart),
                    workers_of(other, buy, apart),
                    keep,
                    decode_gpus=buy,
                )
                result = best(shapes, self._traffics, self._setting)
                if result and (found is None or result[1] > found[1]):
                    found = result
            if found is not None:
                note = f"not your fleet: {other.name} bought for the same price per hour"
                if other.maker != own.maker:
                    note += f"; does your engine hand KV over from {own.maker} to {other.maker}?"
                rows.append(self._option(f"decode on {other.name}", *found, base, note))
        rows.sort(key=lambda row: -row.capacity_rps)
        return rows[:MOST_ALTERNATIVES]

    def _idle(self, shape: Shape) -> str:
        used = {worker.gpu.name for _, worker in shape.pools()}
        left = [f"{count}x{gpu.name}" for count, gpu in self._ask.fleet if gpu.name not in used]
        return f"leaves {left[0]} without work" if left else ""

    def _option(self, name: str, shape: Shape, capacity: float, base: float, note: str = "") -> Option:
        load = load_of(shape, self._traffics.rate_rps, self._traffics, self._setting)
        return Option(
            name=name,
            workers=shape.text(),
            gpus=shape.gpus,
            capacity_rps=capacity,
            gain=capacity / base - 1 if base > 0 else None,
            attainment=load.attainment,
            price_per_hour=shape.price_per_hour,
            note=note,
        )

    def _shapes(self, kind: Kind) -> Iterator[Shape]:
        if kind is Kind.HETEROGENEOUS:
            if len(self._workers) == 2:
                (first, _), (second, _) = self._ask.fleet
                one, two = self._workers
                yield from split_shapes(kind, one, two, first, decode_gpus=second)
                yield from split_shapes(kind, two, one, second, decode_gpus=first)
            return
        for (count, _), workers in zip(self._ask.fleet, self._workers, strict=True):
            if kind is Kind.UNIFIED:
                yield from unified_shapes(workers, count)
            elif kind is Kind.MIXED:
                yield from mixed_shapes(workers, count)
            else:
                yield from split_shapes(kind, workers, workers, count)


def _none(kind: Kind, ask: Ask) -> Option:
    unlinked = kind is not Kind.UNIFIED and not ask.hands_off
    return Option(
        name=kind.value,
        workers="-",
        gpus=0,
        capacity_rps=0.0,
        gain=None,
        attainment=0.0,
        price_per_hour=0.0,
        note=NO_HAND_OFF if unlinked else "keeps the targets at no rate",
    )


def _cards(gpu: Accelerator) -> str:
    return f"{gpu.network_bytes_per_s / 1e9:g}GB"
