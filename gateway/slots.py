"""Where a worker's link writes what one engine request produces."""

import sys
import time
from typing import Final, Protocol

from contracts.lifecycle import FinishReason, Phase
from contracts.parsing import Detail
from contracts.v1 import worker_pb2 as pb
from contracts.wire import FINISH_FROM_PB, Counts, Stages, counts_from_pb, stages_from_pb
from gateway.delivered import Delivered
from gateway.outputs import Output

NO_ALLOWANCE: Final = sys.maxsize


class SlotOwner(Protocol):
    """The generation that a slot belongs to."""

    output: Output
    accepted: bool

    def running_low(self) -> None:
        """Take notice that a sample has used what it may: `allowance` tokens."""
        ...

    def slot_finished(self, slot: "Slot", error: str) -> None:
        """Take the end of one engine request of the current attempt."""
        ...

    def slot_lost(self, slot: "Slot", cause: str) -> None:
        """Take notice that a worker of the current attempt cannot be reached any more."""
        ...


class Slot:
    """One engine request of the current attempt: where a worker's link writes to. `muted` = fenced off."""

    __slots__ = (
        "allowance",
        "counts",
        "delivered",
        "generation",
        "matched_stop",
        "muted",
        "num_tokens",
        "output",
        "phase",
        "reason",
        "said",
        "sample",
        "stages",
        "worker_id",
    )

    def __init__(
        self, generation: SlotOwner, sample: int, phase: Phase, worker_id: str, delivered: Delivered | None = None
    ) -> None:
        """`delivered` collects over the attempts of a sample; None = this one begins it."""
        self.generation = generation
        self.delivered = delivered or Delivered()
        self.output = generation.output
        self.sample = sample
        self.phase = phase
        self.worker_id = worker_id
        self.muted = False
        self.said = self.delivered.num_chars > 0  # anything but empty text was delivered
        self.num_tokens = 0
        self.allowance = NO_ALLOWANCE
        self.reason: FinishReason | None = None
        self.matched_stop = ""
        self.counts = Counts()
        self.stages = Stages()

    def push(self, text: str, num_tokens: int, ids: bytes, detail: Detail | None = None) -> None:
        """Take one chunk with its packed token ids; `detail` is what it holds besides text.

        The hot path: once per token.
        """
        if self.muted:
            return
        self.num_tokens += num_tokens
        delivered = self.delivered
        delivered.ids += ids
        delivered.num_chars += len(text)
        if delivered.gaps is not None:
            delivered.gaps.add(num_tokens, time.monotonic())
        self.generation.accepted = True
        if detail is None:
            if text:
                self.said = True
            self.output.piece(self.sample, text)
        else:
            self.said = True
            delivered.num_chars += detail.num_chars
            self.output.detailed(self.sample, text, detail)
        if self.num_tokens > self.allowance:
            self.allowance = NO_ALLOWANCE
            self.generation.running_low()

    def finish(self, finished: pb.Finished) -> None:
        """Take the end and the final counts."""
        self.reason = FINISH_FROM_PB.get(finished.reason, FinishReason.ERROR)
        self.matched_stop = finished.matched_stop
        self.counts = counts_from_pb(finished.counts)
        self.stages = stages_from_pb(finished.stages)
        if not self.muted:
            self.generation.slot_finished(self, finished.error)

    def lost(self, cause: str) -> None:
        """Take notice that the link to the worker is gone for good."""
        if not self.muted and self.reason is None:
            self.generation.slot_lost(self, cause)
