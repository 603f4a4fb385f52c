"""Whether the link from a prefill to a decode worker keeps its budget of errors and of latency. Pure.

A link that breaks it takes no traffic until a probe has gone through; then it is tried again, and after each
further breach the pause before that probe is twice as long. Meanwhile requests go by the store, where both
workers can, otherwise to unified workers.
"""

import enum
from collections.abc import Sequence

import msgspec

from contracts.lifecycle import HandOff, Path
from scheduler.policy.cluster import ClusterView, RequestView
from scheduler.policy.outlook import Outlook, ScoringLimits
from scheduler.policy.placement import Reason
from scheduler.policy.scoring import NotScored, Scored, score


class Breach(enum.StrEnum):
    """What is over its budget. A label and a log field."""

    ERRORS = "link_errors"
    LATENCY = "link_latency"


class LinkLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The budget of one link."""

    window: int = 32
    """Hand-offs that are remembered."""
    least: int = 4
    """Hand-offs below which nothing is judged."""
    error_share: float = 0.25
    """Failed hand-offs over all, 0.0 to 1.0."""
    slow_share: float = 0.5
    """Hand-offs over their latency budget over those that went well, 0.0 to 1.0."""
    latency_factor: float = 10.0
    """A hand-off may take this multiple of what was expected."""
    latency_least_ms: float = 1000.0
    """What it may take in any case: short ones are ruled by the machine, not by the link."""
    pause_first_s: float = 2.0
    pause_last_s: float = 60.0
    """Before the probe after a breach: the first, and the longest."""


class HandedOver(msgspec.Struct, frozen=True, kw_only=True):
    """One hand-off over a link. `ms` counts from the end of prefill; it says nothing when `ok` is false."""

    ok: bool
    ms: float = 0.0
    expected_ms: float = 0.0


def breach(seen: Sequence[HandedOver], limits: LinkLimits) -> Breach | None:
    """Return what the last hand-offs of a link are over with, None when they keep its budget."""
    recent = seen[-limits.window :]
    if len(recent) < limits.least:
        return None
    good = [one for one in recent if one.ok]
    if len(recent) - len(good) > limits.error_share * len(recent):
        return Breach.ERRORS
    slow = sum(one.ms > max(limits.latency_least_ms, limits.latency_factor * one.expected_ms) for one in good)
    return Breach.LATENCY if slow > limits.slow_share * len(good) else None


def place_over_links(
    request: RequestView, cluster: ClusterView, limits: ScoringLimits, outlook: Outlook
) -> Scored | NotScored:
    """Choose where `request` runs: direct, or by the store while links are down, or on a unified worker.

    The reason says so: a pair by the store, or a unified worker, that would not have been chosen otherwise.
    """
    chosen = score(request, cluster, limits, outlook)
    by_pair = isinstance(chosen, Scored) and chosen.prefill is not None
    if request.hand_off is not HandOff.DIRECT or by_pair or not _links_down(cluster):
        return chosen
    stored = score(msgspec.structs.replace(request, hand_off=HandOff.STORE), cluster, limits, outlook)
    if isinstance(stored, Scored) and stored.prefill is not None:
        return msgspec.structs.replace(stored, reason=Reason.LINK_DOWN)
    if isinstance(chosen, Scored) and chosen.path is Path.FALLBACK:
        return msgspec.structs.replace(chosen, reason=Reason.LINK_DOWN)
    return chosen


def _links_down(cluster: ClusterView) -> bool:
    """Whether ready workers could be pairs, if it were not for their links."""
    fit = {
        (prefill.worker_id, decode.worker_id)
        for prefill in cluster.prefill
        for decode in cluster.decode
        if prefill.ready and decode.ready and prefill.pairs_with == decode.pairs_with
    }
    return bool(fit) and fit <= cluster.barred and bool(fit & cluster.over_budget)
