"""Sums since the process started, for Status: hand-offs, and prompt tokens by where they were found."""

from collections import Counter, deque
from collections.abc import Iterator

from contracts.lifecycle import FinishReason, Phase
from contracts.links import Link
from contracts.v1 import worker_pb2 as pb
from contracts.wire import Counts
from workers.engine import End, Job

RECENT = 64


class Tallies:
    """Fed with the end of every engine request."""

    def __init__(self) -> None:
        self._done: Counter[str] = Counter()  # by link
        self._failed: Counter[str] = Counter()
        self._total_ms = self._exposed_ms = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._sources: Counter[str] = Counter()

    def ended(self, job: Job, end: End, reason: FinishReason) -> None:
        """Count one end.

        What a sender measures begins when the prompt is computed, so all of it is exposed; what it sent of the
        first chunks while it computed the last is not. What a decode worker reads from a store is no hit.
        """
        phase = job.phase
        if reason is FinishReason.HAND_OFF:
            self._failed[job.link] += 1
        elif phase is Phase.PREFILL and end.stages.transfer_ms:
            self._done[job.link] += 1
            self._exposed_ms += end.stages.transfer_ms
            self._total_ms += end.stages.transfer_ms + end.overlapped_ms
            self._recent.append(end.stages.transfer_ms)
        if phase is not Phase.DECODE:
            self._sources.update(dict(sources(end.counts)))

    def fill(self, status: pb.Status) -> None:
        """Write the sums into a status."""
        recent = sorted(self._recent)
        status.transfers_done = self._done.total()
        status.transfers_failed = self._failed.total()
        status.transfer_total_ms, status.transfer_exposed_ms = self._total_ms, self._exposed_ms
        status.transfer_exposed_p50_ms = recent[len(recent) // 2] if recent else 0.0
        for link in Link:
            if self._done[link] or self._failed[link]:
                status.links.add(link=link.value, done=self._done[link], failed=self._failed[link])
        status.hit_device_tokens = self._sources["device"]
        status.hit_host_tokens = self._sources["host"]
        status.hit_store_tokens = self._sources["store"]
        status.computed_tokens = self._sources["computed"]


def sources(counts: Counts) -> Iterator[tuple[str, int]]:
    """Yield how many prompt tokens were found in each tier, and how many were computed."""
    below = counts.cached_host_tokens + counts.cached_store_tokens
    yield "device", max(0, counts.cached_tokens - below)
    yield "host", counts.cached_host_tokens
    yield "store", counts.cached_store_tokens
    yield "computed", counts.prompt_tokens - counts.cached_tokens
