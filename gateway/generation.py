"""One request's life in the gateway: a state machine without tasks, driven by events.

1. Admitted and written to the inbox: the generation waits for `opened`, `placed` or `refused`.
2. `opened` names an attempt on a worker and gives back the slot that the link writes tokens into. A
   newer attempt replaces an older one until a token was accepted; from then on only one attempt
   exists, and losing its worker interrupts the request.
3. Something ends it (`Ending`): all samples finished, the client left, a refusal, a fault, the
   deadline. The client is told at once where there is one.
4. Money is reserved for part of the maximum (gateway.purse). A sample that comes near the end of it asks for
   more; if no budget has more, `cut` ends the answer like its maximum would.
5. The workers' final counts may still be on their way: a bounded wait for them, then `_conclude`
   makes the usage event, hands it to the settlement queue, and lets the output end.

Nothing here awaits, so all of it may be called from a task that is being cancelled.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from contracts.errors import DeadlineExceeded, Interrupted, ServingError
from contracts.identity import rid_bytes
from contracts.lifecycle import FinishReason, Phase
from contracts.settlement import Unreserved
from contracts.usage import Outcome, UsageEvent
from contracts.v1 import worker_pb2 as pb
from contracts.wire import (
    Abort,
    AttemptLost,
    Continue,
    InboxEntry,
    Placed,
    Refused,
)
from gateway.accounting import BUDGET_USED_UP, blamed, timings_of, usage_event
from gateway.outputs import Nowhere, Output
from gateway.purse import allowance_of
from gateway.refusals import error_of_refusal
from gateway.slots import NO_ALLOWANCE, Slot
from gateway.terms import Closed, Ending, Terms

COUNTS_WAIT_S: Final = 1.0  # for the prefill side's counts, once the answer is whole or broken
LEAVE_WAIT_S: Final = 5.0  # for the workers to confirm the stop after the client left
DEADLINE_SLACK_S: Final = 1.0  # workers enforce the deadline first


class Effects(Protocol):
    """What a generation sets in motion. Implemented by the gateway's fleet; nothing here may block."""

    def abort_on_worker(self, worker_id: str, attempt: pb.AttemptId, reason: str) -> None:
        """Stop all samples of an attempt on one worker."""
        ...

    def attached(self, worker_id: str) -> bool:
        """Return whether the token stream of a worker stands."""
        ...

    def tell_scheduler(self, pool: str, entry: InboxEntry) -> None:
        """Write an entry to a pool's inbox."""
        ...

    def settle(self, closed: Closed) -> None:
        """Take over a request whose numbers are final."""
        ...

    def ask_for_money(self, generation: "Generation") -> None:
        """Reserve more for a request: ends in its `extended` or `cut`."""
        ...


