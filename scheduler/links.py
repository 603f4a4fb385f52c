"""The links between the pool's workers: what hand-offs over them did, and which are out of their budget."""

import time
from collections import deque
from collections.abc import Callable

import structlog

from scheduler.pairs import PairKey, Pairs
from scheduler.policy.links import HandedOver, LinkLimits, breach
from scheduler.worker import Worker

log = structlog.get_logger()


class _Link:
    """What is remembered of one link."""

    def __init__(self, limits: LinkLimits) -> None:
        self.seen: deque[HandedOver] = deque(maxlen=limits.window)
        self.pause_s = limits.pause_first_s
        self.broken_s = float("-inf")


class Links:
    """Judges the links of one term; a link out of budget is closed until a probe has gone through (pairs.py)."""

    def __init__(
        self, pool: str, pairs: Pairs, *, limits: LinkLimits | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._pairs = pairs
        self._limits = limits or LinkLimits()
        self._now_s = now_s
        self._links: dict[PairKey, _Link] = {}

    def handed_over(self, prefill: Worker, decode: Worker, *, ms: float, expected_ms: float) -> None:
        """Take a hand-off that went well."""
        pair = self._pairs.find(prefill.worker_id, decode.worker_id)
        known_ms = pair.probe_ms if pair is not None else 0.0
        self._note(prefill, decode, HandedOver(ok=True, ms=ms, expected_ms=max(expected_ms, known_ms)))

    def failed(self, prefill: Worker, decode: Worker, why: str) -> None:
        """Take a hand-off that failed. One alone has the link probed; more close it for longer."""
        if not self._note(prefill, decode, HandedOver(ok=False)):
            self._pairs.doubt(prefill, decode, why)

    def _note(self, prefill: Worker, decode: Worker, one: HandedOver) -> bool:
        """Remember one hand-off; return whether the link is now out of its budget."""
        limits, now_s = self._limits, self._now_s()
        link = self._links.setdefault((prefill.worker_id, decode.worker_id), _Link(limits))
        link.seen.append(one)
        why = breach(tuple(link.seen), limits)
        if why is None:
            return False
        # One that was broken not long ago is trusted again later than the last time.
        again = now_s - link.broken_s < 4 * limits.pause_last_s
        link.pause_s = min(limits.pause_last_s, 2 * link.pause_s) if again else limits.pause_first_s
        link.broken_s = now_s
        link.seen.clear()
        log.warning("link_over_budget", pool=self._pool, prefill=prefill.worker_id, decode=decode.worker_id, why=why)
        self._pairs.doubt(prefill, decode, why, pause_s=link.pause_s, over_budget=True)
        return True
