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


def refuse_on_arrival(num_waiting: int, limits: Limits) -> Refusal | None:
    """Return why a new request may not join the queue."""
    return Refusal.QUEUE_FULL if num_waiting >= limits.max_queued_requests else None


def refuse_waiting(waiting: WaitingView, now_unix_ms: int, limits: Limits) -> Refusal | None:
    """Return why a request should wait no longer."""
    if now_unix_ms >= waiting.deadline_unix_ms:
        return Refusal.DEADLINE
    match waiting.blocked_by:
        case Reason.TOO_LONG:
            return Refusal.TOO_LONG
        case Reason.NO_WORKER if waiting.waited_s >= limits.no_worker_grace_s:
            return Refusal.NO_WORKER
        case _:
            return None
