"""Counters, histograms and gauges over prometheus_client, with declared and bounded labels.

Telemetry never breaks serving: a label that is not declared is left out and a value beyond the bound
becomes `other`; both are counted in `pdgate_telemetry_faults_total`, which a healthy process keeps at 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PromCounter
from prometheus_client import Histogram as PromHistogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

PREFIX: Final = "pdgate_"
MAX_VALUES_PER_LABEL: Final = 200
OTHER: Final = "other"
_MAX_EXEMPLAR_CHARS: Final = 128

Observe = Callable[[], Iterable[tuple[float, Mapping[str, str]]]]


class Declared(msgspec.Struct, frozen=True):
    """One instrument: its name without the prefix, its help and the label keys it may carry."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # histograms only

    @property
    def full_name(self) -> str:
        """Name as it is scraped, without the suffixes of its kind."""
        return PREFIX + self.name


class Faults:
    """Counts what telemetry had to leave out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = PromCounter(
            PREFIX + "telemetry_faults",
            "Labels that were left out or bounded.",
            ("instrument", "fault"),
            registry=registry,
        )
        self.total = 0

    def count(self, instrument: str, fault: str) -> None:
        """Count one fault of one instrument."""
        self.total += 1
        self._counter.labels(instrument, fault).inc()


class Labels:
    """Turns label mappings into value tuples: declared keys only, a bounded number of values each."""

    def __init__(self, declared: Declared, faults: Faults, *, max_values: int = MAX_VALUES_PER_LABEL) -> None:
        self._name = declared.name
        self._keys = declared.labels
        self._faults = faults
        self._max_values = max_values
        self._seen: tuple[set[str], ...] = tuple(set() for _ in declared.labels)

    def values(self, given: Mapping[str, str]) -> tuple[str, ...]:
        """Return the values in declared order; a key that is not given is empty."""
        if len(given) == len(self._keys):
            try:
                return tuple([given[key] for key in self._keys])
            except KeyError:  # as many as declared, but not the same ones
                pass
        if any(key not in self._keys for key in given):
            self._faults.count(self._name, "undeclared_label")
        return tuple([given.get(key, "") for key in self._keys])

    def bounded(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Return the values with each that is one too many replaced by `other`. For new tuples only."""
        return tuple(self._bound(seen, value) for seen, value in zip(self._seen, values, strict=True))

    def _bound(self, seen: set[str], value: str) -> str:
        if value in seen:
            return value
        if len(seen) >= self._max_values:
            self._faults.count(self._name, "too_many_values")
            return OTHER
        seen.add(value)
        return value


class Counter:
    """A number that only grows, by labels."""

    def __init__(self, declared: Declared, registry: CollectorRegistry, faults: Faults) -> None:
        self._labels = Labels(declared, faults)
        self._family = PromCounter(declared.full_name, declared.help, declared.labels, registry=registry)
        self._children: dict[tuple[str, ...], PromCounter] = {}

    def add(self, amount: float, labels: Mapping[str, str] | None = None) -> None:
        """Add `amount` >= 0."""
        values = self._labels.values(labels or {})
        child = self._children.get(values)
        if child is None:
            bounded = self._labels.bounded(values)
            child = self._family.labels(*bounded) if bounded else self._family
            if bounded == values:  # what was bounded is not remembered: its kinds are endless
                self._children[values] = child
        child.inc(amount)


class Histogram:
    """A distribution of seconds or bytes, by labels."""

    def __init__(self, declared: Declared, registry: CollectorRegistry, faults: Faults) -> None:
        self._labels = Labels(declared, faults)
        self._family = PromHistogram(
            declared.full_name, declared.help, declared.labels, registry=registry, buckets=declared.buckets
        )
        self._children: dict[tuple[str, ...], PromHistogram] = {}

    def record(self, value: float, labels: Mapping[str, str] | None = None, *, trace_id: str = "") -> None:
        """Record one value; with the trace that shows it as exemplar, if there is one."""
        values = self._labels.values(labels or {})
        child = self._children.get(values)
        if child is None:
            bounded = self._labels.bounded(values)
            child = self._family.labels(*bounded) if bounded else self._family
            if bounded == values:
                self._children[values] = child
        exemplar = {"trace_id": trace_id[: _MAX_EXEMPLAR_CHARS - len("trace_id")]} if trace_id else None
        child.observe(value, exemplar)


class Gauges(Collector):
    """Gauges that are read when scraped."""

    def __init__(self, declared: Mapping[str, Declared], faults: Faults) -> None:
        self._declared = declared
        self._faults = faults
        self._sources: dict[str, list[Observe]] = {}
        self._labels: dict[str, Labels] = {}

    def observe(self, full_name: str, source: Observe) -> None:
        """Read a declared gauge from `source` at each scrape; several sources add their series up.

        Raises:
            ValueError: the gauge is not declared.
        """
        if full_name not in self._declared:
            raise ValueError(f"{full_name} is not declared in observability.metrics.GAUGES")
        self._sources.setdefault(full_name, []).append(source)
        self._labels.setdefault(full_name, Labels(self._declared[full_name], self._faults))

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield nothing: registering must not read the sources."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one family for each observed gauge. A source that fails is counted, the others are read."""
        for full_name, sources in self._sources.items():
            declared, labels = self._declared[full_name], self._labels[full_name]
            family = GaugeMetricFamily(full_name, declared.help, labels=declared.labels)
            series: dict[tuple[str, ...], float] = {}
            for source in sources:
                for value, given in self._read(source, declared.name):
                    key = labels.bounded(labels.values(given))
                    series[key] = series.get(key, 0.0) + value
            for key, value in series.items():
                family.add_metric(key, value)
            yield family

    def _read(self, source: Observe, name: str) -> Sequence[tuple[float, Mapping[str, str]]]:
        try:
            return list(source())
        except Exception:  # noqa: BLE001 - one broken gauge must not take the whole scrape away
            self._faults.count(name, "source_failed")
            return ()
