"""The simulated pool: requests from arrival to their last token.

1. An arrival is sized up and queued; whatever the order names next is placed as long as there is room.
2. Direct hand-off: the decode worker reserves KV memory, then the prefill worker computes, then the KV cache
   travels (one transfer at a time per prefill worker), then the request decodes. Store hand-off: prefill writes
   the pages, decode reads them and computes the last page again. Unified: one worker does both.
3. Each end frees room, so the queue is tried again.
"""

from collections.abc import Callable, Iterable

from contracts.lifecycle import HandOff, Role, WorkerState
from scheduler.policy.blame import Stage
from scheduler.policy.cluster import ClusterView
from scheduler.policy.fairness import FairQueue
from scheduler.policy.placement import Placement, Reason
from scheduler.policy.queueing import Split
from scheduler.policy.ratio import Move
from scheduler.policy.scoring import NotScored, Scored
from scheduler.policy.sight import Donor
from scheduler.policy.turns import Turns
from scheduler.simulator.arrivals import BLOCK_TOKENS, Arrival
from scheduler.simulator.clock import Clock
from scheduler.simulator.engine import Engine
from scheduler.simulator.job import Job
from scheduler.simulator.pilot import FleetSight, Pilot
from scheduler.simulator.report import Sample, met_targets
from scheduler.simulator.router import Router
from scheduler.simulator.setup import Failure, Setup
from scheduler.simulator.worker import SimWorker
from scheduler.simulator.workforce import Workforce

_MAX_ATTEMPTS = 3
_TAIL_S = 300.0


