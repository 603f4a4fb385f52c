"""The virtual clock: a heap of callbacks by time, ms."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Runs callbacks in the order of their time; ties in the order they were set."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._seq = 0

    def at(self, when_ms: float, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` at `when_ms`, at once if that is past."""
        self._seq += 1
        heapq.heappush(self._heap, (max(when_ms, self.now_ms), self._seq, call, args))

    def after(self, delay_ms: float, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` in `delay_ms`."""
        self.at(self.now_ms + delay_ms, call, *args)

    def step(self, until_ms: float) -> bool:
        """Run the next callback; False when there is none before `until_ms`."""
        if not self._heap or self._heap[0][0] > until_ms:
            return False
        self.now_ms, _, call, args = heapq.heappop(self._heap)
        call(*args)
        return True
