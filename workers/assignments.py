"""The requests this worker runs: from an accepted submit to the final counts.

1. `submit` checks the fences' outcome, the worker's state and the tombstones of early aborts, gives
   the request a handle on its gateway's outbox and hands it to the engine.
2. The engine writes through the assignment into the outbox; the scheduler is not involved.
3. An end is asked for by an abort, the deadline, a lost reader or an overflow. It is repeated every
   tick until the engine has ended the request; an engine that does not within `force_end_s` is
   unhealthy, and the request ends without it.
4. The end goes to the gateway (Finished), to the schedulers (Final) and to the recorder.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import structlog

from contracts.lifecycle import FinishReason, Phase, Role
from contracts.parsing import Detail
from contracts.usage import AttemptRecord
from contracts.v1 import worker_pb2 as pb
from contracts.wire import (
    FINISH_TO_PB,
    PHASE_TO_PB,
    Attempt,
    Counts,
    Stages,
    attempt_to_pb,
    counts_to_pb,
    stages_to_pb,
)
from workers.engine import End, Engine, Job, Refusal
from workers.finals import Finals
from workers.outbox import Key, Limits, Outbox

log = structlog.get_logger()

MAX_TOMBSTONES = 10_000
MAX_REMEMBERED_GATEWAYS = 1_000
ROLE_PHASES = {
    Role.PREFILL: frozenset({Phase.PREFILL}),
    Role.DECODE: frozenset({Phase.DECODE}),
    Role.UNIFIED: frozenset({Phase.UNIFIED}),
}
ANY_PHASE = frozenset(Phase)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker this is, in which of its lives."""

    worker_id: str
    epoch: int  # Unix ms of the process start or of the last role change; only ever grows
    pool: str


class Events:
    """What other parts of the worker learn about requests. Each is called on the loop and may not block."""

    def __init__(self) -> None:
        self.prefilled: Callable[[pb.PrefillDone], None] = _ignore
        self.first_token: Callable[[Assignment], None] = _ignore
        self.ended: Callable[[pb.Final], None] = _ignore
        self.delivered: Callable[[pb.Delivered], None] = _ignore
        self.recorded: Callable[[AttemptRecord], None] = _ignore
        self.closed: Callable[[Job, End, FinishReason], None] = _ignore_three


def _ignore(_: object) -> None:
    """Take an event nobody listens to."""


def _ignore_three(_: object, __: object, ___: object) -> None:
    """Take an event nobody listens to."""


class Assignment:
    """One accepted request; the engine's Outlet."""

    def __init__(self, job: Job, outbox: Outbox, handle: int, owner: "Assignments") -> None:
        self.job = job
        self.key = Key(job.attempt, job.phase)
        self.outbox = outbox
        self.handle = handle
        self.num_tokens = 0
        self.accepted_s = owner.now_s()
        self.first_token_s = self.accepted_s
        self.asked: FinishReason | None = None  # the end that was asked for
        self.asked_at_s = 0.0
        self.prefill_reported = False
        self.muted = False  # the gateway will never hear of this request again
        self._owner = owner

    def chunk(self, text: str, token_ids: Sequence[int], detail: Detail | None = None) -> None:
        """Pass one chunk to the gateway."""
        if self.num_tokens == 0:
            self.first_token_s = self._owner.now_s()
            if self.job.phase is Phase.UNIFIED:
                self._owner.events.first_token(self)
        self.num_tokens += len(token_ids)
        if not (self.muted or self.job.prompt_only):
            self.outbox.chunk(self.handle, text, token_ids, detail)

    def prefilled(self, counts: Counts, stages: Stages) -> None:
        """Tell the schedulers that the prompt is computed."""
        self.prefill_reported = True
        self._owner.report_prefill(self, counts, stages)

    def end(self, end: End) -> None:
        """Close the request."""
        self._owner.close(self, end)


