"""Requests that wait for a worker, in the order of policy.fairness."""

import asyncio
import heapq
from collections.abc import Iterator

from contracts.lifecycle import Role
from scheduler.book import Request
from scheduler.policy.admission import WaitingView
from scheduler.policy.fairness import FairLimits, FairQueue
from scheduler.policy.turns import BATCH_TIER, Turns


class WaitingQueue:
    """An ordered queue from which any request can leave. It wakes whoever places.

    It also keeps account of what those who wait are waiting for: after each pass, which role had no room.
    """

    def __init__(self, fair: FairLimits | None = None) -> None:
        self._stirred = asyncio.Event()
        self._fair: FairQueue[Request] = FairQueue(fair or FairLimits())
        self._paused: dict[Request, float] = {}  # until when, monotonic s
        self._due: list[tuple[float, int, Request]] = []  # the same as a heap; may hold what is no longer paused
        self._requests: dict[Request, None] = {}  # in the order of arrival
        self._per_tenant: dict[str, int] = {}
        self.work_ms = 0.0
        """Prompt work of those who wait."""
        self._blocked_by: Role | None = None
        self._blocked_since_ms = 0.0
        self._blocked_ms = dict.fromkeys(Role, 0.0)
        self._at_push: dict[Request, dict[Role, float]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield in the order of arrival; the queue may change meanwhile."""
        return iter(tuple(self._requests))

    @property
    def num_in_time(self) -> int:
        """Those who can still meet their deadline, as far as seen."""
        return self._fair.num_in_time

    def num_of(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        return self._per_tenant.get(tenant, 0)

    @property
    def num_tenants(self) -> int:
        """Tenants of whom any request waits."""
        return len(self._per_tenant)

    def oldest_in_time_ms(self, now_ms: float) -> float:
        """Return how long the oldest request has waited that can still be in time; 0 without any."""
        for request in self._requests:
            if request.ticket.latest_start_ms >= now_ms:
                return now_ms - request.pushed_ms
        return 0.0

    def push(self, request: Request, now_s: float) -> None:
        """Add a QUEUED request. One that waited before gets its old place, by its deadline."""
        self.remove(request)
        request.queued_s = now_s
        request.pushed_ms = now_s * 1000
        request.blocked_by = None
        self._requests[request] = None
        tenant = request.submit.owner.org
        self._per_tenant[tenant] = self._per_tenant.get(tenant, 0) + 1
        self.work_ms += request.work_ms
        self._count_blocked(now_s * 1000)
        self._at_push[request] = dict(self._blocked_ms)
        if request.not_before_s > now_s:
            self._pause(request, request.not_before_s)
        else:
            self._fair.push(request, request.ticket)
        self._stirred.set()

    def pause(self, request: Request, until_s: float) -> None:
        """Keep a waiting request out of turn for a while."""
        if self._fair.remove(request):
            self._pause(request, until_s)

    def _pause(self, request: Request, until_s: float) -> None:
        self._paused[request] = until_s
        heapq.heappush(self._due, (until_s, request.seq, request))

    def turns(self, now_s: float) -> Turns[Request]:
        """Begin a pass over those whose pause is over."""
        while self._due and self._due[0][0] <= now_s:
            until_s, _, request = heapq.heappop(self._due)
            if self._paused.get(request) == until_s:  # otherwise it left, or was paused anew
                del self._paused[request]
                self._fair.push(request, request.ticket)
        return Turns(self._fair, now_s * 1000)

    def gives_way(self, request: Request) -> bool:
        """Whether it is late, and goes only because nobody in time wants the room now."""
        return self._fair.gives_way(request)

    def in_vain(self, request: Request, predicted_ttft_ms: float) -> bool:
        """Whether a request that does not count as late would be late even in its best place."""
        ttft_ms = request.submit.owner.slo.ttft_ms
        late = ttft_ms is not None and predicted_ttft_ms > ttft_ms and request.tier != BATCH_TIER
        return late and not self._fair.is_late(request)

    def give_up(self, request: Request) -> None:
        """Count a waiting request as late: those that can be in time go first."""
        self._fair.give_up(request)

    def blocked(self, by: Role | None, now_s: float) -> None:
        """Take how a pass ended: which role had no room for the next in turn; None = nobody was left waiting."""
        self._count_blocked(now_s * 1000)
        self._blocked_by = by

    def stir(self) -> None:
        """Have those who wait tried again: capacity may have changed."""
        if self._requests:
            self._stirred.set()

    async def stirred(self) -> None:
        """Wait until somebody came or `stir` was called since the last time."""
        await self._stirred.wait()
        self._stirred.clear()

    def take(self, request: Request, now_s: float) -> None:
        """Take out the request in turn, which now runs, and charge its tenant."""
        self._fair.take(request)
        self._leave(request, now_s * 1000)

    def remove(self, request: Request) -> bool:
        """Take a request out wherever it is; return whether it was waiting."""
        if request not in self._requests:
            return False
        self._paused.pop(request, None)
        self._fair.remove(request)
        self._leave(request, None)
        return True

    def correct(self, request: Request, actual_cost: float) -> None:
        """Replace the forecast cost that a request's tenant was charged by the real one."""
        assert request.sized is not None
        self._fair.correct(request.sized.ticket, actual_cost)

    def _leave(self, request: Request, now_ms: float | None) -> None:
        del self._requests[request]
        self.work_ms = max(0.0, self.work_ms - request.work_ms)
        tenant = request.submit.owner.org
        self._per_tenant[tenant] -= 1
        if not self._per_tenant[tenant]:
            del self._per_tenant[tenant]
        at_push = self._at_push.pop(request)
        if now_ms is not None:
            self._count_blocked(now_ms)
            for role, total_ms in self._blocked_ms.items():
                request.blocked_ms[role] = request.blocked_ms.get(role, 0.0) + total_ms - at_push[role]

    def _count_blocked(self, now_ms: float) -> None:
        if self._blocked_by is not None:
            self._blocked_ms[self._blocked_by] += max(0.0, now_ms - self._blocked_since_ms)
        self._blocked_since_ms = now_ms


def view(request: Request, *, now_s: float | None = None) -> WaitingView:
    """Return a waiting request as policy sees it."""
    return WaitingView(
        tier=request.tier,
        arrival_seq=request.seq,
        deadline_unix_ms=request.submit.deadline_unix_ms,
        waited_s=0.0 if now_s is None else now_s - request.queued_s,
        blocked_by=request.blocked_by,
    )
