"""The worker's state and its health: judged by progress, not by whether a health call is answered."""

import time
from collections.abc import Callable

from contracts.lifecycle import Role, WorkerState, move_worker
from contracts.v1 import worker_pb2 as pb
from contracts.wire import ROLE_TO_PB, STATE_TO_PB
from workers.assignments import Assignments, Identity
from workers.engine import Engine, EngineFacts, EngineLoad

MIN_GRACE_S = 5.0


class Condition:
    """State, fences and progress of one worker. `observe` is called every status period."""

    def __init__(
        self,
        identity: Identity,
        role: Role,
        engine: Engine,
        assignments: Assignments,
        *,
        now_s: Callable[[], float],
        min_grace_s: float = MIN_GRACE_S,
    ) -> None:
        self.identity = identity
        self.role = role
        self.state = WorkerState.STARTING
        self.leader_epoch = 0  # highest seen
        self.load = EngineLoad()
        self.facts: EngineFacts | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.kv_seq: Callable[[], int] = lambda: 0
        self._engine = engine
        self._assignments = assignments
        self._now_s = now_s
        self._min_grace_s = min_grace_s
        self._grace_s = min_grace_s
        self._progress: tuple[int, int, int] = (0, 0, 0)
        self._progress_at_s = now_s()

    def move(self, to: WorkerState) -> None:
        """Change the state along contracts.lifecycle.WORKER_NEXT."""
        if self.state is not to:
            self.state = move_worker(self.state, to)
            self.on_change()

    def started(self, facts: EngineFacts, *, ready: bool = True) -> None:
        """Note that the engine runs and, with `ready`, may have requests.

        Raises:
            ValueError: it has another role than the worker.
        """
        if facts.role is not self.role and not facts.role_is_label:
            raise ValueError(f"the engine runs as {facts.role}, the worker was started as {self.role}")
        self._take(facts)
        if ready:
            self.move(WorkerState.READY)

    def label(self, role: Role) -> None:
        """Take another role where that is only a label."""
        self.role = role
        self.on_change()

    def switched(self, facts: EngineFacts, identity: Identity) -> None:
        """Note that the engine has another role, in another life of the worker."""
        self.role = facts.role
        self.identity = identity
        self._progress_at_s = self._now_s()
        self._take(facts)
        self.move(WorkerState.READY)

    def _take(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._grace_s = max(self._min_grace_s, 2 * facts.slowest_step_ms / 1000)

    @property
    def hung(self) -> bool:
        """Whether nothing has moved for two grace periods: waiting helps no more, the process should start again."""
        return self._now_s() - self._progress_at_s > 2 * self._grace_s or self._assignments.engine_stuck

    @property
    def progress_age_s(self) -> float:
        """Seconds since the last token, chunk or idleness."""
        return self._now_s() - self._progress_at_s

    @property
    def has_room(self) -> bool:
        """Whether at the last look the engine was less than half full: nobody waits for what one request leaves."""
        facts, load = self.facts, self.load
        if facts is None or load.num_waiting:
            return False
        return 2 * load.num_running <= facts.max_running and 2 * load.kv_used_tokens <= facts.kv_capacity_tokens

    @property
    def progressing(self) -> bool:
        """False when work is there and nothing has moved for the grace period, or the engine says that it cannot."""
        moves = self._now_s() - self._progress_at_s <= self._grace_s
        return moves and not (self._assignments.engine_stuck or self.load.out_of_service)

    def observe(self) -> pb.Status:
        """Read the engine, judge progress, and return the status to send."""
        load = self.load = self._engine.load()
        tokens = self._assignments.tokens_produced
        progress = (tokens, load.prefill_chunks_done, load.num_computing)
        now_s = self._now_s()
        if load.num_computing == 0 or progress != self._progress:
            self._progress = progress
            self._progress_at_s = now_s
        progressing = self.progressing
        if self.state in (WorkerState.READY, WorkerState.DRAINING) and not progressing:
            self.move(WorkerState.UNHEALTHY)
        elif self.state is WorkerState.UNHEALTHY and progressing:
            self.move(WorkerState.READY)
        return pb.Status(
            worker_epoch=self.identity.epoch,
            role=ROLE_TO_PB[self.role],
            state=STATE_TO_PB[self.state],
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            prefill_queue_tokens=load.prefill_queue_tokens,
            kv_used_tokens=load.kv_used_tokens,
            kv_capacity_tokens=self.facts.kv_capacity_tokens if self.facts else 0,
            tokens_produced=tokens,
            prefill_chunks_done=load.prefill_chunks_done,
            last_progress_age_ms=(now_s - self._progress_at_s) * 1000,
            progressing=progressing,
            num_transfers=load.num_transfers,
            transfer_p50_ms=load.transfer_p50_ms,
            num_waiting_decode_memory=load.num_waiting_decode_memory,
            num_prefill_waiting=load.num_prefill_waiting,
            num_prefill_bootstrap=load.num_prefill_bootstrap,
            num_prefill_inflight=load.num_prefill_inflight,
            num_decode_transfer=load.num_decode_transfer,
            kv_seq=self.kv_seq(),
            sent_unix_ms=int(time.time() * 1000),
        )
