"""How long a stream's gaps between tokens were, in little room: for targets on their 99th percentile."""

import math

_PER_DOUBLING = 8  # buckets: a percentile is exact to 9 %
_SMALLEST_MS = 0.1
_NUM_BUCKETS = 8 * 24


class Gaps:
    """Counts gaps by size. Tokens that come together have gaps of nothing between them."""

    __slots__ = ("_counts", "_last_s", "_number")

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._number = 0
        self._last_s: float | None = None

    def add(self, num_tokens: int, now_s: float) -> None:
        """Take a delivery of tokens."""
        if not num_tokens:
            return
        last_s, self._last_s = self._last_s, now_s
        if last_s is not None:
            self._counts[_bucket((now_s - last_s) * 1000)] += 1
            self._number += 1
        self._counts[0] += num_tokens - 1
        self._number += num_tokens - 1

    def p99_ms(self) -> float | None:
        """Return the gap that 99 in 100 do not exceed; None before the second token."""
        if not self._number:
            return None
        below, most = 0, math.ceil(self._number * 0.99)
        for bucket, count in enumerate(self._counts):
            below += count
            if below >= most:
                return _upper_ms(bucket)
        return _upper_ms(_NUM_BUCKETS - 1)


def _bucket(ms: float) -> int:
    if ms <= _SMALLEST_MS:
        return 0
    return min(_NUM_BUCKETS - 1, math.ceil(math.log2(ms / _SMALLEST_MS) * _PER_DOUBLING))


def _upper_ms(bucket: int) -> float:
    return 0.0 if bucket == 0 else _SMALLEST_MS * 2 ** (bucket / _PER_DOUBLING)
