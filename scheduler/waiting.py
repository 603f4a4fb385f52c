"""Requests that wait for a worker, in the order of policy.admission."""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.book import Request
from scheduler.policy.admission import WaitingView, order


class WaitingQueue:
    """An ordered queue from which any request can leave. It wakes whoever places."""

    def __init__(self) -> None:
        self._stirred = asyncio.Event()
        self._keys: list[tuple[int, int]] = []
        self._requests: dict[tuple[int, int], Request] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        """Yield in order; the queue may change meanwhile."""
        for key in tuple(self._keys):
            request = self._requests.get(key)
            if request is not None:
                yield request

    def push(self, request: Request, now_s: float) -> None:
        """Add a QUEUED request. One that waited before gets its old place, by its arrival."""
        request.queued_s = now_s
        request.blocked_by = None
        key = order(view(request))
        if key not in self._requests:
            insort(self._keys, key)
        self._requests[key] = request
        self._stirred.set()

    def stir(self) -> None:
        """Have those who wait tried again: capacity may have changed."""
        if self._keys:
            self._stirred.set()

    async def stirred(self) -> None:
        """Wait until somebody came or `stir` was called since the last time."""
        await self._stirred.wait()
        self._stirred.clear()

    def remove(self, request: Request) -> bool:
        """Take a request out; return whether it was waiting."""
        key = order(view(request))
        if self._requests.pop(key, None) is None:
            return False
        del self._keys[bisect_left(self._keys, key)]
        return True


def view(request: Request, *, now_s: float | None = None) -> WaitingView:
    """Return a waiting request as policy sees it."""
    return WaitingView(
        tier=request.submit.owner.tier,
        arrival_seq=request.seq,
        deadline_unix_ms=request.submit.deadline_unix_ms,
        waited_s=0.0 if now_s is None else now_s - request.queued_s,
        blocked_by=request.blocked_by,
    )
