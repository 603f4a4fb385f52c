"""Several requests whose answers are one answer: a completion of many prompts.

Each request writes to a `Part`, which renumbers its samples. The whole succeeds when every part has, and
fails with the first part that does; the others are then broken off and cost nothing.
"""

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from contracts.errors import ServingError
from contracts.lifecycle import FinishReason
from contracts.parsing import Detail
from contracts.rating import Tokens
from contracts.units import Nano
from contracts.usage import UsageEvent
from gateway.generation import Generation
from gateway.outputs import Output

SIBLING_FAILED: Final = "sibling_failed"


class Joint:
    """The one output of several requests."""

    def __init__(self, output: Output, *, num_parts: int, num_samples: int) -> None:
        self.parts = [Part(self, output, first=i * num_samples) for i in range(num_parts)]
        self._output = output
        self._events: list[UsageEvent] = []
        self._over = False
        self._generations: Sequence[Generation] = ()

    def bind(self, generations: Sequence[Generation]) -> None:
        """Take the requests that are to be broken off when one of them fails."""
        self._generations = generations
        if self._over:
            self._break_off()

    def part_succeeded(self, event: UsageEvent) -> None:
        """End the whole with the last part."""
        self._events.append(event)
        if len(self._events) == len(self.parts) and not self._over:
            self._over = True
            self._output.succeeded(joined(self._events))

    def part_failed(self, error: ServingError) -> None:
        """Fail the whole."""
        if not self._over:
            self._over = True
            self._output.failed(error)
            self._break_off()

    def part_abandoned(self) -> None:
        """Stop: nobody reads any more."""
        if not self._over:
            self._over = True
            self._output.abandoned()

    def _break_off(self) -> None:
        for generation in self._generations:
            generation.break_off(SIBLING_FAILED)


class Part:
    """Where one of the requests writes to."""

    def __init__(self, joint: Joint, output: Output, *, first: int) -> None:
        """`first` is the choice that its sample 0 is."""
        self.first_sent_s: float | None = None  # of this part: its own times are settled
        self._joint = joint
        self._output = output
        self._first = first

    def placed(self) -> None:
        """Release the head of the response."""
        self._output.placed()

    def piece(self, sample: int, text: str) -> None:
        """Write the text of one chunk."""
        if self.first_sent_s is None:
            self.first_sent_s = time.monotonic()
        self._output.piece(self._first + sample, text)

    def flush(self) -> None:
        """Send what was written."""
        self._output.flush()

    def detailed(self, sample: int, text: str, detail: Detail) -> None:
        """Write a chunk that is more than text."""
        if self.first_sent_s is None:
            self.first_sent_s = time.monotonic()
        self._output.detailed(self._first + sample, text, detail)

    def sample_finished(self, sample: int, reason: FinishReason, matched_stop: str = "") -> None:
        """Write the end of one sample."""
        self._output.sample_finished(self._first + sample, reason, matched_stop)

    def succeeded(self, event: UsageEvent) -> None:
        """Count this part as done."""
        self._joint.part_succeeded(event)

    def failed(self, error: ServingError) -> None:
        """Fail the whole."""
        self._joint.part_failed(error)

    def abandoned(self) -> None:
        """Stop the whole."""
        self._joint.part_abandoned()

    def tick(self, now_s: float) -> None:
        """Keep a silent connection open."""
        self._output.tick(now_s)


def joined(events: Sequence[UsageEvent]) -> UsageEvent:
    """Return one event with the sums of several, for the client; each is settled for itself."""
    tokens = Tokens(
        prefill_computed=sum(event.tokens.prefill_computed for event in events),
        prefill_cached=sum(event.tokens.prefill_cached for event in events),
        decode=sum(event.tokens.decode for event in events),
    )
    return msgspec.structs.replace(
        min(events, key=lambda event: event.rid),
        tokens=tokens,
        cost=Nano(sum(event.cost for event in events)),
        reasoning_tokens=sum(event.reasoning_tokens for event in events),
        attempts=max(event.attempts for event in events),
    )