class Generation:
    """See the module's docstring."""

    def __init__(
        self,
        terms: Terms,
        output: Output,
        effects: Effects,
        *,
        loop: asyncio.AbstractEventLoop,
        forget: Callable[["Generation"], None],
        deadline_s: float,
    ) -> None:
        """`deadline_s` is seconds from now; `forget` is called once, when the request is closed."""
        self.terms = terms
        self.output = output
        self.entry_id = ""
        self.attempt = 0
        self.accepted = False  # a token of the current attempt reached us
        self.placed: Placed | None = None
        self.ending: Ending | None = None
        self.event: UsageEvent | None = None
        self.rid_bytes = rid_bytes(terms.rid)
        self.max_tokens = self.paid_tokens = NO_ALLOWANCE  # per sample
        self.unreserved: Unreserved | None = None
        self._asking = False
        self._effects = effects
        self._loop = loop
        self._forget = forget
        self._streams: dict[int, Slot] = {}  # decode or unified, by sample
        self._prefills: dict[int, Slot] = {}
        self._num_done = 0
        self._queue_ms = 0.0
        self._written_s = time.monotonic()
        self._timer = loop.call_later(deadline_s + DEADLINE_SLACK_S, self._deadline_passed)

    # -- events from the workers -----------------------------------------------------------------

    def opened(self, attempt: int, sample: int, phase: Phase, worker_id: str) -> Slot | None:
        """Return the slot of an engine request, or None when it belongs to no current attempt."""
        if self.event is not None or not 0 <= sample < self.terms.num_samples:
            return None
        if attempt != self.attempt and not self._advance(attempt):
            return None
        slot = Slot(self, sample, phase, worker_id)
        if phase is not Phase.PREFILL:
            slot.allowance = self._allowance()
        (self._prefills if phase is Phase.PREFILL else self._streams)[sample] = slot
        if self.ending is not None and self.ending.outcome is not Outcome.FINISHED:
            self._effects.abort_on_worker(worker_id, self._attempt_id(), self.ending.cause)
        return slot

    def slot_finished(self, slot: Slot, error: str) -> None:
        """Take the end of one engine request of the current attempt."""
        if self.ending is not None or slot.phase is Phase.PREFILL:
            self._conclude_if_counted()
            return
        reason = slot.reason
        if reason is not None and reason.complete:
            self.accepted = True
            self.output.sample_finished(slot.sample, reason, slot.matched_stop)
            self._num_done += 1
            if self._num_done == self.terms.num_samples:
                self._end(Ending(Outcome.FINISHED), wait_s=COUNTS_WAIT_S)
        elif reason is FinishReason.DEADLINE:
            self._fail(DeadlineExceeded("The request's deadline passed."), cause="deadline")
        elif self.accepted:
            self._fail(_interrupted(), cause=f"worker_{reason}:{error}" if error else f"worker_{reason}")
        # Without an accepted token the scheduler decides: its next notice is Placed, AttemptLost or Refused.

    def slot_lost(self, slot: Slot, cause: str) -> None:
        """Take notice that a worker of the current attempt cannot be reached any more."""
        if self.ending is not None:
            slot.muted = True
            self._conclude_if_counted()
        elif self.accepted and slot.phase is not Phase.PREFILL:
            self._fail(_interrupted(), cause=cause)

    # -- events from the scheduler -----------------------------------------------------------------

    def notice_placed(self, notice: Placed) -> None:
        """Take notice that an attempt runs."""
        if notice.attempt != self.attempt and not self._advance(notice.attempt):
            return
        if self.placed is None:
            self._queue_ms = (time.monotonic() - self._written_s) * 1000
        self.placed = notice
        self.output.placed()
        if self.ending is not None:
            if self.ending.outcome is not Outcome.FINISHED:
                self._stop_engines(self.ending.cause)
            self._conclude_if_counted()

    def notice_refused(self, notice: Refused) -> None:
        """Take notice that the scheduler will not run the request (any further)."""
        if self.event is not None:
            return
        if self.ending is None:
            outcome = Outcome.INTERRUPTED if self.attempt else Outcome.REFUSED
            self.output.failed(error_of_refusal(notice))
            self.ending = Ending(outcome, notice.code)
        self._conclude()

    def notice_lost(self, notice: AttemptLost) -> None:
        """Take notice that the scheduler gave up on an attempt."""
        if self.event is not None or notice.attempt < self.attempt:
            return
        if self.ending is not None:
            self._conclude()  # the counts that we wait for will not come
        elif self.accepted:
            # A worker that the scheduler suspects but that still streams to us is left alone.
            if not all(self._effects.attached(slot.worker_id) for slot in self._streams.values()):
                self._fail(_interrupted(), cause=notice.cause)
        elif not notice.retrying:
            entry = Continue(rid=self.terms.rid, lost_attempt=notice.attempt, delivered=())
            self._effects.tell_scheduler(self.terms.pool, entry)

    # -- money -----------------------------------------------------------------------------------------

    def admitted(self, *, max_tokens: int, paid_tokens: int, unreserved: Unreserved | None) -> None:
        """Take what admission allowed: tokens per sample, and what of them is paid."""
        self.max_tokens, self.paid_tokens, self.unreserved = max_tokens, paid_tokens, unreserved

    def running_low(self) -> None:
        """Ask for more money, once until it is answered."""
        if not self._asking and not self.over:
            self._asking = True
            self._effects.ask_for_money(self)

    @property
    def over(self) -> bool:
        """Whether the request has ended."""
        return self.ending is not None

    def extended(self, paid_tokens: int) -> None:
        """Take notice that so many tokens per sample are paid."""
        self._asking = False
        self.paid_tokens = paid_tokens
        for slot in self._streams.values():
            slot.allowance = self._allowance()

    def cut(self) -> None:
        """End the answer as its maximum would: no budget pays for more."""
        if self.ending is not None:
            return
        for sample, slot in self._streams.items():
            if slot.reason is None:
                self.output.sample_finished(sample, FinishReason.LENGTH)
                slot.output = Nowhere()
        self.output.flush()
        self._stop_engines(BUDGET_USED_UP)
        self._end(Ending(Outcome.FINISHED, BUDGET_USED_UP), wait_s=LEAVE_WAIT_S)

    def _allowance(self) -> int:
        allowed = allowance_of(paid_tokens=self.paid_tokens, max_tokens=self.max_tokens)
        return NO_ALLOWANCE if allowed is None else allowed

    # -- events from our own side --------------------------------------------------------------------

    def client_left(self) -> None:
        """Stop all work: the client is gone. It pays for what the workers confirm."""
        if self.ending is None:
            self.output.abandoned()
            self._stop_engines("client_left")
            self._end(Ending(Outcome.CLIENT_LEFT, "client_left"), wait_s=LEAVE_WAIT_S)

    def written(self, entry_id: str) -> None:
        """Take notice that the inbox entry exists; it must be acknowledged when all is over."""
        self.entry_id = entry_id
        self._conclude_if_counted()

    def not_written(self, error: ServingError) -> None:
        """Close a request whose inbox entry could not be written; nobody will run it."""
        self.output.failed(error)
        self.ending = Ending(Outcome.REFUSED, error.code)
        # It may have been written after all, if only the answer was lost.
        self._effects.tell_scheduler(self.terms.pool, Abort(rid=self.terms.rid, reason="not_written"))
        self._conclude()

    def gateway_stops(self) -> None:
        """Break off: this process ends. Costs the tenant nothing."""
        self.break_off("gateway_stopped")

    def break_off(self, cause: str) -> None:
        """Break off for a reason of ours. Costs the tenant nothing."""
        if self.ending is None:
            self._fail(_interrupted(), cause=cause)

    def close_now(self) -> None:
        """Settle with the counts known so far."""
        if self.ending is not None:
            self._conclude()

    # -- inside ----------------------------------------------------------------------------------------

    def _advance(self, attempt: int) -> bool:
        """Make `attempt` the current one if it may be; older ones are fenced off."""
        if attempt < self.attempt or self.accepted:
            return False
        for slot in (*self._streams.values(), *self._prefills.values()):
            slot.muted = True
        self._streams.clear()
        self._prefills.clear()
        self._num_done = 0
        self.attempt = attempt
        return True

    def _deadline_passed(self) -> None:
        if self.ending is None:
            self._fail(DeadlineExceeded("The request's deadline passed."), cause="deadline")

    def _fail(self, error: ServingError, *, cause: str) -> None:
        """Tell the client that the answer broke off, and stop the workers."""
        self.output.failed(error)
        self._stop_engines(cause)
        self._end(Ending(Outcome.INTERRUPTED, cause), wait_s=COUNTS_WAIT_S)

    def _stop_engines(self, reason: str) -> None:
        workers = {slot.worker_id for slot in (*self._streams.values(), *self._prefills.values())}
        if self.placed is not None and self.placed.attempt == self.attempt:
            workers.add(self.placed.decode.worker_id)
            if self.placed.prefill is not None:
                workers.add(self.placed.prefill.worker_id)
        for worker_id in workers:
            self._effects.abort_on_worker(worker_id, self._attempt_id(), reason)
        self._effects.tell_scheduler(self.terms.pool, Abort(rid=self.terms.rid, reason=reason))

    def _attempt_id(self) -> pb.AttemptId:
        return pb.AttemptId(rid=self.rid_bytes, attempt=self.attempt, sample=0)

    def _end(self, ending: Ending, *, wait_s: float) -> None:
        self.ending = ending
        self._timer.cancel()
        if self._counted():
            self._conclude()
        else:
            self._timer = self._loop.call_later(wait_s, self._conclude)

    def _conclude_if_counted(self) -> None:
        if self.ending is not None and self._counted():
            self._conclude()

    def _counted(self) -> bool:
        """Return whether everything is known that the usage event says."""
        if not self.entry_id or self.placed is None or self.placed.attempt != self.attempt:
            return False
        streams = self._streams.values()
        if len(streams) < self.terms.num_samples or any(s.reason is None and not s.muted for s in streams):
            return False
        if self.placed.prefill is None:
            return True
        first = self._prefills.get(0)
        return first is not None and (first.reason is not None or first.muted)

    def _conclude(self) -> None:
        if self.event is not None:
            return
        self._timer.cancel()
        self.event = event = self._usage_event(self.ending or Ending(Outcome.INTERRUPTED, "unknown"))
        self._forget(self)
        if event.outcome is Outcome.FINISHED:
            self.output.succeeded(event)
        self._effects.settle(
            Closed(
                event=event,
                entry_id=self.entry_id,
                ended_unix_ms=self.terms.arrived_unix_ms + int((time.monotonic() - self.terms.arrived_s) * 1000),
                phase_blamed=blamed(event, self.terms.owner.slo),
                unreserved=self.unreserved,
            )
        )

    def _usage_event(self, ending: Ending) -> UsageEvent:
        timings = None
        if self.accepted:
            timings = timings_of(
                self.terms,
                streams=self._streams,
                prefills=self._prefills,
                first_sent_s=self.output.first_sent_s,
                queue_ms=self._queue_ms,
                now_s=time.monotonic(),
            )
        return usage_event(
            self.terms,
            ending,
            attempt=self.attempt,
            accepted=self.accepted,
            placed=self.placed if self.placed is not None and self.placed.attempt == self.attempt else None,
            streams=self._streams,
            prefills=self._prefills,
            timings=timings,
        )


def _interrupted() -> Interrupted:
    return Interrupted("The answer broke off through a fault on our side. You are not charged for it.")
