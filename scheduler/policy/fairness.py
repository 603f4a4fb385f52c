"""In which order waiting requests are tried: tier, then tenant by virtual tokens, then deadline. Pure.

Tiers are strict, except that a tier passed over `starve_after` times in a row gets one turn. Inside a tier
the tenant with the lowest virtual token counter goes first (Sheng et al., "Fairness in Serving LLMs", OSDI
2024): a tenant's counter grows with what it is served, and rises to the least active one when it comes
back from idle, so that nobody saves up. Inside a tenant: earliest deadline among the requests that
can still meet it. A request that cannot is moved behind all those that can, instead of delaying them.
"""

import heapq
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from scheduler.policy.admission import TIER_RANK


class TokenWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What a token counts in a tenant's virtual counter."""

    uncached: float = 1.0
    cached: float = 0.1
    output: float = 4.0

    def cost(self, *, uncached_tokens: float, cached_tokens: float, output_tokens: float) -> float:
        """Return the virtual tokens of a request."""
        return self.uncached * uncached_tokens + self.cached * cached_tokens + self.output * output_tokens


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What ordering needs to know of a request."""

    tier: str
    tenant: str
    deadline_ms: float
    """For its first token; infinite without a target."""
    latest_start_ms: float
    """Start of its prompt after which the deadline cannot be met."""
    cost: float
    """Virtual tokens, with the output as forecast; corrected by `FairQueue.correct` at the end."""
    group: Hashable = None
    """Requests of a `batch` tier with the same group run one after the other: they share a prefix."""


class FairLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the order."""

    starve_after: int = 32
    """Turns of higher tiers after which a waiting lower tier gets one."""
    late_share: int = 16
    """One part in so many of a tenant's work goes to requests that are late already."""


T = TypeVar("T", bound=Hashable)


class _Tenant(Generic[T]):
    __slots__ = ("credit", "groups", "in_time", "late")

    def __init__(self) -> None:
        self.in_time: list[tuple[float, int, int, float, T]] = []  # deadline, group, sequence, latest start, request
        self.late: deque[T] = deque()
        self.credit = 0.0  # virtual tokens that late requests may have before those in time
        self.groups: dict[Hashable, list[int]] = {}  # group -> its first sequence number, how many wait


class _Tier(Generic[T]):
    __slots__ = ("heap", "passed_over", "tenants")

    def __init__(self) -> None:
        self.tenants: dict[str, _Tenant[T]] = {}  # those with waiting requests
        self.heap: list[tuple[float, str]] = []  # (counter, tenant); one that no longer agrees is stale
        self.passed_over = 0