class Simulation:
    """One run. `jobs` holds every request's last attempt when it is over."""

    def __init__(self, setup: Setup, pilot: Pilot) -> None:
        self.setup = setup
        self.jobs: dict[int, Job] = {}
        self.moves: list[tuple[float, Move]] = []
        self.cancelled_moves = 0
        self.samples: list[Sample] = []
        self.clock = Clock()
        self._pilot = pilot
        self.router = Router(setup)
        self._queue: FairQueue[Job] = FairQueue(setup.fair)
        self._waiting_work_ms = 0.0
        self._blocked_by: Role | None = None
        self._blocked_since_ms = 0.0
        self._blocked_ms = dict.fromkeys(Role, 0.0)
        self._blocked_at_push: dict[Job, dict[Role, float]] = {}
        self._window: list[bool] = []  # whether each request that ended since the last sample met its targets
        self.workforce = Workforce(setup, self.clock, self.router.index, self)
        self.workers = self.workforce.by_id
        self._store = self.workforce.store
        for role in Role:
            for _ in range(getattr(setup.split, role)):
                self.add_worker(role)

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, arrivals: Iterable[Arrival], *, progress: Callable[[float, int], None] | None = None) -> None:
        """Play the arrivals to their end.

        Args:
            arrivals: in the order of time.
            progress: called each simulated half minute with the time in s and the number of arrivals so far.
        """
        clock, source = self.clock, iter(arrivals)
        for failure in self.setup.failures:
            clock.at(failure.at_s * 1000, self._fail, failure)
        clock.after(self._pilot.period_s * 1000, self._tick)
        clock.after(self.setup.sample_s * 1000, self._sample)
        next_report_ms = 0.0
        number, upcoming = 0, next(source, None)
        while upcoming is not None:
            if not clock.step(upcoming.at_s * 1000):
                clock.now_ms = max(clock.now_ms, upcoming.at_s * 1000)
                number += 1
                self._arrive(upcoming, number)
                upcoming = next(source, None)
            if progress is not None and clock.now_ms >= next_report_ms:
                progress(clock.now_ms / 1000, number)
                next_report_ms = clock.now_ms + 30_000
        self.last_arrival_ms = clock.now_ms
        end_ms = clock.now_ms + _TAIL_S * 1000
        while self._unfinished() and clock.step(end_ms):
            pass

    def _unfinished(self) -> bool:
        return len(self._queue) > 0 or any(worker.jobs for worker in self.workers.values())

    def add_worker(self, role: Role, *, boot_s: float = 0.0) -> SimWorker:
        """Start a worker; it serves after `boot_s`."""
        worker = self.workforce.add(role, booting=boot_s > 0)
        if worker.state is WorkerState.STARTING:
            self.clock.after(boot_s * 1000, self._recover, worker)
        return worker

    def take_away(self, worker: SimWorker) -> None:
        """Drain a worker and let it go; what still runs when the drain has lasted too long is lost with it."""
        worker.leaving = True
        if worker.state is WorkerState.STARTING or not worker.jobs:
            self._gone(worker)
            return
        worker.become(WorkerState.DRAINING)
        self.clock.after(self.setup.drain_cap_s * 1000, self._gone, worker)

    def _gone(self, worker: SimWorker) -> None:
        if self.workers.get(worker.worker_id) is not worker:
            return
        self._lose(worker)
        self.workforce.remove(worker)

    # -- arrival and placing -------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival, number: int) -> None:
        job = Job(arrival, number)
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        now_ms = self.clock.now_ms
        self.jobs[job.number] = job
        sample = self.router.size_up(job, now_ms)
        if job.attempt == 1 and not job.batch:
            self._pilot.arrived(now_ms / 1000, job.number, sample)
        assert job.ticket is not None
        self._count_blocked()
        self._blocked_at_push[job] = dict(self._blocked_ms)
        self._waiting_work_ms += job.work_ms
        self._queue.push(job, job.ticket)
        self._dispatch()

    def _dispatch(self) -> None:
        """Place waiting requests in their order until one has to wait."""
        now_ms = self.clock.now_ms
        turns = Turns(self._queue, now_ms)
        blocked: Role | None = None
        while (job := turns.next()) is not None:
            if now_ms - job.pushed_ms > self.setup.deadline_s * 1000:
                self._refuse(job, "deadline")
                continue
            result = self.router.place(job, self._view(), now_ms, gives_way=self._queue.gives_way(job))
            assert job.ticket is not None
            if isinstance(result, Placement):
                if self._hopeless(job, result):
                    self._queue.give_up(job)
                else:
                    self._start(job, result)
            elif result.reason is Reason.TOO_LONG:
                self._refuse(job, "too_long")
            elif turns.no_room(job.ticket):
                blocked = result.short_of if isinstance(result, NotScored) else Role.DECODE
        self._count_blocked()
        self._blocked_by = blocked

    def _hopeless(self, job: Job, placement: Placement) -> bool:
        """Whether even the best place is too late for a request that is not counted as late yet."""
        ttft_ms = self.setup.target.ttft_ms
        return (
            ttft_ms is not None
            and not job.batch
            and isinstance(placement, Scored)
            and not self._queue.is_late(job)
            and placement.predicted_ttft_ms > ttft_ms
        )

    def _count_blocked(self) -> None:
        now_ms = self.clock.now_ms
        if self._blocked_by is not None:
            self._blocked_ms[self._blocked_by] += now_ms - self._blocked_since_ms
        self._blocked_since_ms = now_ms

    def _refuse(self, job: Job, why: str) -> None:
        self._queue.remove(job)
        self._left_queue(job)
        job.refused = why
        job.alive = False
        if not job.batch:
            self._pilot.ended(self.clock.now_ms / 1000, job.number, None, None)
            self._window.append(False)

    def _left_queue(self, job: Job) -> None:
        self._waiting_work_ms -= job.work_ms
        self._count_blocked()
        at_push = self._blocked_at_push.pop(job)
        for role, total_ms in self._blocked_ms.items():
            job.blocked_ms[role] = total_ms - at_push[role]

    def _view(self) -> ClusterView:
        return ClusterView.of(tuple(worker.view() for worker in self.workers.values()))

    def _start(self, job: Job, placement: Placement) -> None:
        setup, now_ms = self.setup, self.clock.now_ms
        self._queue.take(job)
        self._left_queue(job)
        job.placed_ms = now_ms
        prompt = job.arrival.prompt_tokens
        hoped = placement.cached_tokens if isinstance(placement, Scored) else 0
        if isinstance(placement, Scored):
            promised, held = placement.promised_kv_tokens, placement.decoding_kv_tokens
        else:
            promised = held = setup.limits.promised_tokens(prompt, job.arrival.max_tokens, 1)
        if not job.batch:
            self.router.placed(job, placement.decode, now_ms)
        decode = self.workers[placement.decode.worker_id]
        job.decode_id = decode.worker_id
        computes = decode
        if placement.prefill is not None:
            computes = self.workers[placement.prefill.worker_id]
            job.prefill_id = computes.worker_id
            computes.charge(job, kv_tokens=prompt, prefill_tokens=prompt - hoped)
            decode.charge(job, kv_tokens=promised, prefill_tokens=0, decoding_kv_tokens=held)
        else:
            decode.charge(job, kv_tokens=promised, prefill_tokens=prompt - hoped, decoding_kv_tokens=held)
        job.cached_tokens = min(computes.cache.match(job.arrival.blocks) * BLOCK_TOKENS, prompt - 1)
        job.done_tokens = job.cached_tokens
        job.prefill_left = prompt - job.cached_tokens
        delay_ms = setup.network_ms
        if self._store is not None and job.cached_tokens:
            delay_ms += setup.latency.transfer.ms(job.cached_tokens)
        if job.prefill_id and setup.hand_off is HandOff.DIRECT:
            self.clock.after(delay_ms, self._reserve, job)
        else:
            self.clock.after(delay_ms, self._compute, job, computes)

    def _reserve(self, job: Job) -> None:
        if job.alive:
            self.workers[job.decode_id].engine.reserve(job)

    def _compute(self, job: Job, worker: SimWorker) -> None:
        if job.alive:
            worker.engine.prefill(job)

    # -- what engines say ------------------------------------------------------------------------------------------

    def room_granted(self, engine: Engine, job: Job) -> None:  # noqa: ARG002
        """Let the prefill worker begin."""
        job.room_granted_ms = self.clock.now_ms
        self._compute(job, self.workers[job.prefill_id])

    def prefill_done(self, engine: Engine, job: Job) -> None:
        """Hand the KV cache on, or decode where it is."""
        worker = self.workers[engine.owner]
        if not job.alive:
            engine.release(job)
            return
        recomputed = worker.worker_id == job.decode_id
        if not recomputed or not job.prefill_id:
            worker.prefill_computed(job)
            if job.arrival.blocks:
                worker.cache.store(job.arrival.blocks, self._room_for_cache(worker))
        if recomputed:
            if job.kv_arrived_ms < 0:
                job.kv_arrived_ms = self.clock.now_ms
            engine.join(job)
            return
        transfer_ms = self.setup.latency.transfer.ms(job.arrival.prompt_tokens)
        start_ms = max(self.clock.now_ms, worker.link_free_ms)
        worker.link_free_ms = start_ms + transfer_ms
        if self.setup.hand_off is HandOff.DIRECT:
            self.clock.at(start_ms + transfer_ms, self._kv_arrived, job)
        else:
            self.clock.at(start_ms + transfer_ms, self._written, job)
        if len(self._queue):
            self._dispatch()

    def _kv_arrived(self, job: Job) -> None:
        if not job.alive:
            return
        job.kv_arrived_ms = self.clock.now_ms
        self._leave_prefill(job)
        self.workers[job.decode_id].engine.join(job)

    def _written(self, job: Job) -> None:
        if not job.alive:
            return
        self._leave_prefill(job)
        job.prefill_left = min(self.setup.page_tokens, job.arrival.prompt_tokens)
        job.done_tokens = job.arrival.prompt_tokens - job.prefill_left
        read_ms = self.setup.store_round_ms + self.setup.latency.transfer.ms(job.done_tokens)
        self.clock.after(read_ms, self._compute, job, self.workers[job.decode_id])

    def _leave_prefill(self, job: Job) -> None:
        prefill = self.workers[job.prefill_id]
        prefill.engine.release(job)
        self._released(prefill, job)

    def finished(self, engine: Engine, job: Job) -> None:
        """Count the answer, and use the room."""
        worker = self.workers[engine.owner]
        now_s = self.clock.now_ms / 1000
        self.router.learn(job)
        assert job.ticket is not None
        self._queue.correct(job.ticket, self.router.actual_cost(job))
        if not job.batch:
            job.stage = self.router.stage_to_blame(job)
            self._pilot.ended(now_s, job.number, job.stage, job.arrival.output_tokens)
            if job.feasible:
                self._window.append(met_targets(job, self.setup.target))
        self._released(worker, job)

    def _released(self, worker: SimWorker, job: Job) -> None:
        worker.release(job)
        if not worker.jobs and worker.state is WorkerState.DRAINING:
            (self._gone if worker.leaving else self._switch)(worker)
        if len(self._queue):
            self.clock.at(self.clock.now_ms, self._dispatch)

    def _room_for_cache(self, worker: SimWorker) -> int:
        return self.setup.store_capacity_tokens if self._store is not None else worker.room_for_cache()

    # -- roles -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.clock.after(self._pilot.period_s * 1000, self._tick)
        self.router.growing.look(self.clock.now_ms / 1000)
        move = self._pilot.tick(self.clock.now_ms / 1000, self.sight(), self.router.moments)
        if move is not None:
            self._move(move)

    def sight(self) -> FleetSight:
        """Return what pilots see."""
        return FleetSight(
            split=self.split(),
            moving=any(
                w.state in (WorkerState.DRAINING, WorkerState.SWITCHING) and not w.leaving
                for w in self.workers.values()
            ),
            donors=[
                Donor(
                    worker_id=worker.worker_id,
                    role=worker.role,
                    drain_s=self.workforce.drain_s(worker),
                    cached_tokens=0 if self._store is not None else worker.cache.tokens,
                )
                for worker in self.workers.values()
                if worker.ready
            ],
            waiting_in_time=self._queue.num_in_time,
            num_waiting=len(self._queue)
            + sum(worker.num_queued for worker in self.workers.values() if worker.role is not Role.DECODE),
            waiting_work_ms=self._waiting_work_ms,
            ready=[worker.view() for worker in self.workers.values() if worker.ready],
        )

    def split(self) -> Split:
        """Return the ready workers by role."""
        return self.workforce.split()

    def _move(self, move: Move) -> None:
        worker = self.workers[move.worker_id]
        self.moves.append((self.clock.now_ms / 1000, move))
        if self.setup.hand_off is HandOff.STORE:
            worker.take_role(move.to_role)
            self._dispatch()
            return
        worker.become(WorkerState.DRAINING)
        worker.draining_to = move.to_role
        worker.drain_number += 1
        self.clock.after(self.setup.drain_cap_s * 1000, self._drain_expired, worker, worker.drain_number)
        if not worker.jobs:
            self._switch(worker)

    def _switch(self, worker: SimWorker) -> None:
        worker.become(WorkerState.SWITCHING)
        assert worker.draining_to is not None
        restarts = Role.UNIFIED in (worker.role, worker.draining_to)
        seconds = self.setup.restart_s if restarts else self.setup.switch_s
        self.clock.after(seconds * 1000, self._switched, worker, worker.epoch)

    def _switched(self, worker: SimWorker, epoch: int) -> None:
        if worker.state is not WorkerState.SWITCHING or worker.epoch != epoch or worker.draining_to is None:
            return
        worker.cache.clear()
        worker.take_role(worker.draining_to)
        worker.draining_to = None
        worker.become(WorkerState.READY)
        self._dispatch()

    def _drain_expired(self, worker: SimWorker, number: int) -> None:
        if worker.state is WorkerState.DRAINING and worker.drain_number == number:
            worker.become(WorkerState.READY)
            worker.draining_to = None
            self.cancelled_moves += 1
            self._dispatch()

    # -- faults ----------------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        worker = self.workers[failure.worker_id]
        worker.become(WorkerState.UNHEALTHY)
        worker.draining_to = None
        worker.epoch += 1
        self._lose(worker)
        self.clock.after(failure.down_s * 1000, self._recover, worker)

    def _lose(self, worker: SimWorker) -> None:
        """Lose what runs on a worker."""
        lost = list(worker.jobs)
        worker.engine.kill()
        worker.release_all()
        if self._store is None:
            worker.cache.clear()
        for job in lost:
            job.alive = False
            for other_id in {job.prefill_id, job.decode_id} - {"", worker.worker_id}:
                other = self.workers.get(other_id)
                if other is not None and job in other.jobs:
                    other.engine.abort(job)
                    self._released(other, job)
            if job.first_token_ms < 0 and job.attempt < _MAX_ATTEMPTS:
                self._enqueue(Job(job.arrival, job.number, attempt=job.attempt + 1))
            else:
                job.stage = Stage.LOST
                if not job.batch:
                    self._pilot.ended(self.clock.now_ms / 1000, job.number, Stage.LOST, None)
                    self._window.append(False)

    def _recover(self, worker: SimWorker) -> None:
        if worker.state is WorkerState.STOPPED:
            return
        worker.become(WorkerState.READY)
        self._dispatch()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        self.clock.after(self.setup.sample_s * 1000, self._sample)
        self.samples.append(
            Sample(
                at_s=self.clock.now_ms / 1000,
                split=self.split(),
                num_waiting=len(self._queue),
                waiting_work_ms=self._waiting_work_ms,
                kv_used=self.workforce.kv_used,
                ended=len(self._window),
                met=sum(self._window),
            )
        )
        self._window.clear()
