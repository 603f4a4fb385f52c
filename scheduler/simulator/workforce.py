"""The workers of a simulated pool: who is there, who comes, who has gone, and what they cost in hours."""

from contracts.lifecycle import HandOff, Role, WorkerState
from scheduler.policy.prefix import PrefixIndex
from scheduler.policy.queueing import Split
from scheduler.simulator.cache import BlockCache
from scheduler.simulator.clock import Clock
from scheduler.simulator.engine import Engine, EngineEvents
from scheduler.simulator.setup import Setup
from scheduler.simulator.worker import SimWorker


class Workforce:
    """Makes workers and keeps those that have not gone."""

    def __init__(self, setup: Setup, clock: Clock, index: PrefixIndex, events: EngineEvents) -> None:
        self._setup = setup
        self._clock = clock
        self._index = index
        self._events = events
        self._num_made = 0
        self._began_ms: dict[str, float] = {}
        self._gone_ms = 0.0
        self.num_retracted = 0
        """Requests that engines which have gone put back."""
        self.store = BlockCache("store", index) if setup.hand_off is HandOff.STORE else None
        self.by_id: dict[str, SimWorker] = {}

    def add(self, role: Role, *, booting: bool = False) -> SimWorker:
        """Make a worker; one that is booting has to become READY."""
        setup = self._setup
        worker_id = f"w{self._num_made}"
        self._num_made += 1
        engine = Engine(
            worker_id, latency=setup.latency, traits=setup.engine_traits(), clock=self._clock, events=self._events
        )
        cache = self.store or BlockCache(worker_id, self._index)
        worker = SimWorker(worker_id, role, hand_off=setup.hand_off, engine=engine, cache=cache, booting=booting)
        self.by_id[worker_id] = worker
        self._began_ms[worker_id] = self._clock.now_ms
        return worker

    def remove(self, worker: SimWorker) -> None:
        """Forget a worker that runs nothing any more."""
        worker.become(WorkerState.STOPPED)
        if self.store is None:
            worker.cache.clear()
        del self.by_id[worker.worker_id]
        self.num_retracted += worker.engine.num_retracted
        self._gone_ms += self._clock.now_ms - self._began_ms.pop(worker.worker_id)

    @property
    def hours(self) -> float:
        """Worker-hours so far, from the asking to the going."""
        there_ms = sum(self._clock.now_ms - began_ms for began_ms in self._began_ms.values())
        return (self._gone_ms + there_ms) / 3_600_000

    @property
    def kv_used(self) -> float:
        """KV tokens in use on workers that decode, over what they have room for, 0 to 1."""
        decodes = [w for w in self.by_id.values() if w.role is not Role.PREFILL]
        capacity = sum(w.engine.latency.kv_capacity_tokens for w in decodes)
        return sum(w.engine.kv_used_tokens for w in decodes) / capacity if capacity else 0.0

    def split(self) -> Split:
        """Return the ready workers by role."""
        counts = dict.fromkeys(Role, 0)
        for worker in self.by_id.values():
            if worker.ready:
                counts[worker.role] += 1
        return Split(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], unified=counts[Role.UNIFIED])

    def drain_s(self, worker: SimWorker) -> float:
        """Return the expected time until a worker is empty, from what production knows too."""
        decode, prefill = self._setup.policy_latency.decode, self._setup.policy_latency.prefill
        step_ms = decode.step_ms(*worker.view().batch)
        longest_ms = worker.queued_prefill_tokens * prefill.per_token_ms
        for job in worker.jobs:
            if job.decode_id == worker.worker_id:
                since_ms = self._clock.now_ms - job.placed_ms
                longest_ms = max(longest_ms, job.generous_output * step_ms - since_ms, 0.3 * since_ms)
        return longest_ms / 1000
