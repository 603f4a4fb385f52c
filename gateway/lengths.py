"""How long the answers of an organisation are, learned from those that ended: what money is reserved for.

The last answers of each organisation and model are kept in a ring. Few answers say nothing, and then the
reservation covers the whole maximum.
"""

from array import array
from collections import OrderedDict
from typing import Final

QUANTILE: Final = 0.95
_KEPT: Final = 128
_ENOUGH: Final = 20
_SORT_EVERY: Final = 8
_MAX_RINGS: Final = 4096


class _Ring:
    __slots__ = ("_lengths", "_next", "quantile")

    def __init__(self) -> None:
        self._lengths = array("l")
        self._next = 0
        self.quantile: int | None = None

    def add(self, tokens: int) -> None:
        if len(self._lengths) < _KEPT:
            self._lengths.append(tokens)
        else:
            self._lengths[self._next % _KEPT] = tokens
        self._next += 1
        if len(self._lengths) >= _ENOUGH and (self.quantile is None or self._next % _SORT_EVERY == 0):
            ordered = sorted(self._lengths)
            self.quantile = ordered[min(len(ordered) - 1, int(QUANTILE * len(ordered)))]


class Lengths:
    """Answer lengths in tokens, by organisation and model."""

    def __init__(self) -> None:
        self._rings: OrderedDict[tuple[str, str], _Ring] = OrderedDict()

    def ended(self, org: str, model: str, tokens: int) -> None:
        """Take the length of an answer that came to its own end, all its samples together: rather too much."""
        ring = self._rings.get((org, model))
        if ring is None:
            ring = self._rings[org, model] = _Ring()
            if len(self._rings) > _MAX_RINGS:
                self._rings.popitem(last=False)
        ring.add(tokens)

    def likely(self, org: str, model: str) -> int | None:
        """Return the length that 95 of 100 answers do not exceed; None = not enough are known."""
        ring = self._rings.get((org, model))
        return ring.quantile if ring is not None else None
