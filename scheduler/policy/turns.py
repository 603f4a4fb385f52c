"""One pass over the waiting requests: whose turn it is, given what became of those before. Pure.

Requests are tried in the order of `FairQueue` until one has to wait for room. Two kinds do not hold up those
behind them: batch work, which needs a worker that is idle, and a request that is late already and has its
turn although others can still be in time.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

from scheduler.policy.fairness import FairQueue, Ticket

BATCH_TIER = "batch"

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """Ask `next`; place it (`FairQueue.take`), remove it, or say that it has no room; ask again."""

    def __init__(self, queue: FairQueue[T], now_ms: float) -> None:
        self._queue = queue
        self._now_ms = now_ms
        self._above: str | None = None
        self._late = True
        self._over = False
        self._at: T | None = None

    def next(self) -> T | None:
        """Return the request whose turn it is; None when the pass is over."""
        if self._over:
            return None
        self._at = self._queue.head(self._now_ms, above_tier=self._above, late=self._late)
        return self._at

    def no_room(self, ticket: Ticket) -> bool:
        """Take that the request of the turn found no room; return whether everybody behind it waits too."""
        if ticket.tier == BATCH_TIER and self._above is None:
            self._above = BATCH_TIER
        elif self._late and self._at is not None and self._queue.is_late(self._at):
            self._late = False
        else:
            self._over = True
        return self._over
