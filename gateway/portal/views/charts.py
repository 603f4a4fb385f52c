"""Charts: each is a table, which the page shows on request and which the browser draws. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

MOST_SERIES: Final = 7
OTHERS: Final = "Others"


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One column: a value for each moment of the chart, None where nothing is known."""

    name: str
    values: Sequence[float | None]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart over time. `unit`: nano, count, ms, percent (of shares of 0 to 1) or workers; nano is money."""

    id: str
    title: str
    unit: str
    times: Sequence[int]  # Unix seconds
    series: Sequence[Series]
    stacked: bool = False

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to draw."""
        return not any(value for one in self.series for value in one.values)


def by_group(cells: Iterable[tuple[int, str, float]], times: Sequence[int]) -> Sequence[Series]:
    """Return a column per group, the largest first; what is beyond the largest few is added up as one.

    Args:
        cells: start of the bucket, name of the group, value; cells of one name and bucket are added.
        times: starts of all buckets.
    """
    index = {start_s: i for i, start_s in enumerate(times)}
    columns: dict[str, list[float]] = {}
    for start_s, name, value in cells:
        if start_s in index:
            columns.setdefault(name, [0.0] * len(times))[index[start_s]] += value
    ranked = sorted(columns, key=lambda name: (-sum(columns[name]), name))
    kept, rest = ranked[:MOST_SERIES], ranked[MOST_SERIES:]
    found = [Series(name=name, values=columns[name]) for name in kept]
    if rest:
        found.append(
            Series(name=OTHERS, values=[sum(values) for values in zip(*(columns[n] for n in rest), strict=True)])
        )
    return found


def in_order(found: Sequence[Series], names: Mapping[str, str]) -> Sequence[Series]:
    """Return columns in the order of `names`, renamed; those that are not named keep their name and come last."""
    order = list(names)
    ranked = sorted(found, key=lambda one: order.index(one.name) if one.name in names else len(order))
    return [Series(name=names.get(one.name, one.name), values=one.values) for one in ranked]
