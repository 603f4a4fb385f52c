"""In which order waiting requests are tried, and which are refused. Pure."""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from scheduler.policy.cluster import Limits
from scheduler.policy.placement import Reason

TIER_RANK: Final[Mapping[str, int]] = MappingProxyType({"priority": 0, "default": 1, "flex": 2, "batch": 3})
"""Lower goes first; a tier not listed counts as `default`."""


class Refusal(enum.StrEnum):
    """Why a request is refused; a metric label and a log field."""

    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    NO_WORKER = "no_worker"
    TOO_LONG = "too_long"
    TENANT_SHARE = "tenant_share"  # the queue is full, and mostly with the tenant's own
    OVERLOADED = "overloaded"  # what waits already takes longer than its deadline allows
    SHED = "shed"  # its tier gives way
    UNAVAILABLE = "unavailable"

    @property
    def for_capacity(self) -> bool:
        """Whether we are short, rather than the request wrong: such refusals count as missed targets."""
        return self is not Refusal.TOO_LONG


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The waiting requests, as far as a newcomer is judged by them."""

    num_waiting: int
    num_of_tenant: int
    num_tenants: int
    """With anything waiting, the newcomer's included."""
    work_ms: float = 0.0
    """Prompt work of all of them."""
    num_computing: int = 0
    """Ready workers that compute prompts."""

    @property
    def clear_s(self) -> float:
        """Time until what waits is computed."""
        return self.work_ms / 1000 / self.num_computing if self.num_computing else 0.0


class WaitingView(msgspec.Struct, frozen=True, kw_only=True):
    """What admission needs to know of a request that waits."""

    tier: str
    arrival_seq: int  # order in the inbox
    deadline_unix_ms: int
    waited_s: float = 0.0
    blocked_by: Reason | None = None  # the last answer of placement; None = not tried yet


def order(waiting: WaitingView) -> tuple[int, int]:
    """Return the sort key: tier, then arrival."""
    return TIER_RANK.get(waiting.tier, 1), waiting.arrival_seq


def refuse_on_arrival(queue: QueueView, limits: Limits, *, left_s: float = float("inf")) -> Refusal | None:
    """Return why a new request may not join the queue.

    A full queue first sends away those who fill it: a tenant with more than its share of the room gets 429.
    The others may still join, up to a quarter more.

    Args:
        queue: who waits.
        limits: how many may.
        left_s: until the request's deadline.
    """
    most = limits.max_queued_requests
    if queue.num_waiting >= most:
        if queue.num_of_tenant and queue.num_of_tenant >= most / max(1, queue.num_tenants):
            return Refusal.TENANT_SHARE if queue.num_tenants > 1 else Refusal.QUEUE_FULL
        if queue.num_waiting >= most + most // 4:
            return Refusal.QUEUE_FULL
    return Refusal.OVERLOADED if queue.clear_s > left_s else None


def retry_after_s(queue: QueueView, limits: Limits) -> float:
    """Return when a refused request may find room: once what waits is computed, within bounds."""
    return min(max(limits.retry_after_s, queue.clear_s), limits.longest_retry_after_s)


def refuse_waiting(
    waiting: WaitingView, now_unix_ms: int, limits: Limits, *, workers_come: bool = False
) -> Refusal | None:
    """Return why a request should wait no longer. `workers_come`: a pool without any starts some."""
    if now_unix_ms >= waiting.deadline_unix_ms:
        return Refusal.DEADLINE
    match waiting.blocked_by:
        case Reason.TOO_LONG:
            return Refusal.TOO_LONG
        case Reason.NO_WORKER if waiting.waited_s >= limits.no_worker_grace_s and not workers_come:
            return Refusal.NO_WORKER
        case _:
            return None
