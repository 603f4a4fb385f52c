"""One request's life in the gateway: a state machine without tasks, driven by events.

1. Admitted and written to the inbox: the generation waits for `opened`, `placed` or `refused`.
2. `opened` names an attempt on a worker and gives back the slot that the link writes tokens into. A
   newer attempt replaces an older one until a token of it was accepted. When a worker of an accepted
   attempt is lost, `_continue` fences the attempt off and tells the scheduler what the client has; the
   next attempt goes on from there, and until a token of it is accepted step 2 holds again.
3. Something ends it (`Ending`): all samples finished, the client left, a refusal, a fault, the
   deadline. The client is told at once where there is one.
4. Money is reserved for part of the maximum (gateway.purse). A sample that comes near the end of it asks for
   more; if no budget has more, `cut` ends the answer like its maximum would.
5. The workers' final counts may still be on their way: a bounded wait for them, then `_conclude`
   makes the usage event, hands it to the settlement queue, and lets the output end.

Nothing here awaits, so all of it may be called from a task that is being cancelled.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

import structlog

from contracts.errors import DeadlineExceeded, Interrupted, ServingError
from contracts.identity import rid_bytes
from contracts.lifecycle import FinishReason, Phase
from contracts.usage import Outcome, UsageEvent
from contracts.v1 import worker_pb2 as pb
from contracts.wire import Abort, AttemptLost, Placed, Refused
from gateway.accounting import BUDGET_USED_UP, blamed, timings_of, usage_event
from gateway.delivered import Delivered, the_rest
from gateway.effects import Effects
from gateway.gaps import Gaps
from gateway.outputs import Nowhere, Output
from gateway.parts import Parts
from gateway.patience import Patience, Silence, out_of_reach
from gateway.purse import allowance_of
from gateway.refusals import error_of_refusal
from gateway.slots import NO_ALLOWANCE, Slot
from gateway.terms import Admitted, Closed, Ending, Terms

log = structlog.get_logger()

COUNTS_WAIT_S: Final = 1.0  # for the prefill side's counts, once the answer is whole or broken
LEAVE_WAIT_S: Final = 5.0  # for the workers to confirm the stop after the client left
DEADLINE_SLACK_S: Final = 1.0  # workers enforce the deadline first
SILENT_S: Final = 1.0  # a worker that the scheduler has given up must stream within it to be left alone


class Generation:
    """See the module's docstring."""

    def __init__(
        self,
        terms: Terms,
        granted: Admitted,
        output: Output,
        effects: Effects,
        *,
        loop: asyncio.AbstractEventLoop,
        forget: Callable[["Generation"], None],
        deadline_s: float,
    ) -> None:
        """`deadline_s` is seconds from now; `forget` is called once, when the request is closed."""
        self.terms = terms
        self.granted = granted
        self.output = output
        self.entry_id = ""
        self.attempt = 0
        self.accepted = False  # a token of the current attempt reached us
        self.placed: Placed | None = None
        self.ending: Ending | None = None
        self.event: UsageEvent | None = None
        self.rid_bytes = rid_bytes(terms.rid)
        self.paid_tokens = granted.paid_tokens  # per sample; grows while the answer runs
        self._told_cached = not granted.limits_uncached  # what was found cached is given back once
        self._asking = False
        self._effects = effects
        self._loop = loop
        self._forget = forget
        self._parts = Parts()
        measured = terms.owner.slo.itl_p99_ms is not None
        self._delivered = [Delivered(Gaps() if measured else None) for _ in range(terms.num_samples)]
        self._silence = Silence()
        self._num_done = 0
        self._lost_by = ""  # why the last accepted attempt was given up
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
        slot = Slot(self, sample, phase, worker_id, self._delivered[sample])
        if phase is not Phase.PREFILL:
            slot.allowance = self._allowance(slot)
        self._parts.add(slot)
        if self.ending is not None and self.ending.outcome is not Outcome.FINISHED:
            self._effects.abort_on_worker(worker_id, self._attempt_id(), self.ending.cause)
        return slot

    def slot_finished(self, slot: Slot, error: str) -> None:
        """Take the end of one engine request of the current attempt."""
        if self.ending is not None or slot.phase is Phase.PREFILL:
            told = self._told_cached or self._parts.is_continued  # by the attempt whose prompt is metered
            if self.ending is None and slot.counts.cached_tokens and not told:
                self._told_cached = True
                self._effects.found_cached(self.terms.owner.org, self.terms.rid, slot.counts.cached_tokens)
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
            self._continue(f"worker_{reason}:{error}" if error else f"worker_{reason}")
        # Without an accepted token the scheduler decides: its next notice is Placed, AttemptLost or Refused.

    def slot_lost(self, slot: Slot, cause: str) -> None:
        """Take notice that a worker of the current attempt cannot be reached any more."""
        if self.ending is not None:
            slot.muted = True
            self._conclude_if_counted()
        elif self.accepted and slot.phase is not Phase.PREFILL:
            self._continue(cause)

    # -- events from the scheduler -----------------------------------------------------------------

    def notice_placed(self, notice: Placed) -> None:
        """Take notice that an attempt runs."""
        if notice.attempt != self.attempt and not self._advance(notice.attempt):
            return
        if self.placed is not None and self.placed.attempt == notice.attempt:
            return  # it comes with the first tokens, and by Redis
        if self.placed is None:
            here_ms = (time.monotonic() - self._written_s) * 1000
            self._queue_ms = here_ms if notice.queued_ms is None else min(here_ms, notice.queued_ms)
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
            self.ending = Ending(outcome, self._lost_by or notice.code)
        self._conclude()

    def notice_lost(self, notice: AttemptLost) -> None:
        """Take notice that the scheduler gave up on an attempt."""
        if self.event is not None or notice.attempt < self.attempt:
            return
        if self.ending is not None:
            # An aborted end may come by the scheduler before the worker's own word, which has the counts.
            if not any(s.reason is None and not s.muted and self._is_attached(s) for s in self._parts.current):
                self._conclude()
        elif self.accepted:
            # A worker that the scheduler gave up but that still streams to us is left alone.
            streams = self._parts.streams.values()
            silent_s = max((self._effects.silent_s(slot.worker_id) for slot in streams), default=0.0)
            if silent_s < SILENT_S:
                self._loop.call_later(SILENT_S, self._still_silent, self.attempt, self._num_tokens, notice.cause)
            else:
                self._continue(notice.cause)
        elif not notice.retrying:
            self._ask_for_the_rest(notice.attempt)

    # -- money -----------------------------------------------------------------------------------------

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
        for slot in self._parts.streams.values():
            slot.allowance = self._allowance(slot)

    def cut(self) -> None:
        """End the answer as its maximum would: no budget pays for more."""
        if self.ending is not None:
            return
        answers = self._parts.answers
        for sample in range(self.terms.num_samples):
            slot = answers.get(sample)  # none: between two attempts
            if slot is None or slot.reason is None:
                self.output.sample_finished(sample, FinishReason.LENGTH)
            if slot is not None and slot.reason is None:
                slot.output = Nowhere()
        self.output.flush()
        self._stop_engines(BUDGET_USED_UP)
        self._end(Ending(Outcome.FINISHED, BUDGET_USED_UP), wait_s=LEAVE_WAIT_S)

    def _allowance(self, slot: Slot) -> int:
        allowed = allowance_of(paid_tokens=self.paid_tokens, max_tokens=self.granted.max_tokens)
        return NO_ALLOWANCE if allowed is None else allowed - slot.delivered.num_before

    # -- events from our own side --------------------------------------------------------------------

    def client_left(self) -> None:
        """Stop all work: the client is gone. It pays for what the workers confirm."""
        if self.ending is None:
            self.output.abandoned()
            self._stop_engines("client_left")
            self._end(Ending(Outcome.CLIENT_LEFT, "client_left"), wait_s=LEAVE_WAIT_S)

    def withdrawn(self, error: ServingError, *, cause: str) -> None:
        """End an answer whose key or tenant may not go on. It pays for what the workers confirm."""
        if self.ending is None:
            self.output.failed(error)
            self._stop_engines(cause)
            self._end(Ending(Outcome.CLIENT_LEFT, cause), wait_s=LEAVE_WAIT_S)

    def tick(self, now_s: float, patience: Patience) -> None:
        """Give up an attempt that is silent for too long. Called about once a second."""
        self.output.tick(now_s)
        placed = self.placed
        if self.ending is None and placed is not None and placed.attempt == self.attempt:
            self._silence.look(
                now_s,
                patience,
                attempt=self.attempt,
                num_tokens=self._num_tokens,
                prompt_tokens=self.terms.prompt_tokens,
                begun=self.accepted,
                worker_id=placed.decode.worker_id,
                links=self._effects,
                give_up=self._stalled,
            )

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
        self._parts.fence_off()
        self._num_done = len(self._parts.whole)
        self.attempt = attempt
        return True

    @property
    def _num_tokens(self) -> int:
        return sum(delivered.num_tokens for delivered in self._delivered)

    def _is_attached(self, slot: Slot) -> bool:
        return self._effects.silent_s(slot.worker_id) < math.inf

    def _still_silent(self, attempt: int, num_tokens: int, cause: str) -> None:
        """Go on elsewhere if nothing came since the scheduler gave the worker up."""
        if self.ending is None and self.accepted and (self.attempt, self._num_tokens) == (attempt, num_tokens):
            self._continue(cause)

    def _continue(self, cause: str) -> None:
        """Give up the current attempt, whose tokens the client has, and have the rest made by another one."""
        log.info("continues", rid=self.terms.rid, attempt=self.attempt, num_tokens=self._num_tokens, cause=cause)
        self._lost_by = cause
        self._abort_attempt(cause)
        self._parts.continued()
        for sample, delivered in enumerate(self._delivered):
            if sample not in self._parts.whole:
                delivered.continued()
        self._num_done = len(self._parts.whole)
        self.accepted = False
        self._ask_for_the_rest(self.attempt)

    def _stalled(self, cause: str) -> None:
        if self.accepted:
            self._continue(cause)
            return
        log.info("stalled", rid=self.terms.rid, attempt=self.attempt, cause=cause)
        self._abort_attempt(cause)
        self._ask_for_the_rest(self.attempt)

    def _ask_for_the_rest(self, lost_attempt: int) -> None:
        unreachable = out_of_reach(self.placed, lost_attempt, self._effects)
        entry = the_rest(self.terms, lost_attempt, self._delivered, done=self._parts.whole, unreachable=unreachable)
        self._effects.tell_scheduler(self.terms.pool, entry)

    def _deadline_passed(self) -> None:
        if self.ending is None:
            self._fail(DeadlineExceeded("The request's deadline passed."), cause="deadline")

    def _fail(self, error: ServingError, *, cause: str) -> None:
        """Tell the client that the answer broke off, and stop the workers."""
        self.output.failed(error)
        self._stop_engines(cause)
        self._end(Ending(Outcome.INTERRUPTED, cause), wait_s=COUNTS_WAIT_S)

    def _stop_engines(self, reason: str) -> None:
        self._abort_attempt(reason)
        self._effects.tell_scheduler(self.terms.pool, Abort(rid=self.terms.rid, reason=reason))

    def _abort_attempt(self, reason: str) -> None:
        workers = {slot.worker_id for slot in self._parts.current}
        if self.placed is not None and self.placed.attempt == self.attempt:
            workers.add(self.placed.decode.worker_id)
            if self.placed.prefill is not None:
                workers.add(self.placed.prefill.worker_id)
        for worker_id in workers:
            self._effects.abort_on_worker(worker_id, self._attempt_id(), reason)

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
        return self._parts.counted(self.terms.num_samples, has_prefill=self.placed.prefill is not None)

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
                unreserved=self.granted.unreserved,
            )
        )
        self._parts.clear()

    def _usage_event(self, ending: Ending) -> UsageEvent:
        timings = None
        parts = self._parts
        streams, prompts = parts.answers, parts.prompts
        if self.accepted or self._num_tokens:
            timings = timings_of(
                self.terms,
                streams=streams,
                prompts=prompts,
                num_tokens=self._num_tokens,
                first_sent_s=self.output.first_sent_s,
                queue_ms=self._queue_ms,
                now_s=time.monotonic(),
            )
        return usage_event(
            self.terms,
            ending,
            attempt=self.attempt,
            accepted=self.accepted or self._num_tokens > 0,
            placed=self.placed if self.placed is not None and self.placed.attempt == self.attempt else None,
            streams=streams,
            prefills=parts.prefills,
            prompts=prompts,
            num_before=sum(delivered.num_before for delivered in self._delivered),
            timings=timings,
        )


def _interrupted() -> Interrupted:
    return Interrupted("The answer broke off through a fault on our side. You are not charged for it.")
