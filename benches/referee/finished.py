"""Which requests have ended, told from sums. Pure.

The mocker says at each tick how many requests ended and what their prompts and answers came to together, not which
they were. A production gateway knows; with ticks of a few milliseconds there are rarely more than two, and whose sums
they are is found among those under way.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

_MOST_TRIES = 20_000


class Asked(msgspec.Struct, frozen=True):
    """One request of a trace."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    """Known to nobody before it has ended."""


_Size = tuple[int, int]


class Underway:
    """Requests that have arrived and not ended, by the lengths of prompt and answer."""

    def __init__(self) -> None:
        self._by_size: dict[_Size, deque[Asked]] = {}
        self._number = 0
        self.num_told = 0
        """Ended ones that were found."""
        self.num_guessed = 0
        """Ended ones for which those that were most overdue were taken."""

    def __len__(self) -> int:
        return self._number

    def arrived(self, request: Asked) -> None:
        """Take one that begins."""
        self._number += 1
        self._by_size.setdefault(_size(request), deque()).append(request)

    def ended(self, count: int, prompt_tokens: int, output_tokens: int, now_s: float) -> list[Asked]:
        """Return, and forget, `count` requests with these sums; where none fit, the most overdue ones.

        What is returned for a guess has the right number and not the right sums: see `num_guessed`.
        """
        count = min(count, len(self))
        every = list(self._by_size) if count > 1 else []
        sizes = self._fitting(count, (prompt_tokens, output_tokens), every, 0, [_MOST_TRIES])
        if sizes is not None:
            self.num_told += count
            return [self._take(size) for size in sizes]
        self.num_guessed += count
        return [self._take(_size(request)) for request in self._overdue(count, now_s)]

    def _fitting(
        self, count: int, left: _Size, sizes: list[_Size], first: int, budget: list[int]
    ) -> list[_Size] | None:
        """Return sizes of so many requests that add up to what is left, none before the first of `sizes`."""
        if count == 0:
            return [] if left == (0, 0) else None
        if count == 1:
            return [left] if left in self._by_size else None
        for at in range(first, len(sizes)):
            budget[0] -= 1
            if budget[0] < 0:
                return None
            size = sizes[at]
            rest = left[0] - size[0], left[1] - size[1]
            if rest[0] < 0 or rest[1] < 0:
                continue
            found = self._fitting(count - 1, rest, sizes, at, budget)
            if found is not None and self._has([size, *found]):
                return [size, *found]
        return None

    def _has(self, sizes: list[_Size]) -> bool:
        """Whether as many of each size are under way."""
        return all(sizes.count(size) <= len(self._by_size[size]) for size in sizes)

    def _overdue(self, count: int, now_s: float) -> list[Asked]:
        """Return those that took the longest for each token of their answers."""
        return sorted(self._every(), key=lambda r: ((r.at_s - now_s) / r.output_tokens, r.number))[:count]

    def _every(self) -> Iterator[Asked]:
        for requests in self._by_size.values():
            yield from requests

    def _take(self, size: _Size) -> Asked:
        requests = self._by_size[size]
        request = requests.popleft()
        self._number -= 1
        if not requests:
            del self._by_size[size]
        return request


def _size(request: Asked) -> _Size:
    return request.prompt_tokens, request.output_tokens