class Assignments:
    """All running requests of one worker, and the outboxes of the gateways they belong to."""

    def __init__(
        self,
        identity: Identity,
        role: Role,
        engine: Engine,
        limits: Limits,
        *,
        now_s: Callable[[], float],
        force_end_s: float = 10.0,
    ) -> None:
        self.identity = identity
        self.role = role
        self.role_is_label = False  # any phase runs here, whatever the role
        self.kv_bytes_per_token = 0  # of the model's KV cache; the engine says it when it has started
        self.events = Events()
        self.finals = Finals(now_s)
        self.engine_stuck = False
        self._engine = engine
        self._limits = limits
        self._now_s = now_s
        self._force_end_s = force_end_s
        self._running: dict[Key, Assignment] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._next_seqs: dict[str, int] = {}  # of dropped outboxes
        self._tombstones: dict[tuple[str, int, int | None], None] = {}
        self._handles = itertools.count(1)
        self._tokens_of_ended = 0

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Assignment]:
        return iter(tuple(self._running.values()))

    @property
    def tokens_produced(self) -> int:
        """Tokens sampled since the process started."""
        return self._tokens_of_ended + sum(a.num_tokens for a in self._running.values())

    # -- commands ------------------------------------------------------------------------------------

    def submit(self, job: Job) -> pb.Final | None:
        """Take a job; a repeated one changes nothing. Returns the final counts when it has ended already.

        Raises:
            Refusal: the role or the engine does not take it.
        """
        key = Key(job.attempt, job.phase)
        if key in self._running:
            return None
        if (final := self.finals.find(key)) is not None:
            return final
        self.check_phase(job)
        outbox = self.outbox(job.gateway_id)
        assignment = Assignment(job, outbox, next(self._handles), self)
        self._running[key] = assignment
        if self._buried(job.attempt):
            outbox.open(assignment.handle, key, job.placed)
            assignment.end(End(reason=FinishReason.ABORTED, counts=Counts(), stages=Stages()))
            return self.finals.find(key)
        try:
            self._engine.submit(job, assignment)
        except BaseException:  # a refusal, or a fault: either way the engine does not have it
            self._running.pop(key, None)
            raise
        outbox.open(assignment.handle, key, job.placed)
        return None

    def check_phase(self, job: Job) -> None:
        """Raise Refusal when a job does not fit the worker's role, or is half of a hand-off without the other."""
        if job.phase not in (ANY_PHASE if self.role_is_label else ROLE_PHASES[self.role]):
            raise Refusal("wrong_role", f"a {self.role} worker does not run the {job.phase} phase")
        if job.peerless:
            raise Refusal("bad_request", f"a {job.phase} phase needs a hand-off")

    def abort(self, attempt: Attempt, *, all_samples: bool, reason: str) -> None:
        """End one sample or all samples of an attempt; one that is not here yet will not start."""
        matching = [
            a
            for a in self._running.values()
            if a.job.attempt.rid == attempt.rid
            and a.job.attempt.attempt == attempt.attempt
            and (all_samples or a.job.attempt.sample == attempt.sample)
        ]
        self._tombstones[attempt.rid, attempt.attempt, None if all_samples else attempt.sample] = None
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        for assignment in matching:
            log.debug("abort_asked", rid=attempt.rid, attempt=attempt.attempt, reason=reason)
            self._ask_end(assignment, FinishReason.ABORTED)

    def acknowledge(self, outbox: Outbox, seq: int) -> None:
        """Trim a ring; what it held is delivered."""
        for key in self.finals.mark_delivered(outbox.ack(seq)):
            self.events.delivered(pb.Delivered(id=attempt_to_pb(key.attempt), phase=PHASE_TO_PB[key.phase]))

    def outbox(self, gateway_id: str) -> Outbox:
        """Return the gateway's outbox, made on first use."""
        outbox = self._outboxes.get(gateway_id)
        if outbox is None:
            outbox = self._outboxes[gateway_id] = Outbox(
                gateway_id,
                self.identity.epoch,
                self._limits,
                on_overflow=self._drop_requests_of,
                first_seq=self._next_seqs.pop(gateway_id, 1),
            )
        return outbox

    # -- time ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Enforce deadlines and readers, and repeat the aborts the engine has not followed yet."""
        now_ms = time.time() * 1000
        now_s = self._now_s()
        for outbox in [o for o in self._outboxes.values() if o.unread_s > self._limits.reader_lost_s]:
            self._drop_requests_of(outbox)
            del self._outboxes[outbox.gateway_id]
            self._remember_seq(outbox)
        for assignment in self:
            if assignment.asked is not None:
                if now_s - assignment.asked_at_s > self._force_end_s:
                    self._force_end(assignment)
                else:
                    self._engine.abort(assignment.job)
            elif assignment.job.deadline_unix_ms <= now_ms:
                self._ask_end(assignment, FinishReason.DEADLINE)
        self.finals.expire()

    def end_all(self, reason: FinishReason) -> None:
        """Ask for the end of everything: the worker stops."""
        for assignment in self:
            self._ask_end(assignment, reason)

    @property
    def drained(self) -> bool:
        """Whether nothing runs and every attached gateway has been sent everything."""
        return not self._running and all(o.drained for o in self._outboxes.values() if not o.unread_s)

    @property
    def quiet(self) -> bool:
        """Whether nothing runs and every gateway has confirmed all it was sent: a new epoch loses nothing."""
        return not self._running and all(o.confirmed for o in self._outboxes.values())

    def begin_epoch(self, epoch: int, role: Role) -> None:
        """Go on as another life of the worker; nothing runs. Gateways attach again, and their rings start afresh."""
        assert not self._running, "a role changes only when nothing runs"
        self.identity = msgspec.structs.replace(self.identity, epoch=epoch)
        self.role = role
        for outbox in self._outboxes.values():
            outbox.dismiss()
        self._outboxes.clear()
        self._next_seqs.clear()

    # -- ends ------------------------------------------------------------------------------------------

    def report_prefill(self, assignment: Assignment, counts: Counts, stages: Stages) -> None:
        """Tell the schedulers that a prompt is computed."""
        self.events.prefilled(
            pb.PrefillDone(
                id=attempt_to_pb(assignment.job.attempt), counts=counts_to_pb(counts), stages=stages_to_pb(stages)
            )
        )

    def close(self, assignment: Assignment, end: End) -> None:
        """Take the end of a request once; later calls change nothing."""
        if self._running.pop(assignment.key, None) is None:
            return
        job = assignment.job
        if job.prompt_only:  # its one token is of no use to anybody, as that of a prefill
            counts = msgspec.structs.replace(end.counts, completion_tokens=0, reasoning_tokens=0)
            end = msgspec.structs.replace(end, counts=counts)
        self._tokens_of_ended += assignment.num_tokens
        reason = end.reason
        if reason is FinishReason.ABORTED and assignment.asked is not None:
            reason = assignment.asked
        error = end.error or ("the worker stops" if reason is FinishReason.ERROR else "")
        if job.phase is Phase.PREFILL and reason.complete and not assignment.prefill_reported:
            self.report_prefill(assignment, end.counts, end.stages)
        told, stages = counts_to_pb(end.counts), stages_to_pb(end.stages)
        final = pb.Final(
            id=attempt_to_pb(job.attempt),
            phase=PHASE_TO_PB[job.phase],
            reason=FINISH_TO_PB[reason],
            counts=told,
            stages=stages,
            error=error,
            gateway_id=job.gateway_id,
        )
        self.finals.add(assignment.key, final)
        if not assignment.muted:
            assignment.outbox.finish(
                pb.Finished(
                    handle=assignment.handle,
                    reason=FINISH_TO_PB[reason],
                    counts=told,
                    stages=stages,
                    error=error,
                    matched_stop=end.matched_stop,
                ),
                assignment.key,
            )
        self.events.ended(final)
        self.events.recorded(self._record(assignment, end, reason))
        self.events.closed(job, end, reason)

    def now_s(self) -> float:
        """Return the clock of this worker, seconds."""
        return self._now_s()

    def _record(self, assignment: Assignment, end: End, reason: FinishReason) -> AttemptRecord:
        """Return the final counts. KV: the prompt from the start, and the answer as if it grew evenly."""
        job, now_s, counts = assignment.job, self._now_s(), end.counts
        held_s, answered_s = now_s - assignment.accepted_s, now_s - assignment.first_token_s
        token_s = counts.prompt_tokens * held_s + counts.completion_tokens * answered_s / 2
        return AttemptRecord(
            rid=job.attempt.rid,
            attempt=job.attempt.attempt,
            sample=job.attempt.sample,
            phase=job.phase,
            worker_id=self.identity.worker_id,
            worker_epoch=self.identity.epoch,
            pool=self.identity.pool,
            reason=reason,
            prompt_tokens=end.counts.prompt_tokens,
            cached_tokens=end.counts.cached_tokens,
            completion_tokens=end.counts.completion_tokens,
            compute_ms=end.stages.compute_ms,
            ended_unix_ms=int(time.time() * 1000),
            worker_ms=held_s * 1000,
            kv_byte_s=token_s * self.kv_bytes_per_token,
            payer=job.payer,
        )

    def _ask_end(self, assignment: Assignment, reason: FinishReason) -> None:
        if assignment.asked is None:
            assignment.asked = reason
            assignment.asked_at_s = self._now_s()
        self._engine.abort(assignment.job)

    def _force_end(self, assignment: Assignment) -> None:
        log.error("engine_ignores_abort", rid=assignment.job.attempt.rid, after_s=self._force_end_s)
        self.engine_stuck = True
        prompt_tokens = assignment.job.num_prompt_tokens if assignment.num_tokens else 0
        counts = Counts(prompt_tokens=prompt_tokens, completion_tokens=assignment.num_tokens)
        error = f"the engine did not end the request within {self._force_end_s:g} s"
        assignment.end(End(reason=FinishReason.ABORTED, counts=counts, stages=Stages(), error=error))

    def _drop_requests_of(self, outbox: Outbox) -> None:
        """End what belongs to a gateway that does not take its tokens."""
        for assignment in self:
            if assignment.outbox is outbox and not assignment.muted:
                assignment.muted = True
                self._ask_end(assignment, FinishReason.READER_LOST)

    def _remember_seq(self, outbox: Outbox) -> None:
        if outbox.next_seq > 1:
            self._next_seqs[outbox.gateway_id] = outbox.next_seq
        if len(self._next_seqs) > MAX_REMEMBERED_GATEWAYS:
            del self._next_seqs[next(iter(self._next_seqs))]

    def _buried(self, attempt: Attempt) -> bool:
        return (attempt.rid, attempt.attempt, None) in self._tombstones or (
            attempt.rid,
            attempt.attempt,
            attempt.sample,
        ) in self._tombstones