class FairQueue(Generic[T]):
    """Waiting requests. `head` names the next one, `take` removes it and charges its tenant."""

    def __init__(self, limits: FairLimits) -> None:
        self._limits = limits
        self._tiers: dict[int, _Tier[T]] = {}
        self._tickets: dict[T, Ticket] = {}
        self._counters: dict[tuple[int, str], float] = {}
        self._seq = 0
        self._late: set[T] = set()

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: T) -> bool:
        return request in self._tickets

    @property
    def num_in_time(self) -> int:
        """Waiting requests that can still meet their deadline, as far as seen."""
        return len(self._tickets) - len(self._late)

    def counter(self, tier: str, tenant: str) -> float:
        """Return a tenant's virtual tokens in a tier."""
        return self._counters.get((_rank(tier), tenant), 0.0)

    def push(self, request: T, ticket: Ticket) -> None:
        """Add a request."""
        rank = _rank(ticket.tier)
        tier = self._tiers.setdefault(rank, _Tier())
        tenant = tier.tenants.get(ticket.tenant)
        if tenant is None:
            tenant = tier.tenants[ticket.tenant] = _Tenant()
            self._set(rank, ticket.tenant, self._lifted(rank, tier, ticket.tenant))
        self._seq += 1
        self._tickets[request] = ticket
        group = self._seq
        if ticket.group is not None:
            entry = tenant.groups.setdefault(ticket.group, [self._seq, 0])
            entry[1] += 1
            group = entry[0]
        heapq.heappush(tenant.in_time, (ticket.deadline_ms, group, self._seq, ticket.latest_start_ms, request))

    def remove(self, request: T) -> bool:
        """Take out a request wherever it is; return whether it was waiting."""
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            self._late.discard(request)
            self._leave_group(ticket)
        return ticket is not None

    def head(self, now_ms: float, *, above_tier: str | None = None, late: bool = True) -> T | None:
        """Return the request whose turn it is; None when nothing waits.

        Args:
            now_ms: the clock of the tickets.
            above_tier: only tiers that go before this one.
            late: whether one that is late already may have a turn while others wait. False when it has
                the turn but finds no room: it must not hold up those that still can be in time.
        """
        ranks = sorted(self._tiers)
        if above_tier is not None:
            ranks = [rank for rank in ranks if rank < _rank(above_tier)]
        starved = [r for r in ranks if self._tiers[r].passed_over >= self._limits.starve_after]
        for rank in (*starved, *ranks):
            request = self._head_of(rank, now_ms, late=late)
            if request is not None:
                return request
        return None

    def is_late(self, request: T) -> bool:
        """Whether a waiting request can no longer meet its deadline, as far as seen."""
        return request in self._late

    def gives_way(self, request: T) -> bool:
        """Whether a waiting request is late, and goes only because nobody in time wants the room now."""
        if request not in self._late:
            return False
        ticket = self._tickets[request]
        tenant = self._tiers[_rank(ticket.tier)].tenants[ticket.tenant]
        return not self._turn_of_late(tenant, ticket)

    def give_up(self, request: T) -> None:
        """Count a waiting request as late although its latest start is not over: nowhere would it be in time.

        Without this, in overload every request starts just too late, and all work is wasted.
        """
        if request in self._late:
            return
        ticket = self._tickets[request]
        self._late.add(request)
        tenant = self._tiers[_rank(ticket.tier)].tenants[ticket.tenant]
        tenant.late.append(request)

    def take(self, request: T) -> None:
        """Remove a request that now runs, and charge its tenant."""
        ticket = self._tickets.pop(request)
        rank = _rank(ticket.tier)
        tier = self._tiers[rank]
        tenant = tier.tenants[ticket.tenant]
        self._count_turn(tenant, ticket, late=request in self._late)
        self._late.discard(request)
        self._leave_group(ticket)
        self._set(rank, ticket.tenant, self._counters[rank, ticket.tenant] + ticket.cost)
        for other_rank, other in self._tiers.items():
            if other_rank > rank:
                other.passed_over += 1
        tier.passed_over = 0

    def correct(self, ticket: Ticket, actual_cost: float) -> None:
        """Replace a ticket's forecast cost by the real one, when its request has ended."""
        rank = _rank(ticket.tier)
        counter = self._counters.get((rank, ticket.tenant), 0.0)
        self._set(rank, ticket.tenant, max(0.0, counter + actual_cost - ticket.cost))

    # -- inside --------------------------------------------------------------------------------------------

    def _set(self, rank: int, name: str, counter: float) -> None:
        self._counters[rank, name] = counter
        tier = self._tiers.get(rank)
        if tier is None or name not in tier.tenants:
            return
        heapq.heappush(tier.heap, (counter, name))
        if len(tier.heap) > 4 * len(tier.tenants) + 64:
            tier.heap = [(self._counters[rank, active], active) for active in tier.tenants]
            heapq.heapify(tier.heap)

    def _lifted(self, rank: int, tier: _Tier[T], name: str) -> float:
        active = [self._counters[rank, other] for other in tier.tenants if other != name]
        own = self._counters.get((rank, name), 0.0)
        return max(own, min(active)) if active else own

    def _leave_group(self, ticket: Ticket) -> None:
        tenant = self._tiers[_rank(ticket.tier)].tenants[ticket.tenant]
        entry = tenant.groups.get(ticket.group)
        if entry is not None:
            entry[1] -= 1
            if not entry[1]:
                del tenant.groups[ticket.group]

    def _head_of(self, rank: int, now_ms: float, *, late: bool) -> T | None:
        tier = self._tiers[rank]
        while tier.heap:
            counted, name = tier.heap[0]
            tenant = tier.tenants.get(name)
            if tenant is None or self._counters[rank, name] != counted:
                heapq.heappop(tier.heap)
                continue
            request = self._of_tenant(tenant, now_ms, late=late)
            if request is not None:
                return request
            heapq.heappop(tier.heap)
            del tier.tenants[name]
        del self._tiers[rank]
        return None

    def _of_tenant(self, tenant: _Tenant[T], now_ms: float, *, late: bool) -> T | None:
        while tenant.in_time:
            _, _, _, latest_ms, request = tenant.in_time[0]
            if request not in self._tickets or request in self._late:
                heapq.heappop(tenant.in_time)
            elif now_ms > latest_ms:
                heapq.heappop(tenant.in_time)
                tenant.late.append(request)
                self._late.add(request)
            else:
                break
        first = self._first_late(tenant)
        if first is not None and (not tenant.in_time or (late and self._turn_of_late(tenant, self._tickets[first]))):
            return first
        return tenant.in_time[0][4] if tenant.in_time else None

    def _first_late(self, tenant: _Tenant[T]) -> T | None:
        while tenant.late and tenant.late[0] not in self._tickets:
            tenant.late.popleft()
        return tenant.late[0] if tenant.late else None

    def _turn_of_late(self, tenant: _Tenant[T], ticket: Ticket) -> bool:
        return self._limits.late_share <= 1 or tenant.credit >= _size(ticket)

    def _count_turn(self, tenant: _Tenant[T], ticket: Ticket, *, late: bool) -> None:
        """Let late requests have their part of the work: those that are late are the longest, so turns would not do."""
        if not late:
            waits = self._first_late(tenant) is not None
            tenant.credit = tenant.credit + _size(ticket) / max(1, self._limits.late_share - 1) if waits else 0.0
        elif self._turn_of_late(tenant, ticket):  # otherwise it runs because nobody in time wants the room
            tenant.credit = max(0.0, tenant.credit - _size(ticket))


def _size(ticket: Ticket) -> float:
    return max(1.0, ticket.cost)


def _rank(tier: str) -> int:
    return TIER_RANK.get(tier, TIER_RANK["default"])
