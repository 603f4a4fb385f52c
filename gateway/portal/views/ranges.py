"""The time that a page is about: from the query, in whole buckets, with the time before. Pure."""

from collections.abc import Mapping
from typing import Final

import msgspec

from billing.queries import Span

_HOUR_S: Final = 3600
_DAY_S: Final = 86_400
CHOICES: Final[Mapping[str, tuple[str, int, int]]] = {
    "1h": ("Last hour", _HOUR_S, 60),
    "24h": ("Last 24 hours", _DAY_S, _HOUR_S),
    "7d": ("Last 7 days", 7 * _DAY_S, 6 * _HOUR_S),
    "30d": ("Last 30 days", 30 * _DAY_S, _DAY_S),
    "90d": ("Last 90 days", 90 * _DAY_S, _DAY_S),
}
"""What people choose from: words, length and width of a bucket, seconds."""
USUAL: Final = "7d"


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """One choice at one moment."""

    name: str
    words: str
    span: Span

    @property
    def before(self) -> Span:
        """Return the period of the same length before this one."""
        length_s = self.span.end_s - self.span.start_s
        return Span(start_s=self.span.start_s - length_s, end_s=self.span.start_s, width_s=self.span.width_s)

    @property
    def starts(self) -> range:
        """Return the starts of all buckets, Unix seconds."""
        return range(self.span.start_s, self.span.end_s, self.span.width_s)


def range_of(name: str | None, now_s: float) -> Range:
    """Return the range of a name, the usual one for a name that is none; it ends with the bucket that runs."""
    chosen = name if name is not None and name in CHOICES else USUAL
    words, length_s, width_s = CHOICES[chosen]
    end_s = (int(now_s) // width_s + 1) * width_s
    return Range(name=chosen, words=words, span=Span(start_s=end_s - length_s, end_s=end_s, width_s=width_s))
