"""KV hand-offs under way and their timers."""

from scheduler.book import Request
from scheduler.worker import Worker


class HandOffTimers:
    """One timer per request whose prompt is computed and whose KV cache is not known to have arrived.

    It runs from the end of prefill, never while the prefill side waits for a decode slot.
    """

    def __init__(self, *, minimum_s: float = 5.0, factor: float = 10.0) -> None:
        self._minimum_s = minimum_s
        self._factor = factor
        self._running: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, request: Request, prefill: Worker | None, now_s: float) -> None:
        """Start the timer of `request`; expected = what hand-offs of its prefill worker took lately."""
        expected_s = prefill.transfer_p50_ms / 1000 if prefill is not None else 0.0
        request.hand_off_due_s = now_s + max(self._minimum_s, self._factor * expected_s)
        self._running[request.rid] = request

    def stop(self, request: Request) -> None:
        """Stop the timer of `request`, if it runs."""
        request.hand_off_due_s = None
        self._running.pop(request.rid, None)

    def due(self, now_s: float) -> list[Request]:
        """Return the requests whose time is up and stop their timers."""
        due = [r for r in self._running.values() if r.hand_off_due_s is None or r.hand_off_due_s <= now_s]
        late = [r for r in due if r.hand_off_due_s is not None]
        for request in due:
            self._running.pop(request.rid, None)
        return late
