"""When a prompt was computed, for an engine that only says when its KV cache has arrived.

A prefill engine answers once the hand-off is over. Between the two lies what a hand-off timer has to watch, so the
moment is read from the engine's load: prompts are computed in the order they came, and so many of the oldest are
computed as wait for their transfer. That holds only while none waits for its decode side, which may be the oldest of
all; then nothing is concluded, and the timer starts later rather than during a wait for a decode slot.
"""

from contracts.wire import Counts, Stages
from workers.engine import Job, Outlet


class PrefillWatch:
    """The open prompts of one engine, oldest first."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Job, Outlet, float]] = {}
        self._told: set[str] = set()

    def opened(self, job: Job, outlet: Outlet, at_unix_s: float) -> None:
        """Take a prompt that was given to the engine."""
        self._open[job.engine_id] = (job, outlet, at_unix_s)

    def ended(self, job: Job) -> None:
        """Forget a prompt."""
        self._open.pop(job.engine_id, None)
        self._told.discard(job.engine_id)

    def look(self, *, at_unix_s: float, waiting_for_peer: int, in_transfer: int) -> None:
        """Tell the outlets of prompts that were computed when the engine wrote its load at `at_unix_s`."""
        if waiting_for_peer or not in_transfer:
            return
        known = [item for item in self._open.values() if item[2] < at_unix_s]
        for job, outlet, opened_s in known[:in_transfer]:
            if job.engine_id not in self._told:
                self._told.add(job.engine_id)
                took_ms = max(0.0, at_unix_s - opened_s) * 1000
                outlet.prefilled(Counts(prompt_tokens=job.num_input_tokens), Stages(first_token_ms=took_ms))
