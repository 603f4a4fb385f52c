"""Sums since the process started, for Status: hand-offs, and prompt tokens by where they were found."""

from collections import deque

from contracts.lifecycle import FinishReason, Phase
from contracts.v1 import worker_pb2 as pb
from contracts.wire import FINISH_FROM_PB, PHASE_FROM_PB, Stages

RECENT = 64


class Tallies:
    """Fed with the end of every engine request."""

    def __init__(self) -> None:
        self._done = 0
        self._failed = 0
        self._transfer_ms = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._hit_tokens = 0
        self._computed_tokens = 0

    def ended(self, final: pb.Final, stages: Stages, *, one_tier: bool) -> None:
        """Count one end.

        What a sender measures begins when the prompt is computed, so all of it is exposed. Without `one_tier` nobody
        says where a cached token was found, and it is counted for no tier.
        """
        phase, reason = PHASE_FROM_PB[final.phase], FINISH_FROM_PB[final.reason]
        if reason is FinishReason.HAND_OFF:
            self._failed += 1
        elif phase is Phase.PREFILL and stages.transfer_ms:
            self._done += 1
            self._transfer_ms += stages.transfer_ms
            self._recent.append(stages.transfer_ms)
        if phase is not Phase.DECODE:
            self._hit_tokens += final.counts.cached_tokens if one_tier else 0
            self._computed_tokens += final.counts.prompt_tokens - final.counts.cached_tokens

    def fill(self, status: pb.Status) -> None:
        """Write the sums into a status."""
        recent = sorted(self._recent)
        status.transfers_done = self._done
        status.transfers_failed = self._failed
        status.transfer_total_ms = status.transfer_exposed_ms = self._transfer_ms
        status.transfer_exposed_p50_ms = recent[len(recent) // 2] if recent else 0.0
        status.hit_device_tokens = self._hit_tokens
        status.computed_tokens = self._computed_tokens
