"""How many requests arrive, and how many will: a straight line through the past that still explains the present. Pure.

Arrivals are counted in bins. Of several spans, the longest one counts whose line the latest bins do not contradict:
a steady pool is judged by half an hour, one whose load jumped a minute ago by that minute. A slope counts only where
chance does not explain it. Batch lines are not counted: they wait for room instead of asking for it.
"""

import math
from collections import deque
from collections.abc import Sequence

import msgspec

BIN_S = 10.0
SPANS_BINS = (180, 90, 48, 24, 12, 6)
"""30 min to 1 min."""
_LATEST = 6
"""Bins at the end that may contradict a line, at most."""
_DOUBT = 3.0
"""Standard deviations of a Poisson count at which they do: it is asked hundreds of times an hour."""
_SLOPE_DOUBT = 3.0


class RateForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals now and in a while."""

    now_rps: float
    ahead_rps: float
    """At the end of the time asked about."""
    error_rps: float
    """Standard error of `now_rps`."""
    span_s: float
    """Of the past that it rests on."""

    @property
    def highest_rps(self) -> float:
        """The most that will have to be served until then."""
        return max(self.now_rps, self.ahead_rps)


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What a trend has counted, without its clock."""

    bins: tuple[int, ...]
    """Of `BIN_S` each, the latest last."""
    open: int
    """Since the last of them ended."""
    open_s: float
    """That long ago."""


class ArrivalTrend:
    """Counts arrivals of one pool."""

    def __init__(self) -> None:
        self._bins: deque[int] = deque(maxlen=SPANS_BINS[0])
        self._open = 0
        self._open_number: int | None = None
        self._offset_s = 0.0
        """What the bins' clock is ahead of the caller's."""
        self._last_s: float | None = None

    def counted(self, now_s: float) -> Counted:
        """Return what was counted until now."""
        self._advance(now_s)
        return Counted(bins=tuple(self._bins), open=self._open, open_s=(now_s + self._offset_s) % BIN_S)

    def restore(self, counted: Counted, now_s: float, *, ago_s: float) -> None:
        """Go on where another trend was so many seconds ago. Before anything was observed.

        Who waited to be counted meanwhile is counted at once: after so many empty bins they make no higher rate.
        """
        self._bins.extend(counted.bins)
        self._open, self._open_number = counted.open, 0
        self._offset_s = counted.open_s + ago_s - now_s
        self._advance(now_s)

    def observe(self, now_s: float) -> None:
        """Count one arrival."""
        self._advance(now_s)
        self._open += 1
        self._last_s = now_s

    @property
    def last_s(self) -> float | None:
        """When the last one came; None = none yet."""
        return self._last_s

    def forecast(self, now_s: float, *, ahead_s: float) -> RateForecast | None:
        """Return the rate now and after `ahead_s`; None before anything is known.

        A pool that has just begun to be watched is judged by what it has; empty bins are readings too.
        """
        self._advance(now_s)
        bins = list(self._bins)
        if not bins:
            return None
        for span in SPANS_BINS:
            if len(bins) < span and span != SPANS_BINS[-1]:
                continue
            line = _line(bins[-span:])
            if span == SPANS_BINS[-1] or not _contradicted(bins[-span:], line):
                break
        level, slope, error = line
        seen_s = min(span, len(bins)) * BIN_S
        ahead = level + slope * min(ahead_s, seen_s / 2) / BIN_S  # no further than it has been seen to go on
        return RateForecast(
            now_rps=max(0.0, level) / BIN_S,
            ahead_rps=max(0.0, ahead) / BIN_S,
            error_rps=error / BIN_S,
            span_s=seen_s,
        )

    def _advance(self, now_s: float) -> None:
        number = math.floor((now_s + self._offset_s) / BIN_S)
        if self._open_number is None:
            self._open_number = number
        if number - self._open_number > SPANS_BINS[0]:
            self._bins.extend([0] * SPANS_BINS[0])
            self._open, self._open_number = 0, number
        while self._open_number < number:
            self._bins.append(self._open)
            self._open = 0
            self._open_number += 1


def _line(bins: Sequence[int]) -> tuple[float, float, float]:
    """Return level at the end and slope per bin of the counts, and the level's standard error; flat if that will do."""
    count = len(bins)
    mean = sum(bins) / count
    error = math.sqrt(max(mean, 1 / count) / count)
    if count < 12:
        return mean, 0.0, error
    middle = (count - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(count))
    slope = sum((i - middle) * value for i, value in enumerate(bins)) / spread
    chance = math.sqrt(max(mean, 1 / count) / spread)
    if abs(slope) <= _SLOPE_DOUBT * chance:
        return mean, 0.0, error
    slope -= math.copysign(chance, slope)  # what stands out is partly luck
    return mean + slope * (count - middle), slope, error * math.sqrt(1 + 3.0)


def _contradicted(bins: Sequence[int], line: tuple[float, float, float]) -> bool:
    """Whether the latest bins are too far from the line, all of them together or the last few."""
    level, slope, _ = line
    for latest in (2, _LATEST, len(bins) // 4):
        expected = max(0.0, sum(level - slope * (i + 0.5) for i in range(latest)))
        seen = sum(bins[-latest:])
        if abs(seen - expected) > _DOUBT * math.sqrt(max(expected, 1.0)) + 1:
            return True
    return False
