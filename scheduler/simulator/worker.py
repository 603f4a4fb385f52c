"""One simulated worker: an engine, a role, what the scheduler has charged to it, and its prefix cache."""

from contracts.lifecycle import HandOff, Role, WorkerState, move_worker
from scheduler.policy.cluster import Compatibility, WorkerView
from scheduler.simulator.cache import BlockCache
from scheduler.simulator.engine import Engine
from scheduler.simulator.job import Job

_SAME = Compatibility(model_revision="simulated", kv_dtype="auto", page_size=64, transfer_backend="simulated")
_CONTEXT_TOKENS = 400_000


class SimWorker:
    """Accounting as in production: what was placed counts until its end, whatever the engine says."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        *,
        hand_off: HandOff,
        engine: Engine,
        cache: BlockCache,
        booting: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.state = WorkerState.STARTING if booting else WorkerState.READY
        self.leaving = False
        """It drains to be taken away."""
        self.epoch = 1
        self.engine = engine
        self.cache = cache
        self.jobs: dict[Job, int] = {}  # -> KV tokens charged
        self.link_free_ms = 0.0
        self.draining_to: Role | None = None
        self.drain_number = 0
        self._hand_offs = frozenset({hand_off})
        self._charged_kv = 0
        self._decoding: dict[Job, int] = {}  # -> KV tokens half-way through its answer
        self._decoding_kv = 0
        self._prefills: dict[Job, int] = {}
        self._queued_prefill = 0
        self._view: WorkerView | None = None

    @property
    def ready(self) -> bool:
        """Whether new requests may be placed here."""
        return self.state is WorkerState.READY

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed."""
        return self._queued_prefill

    @property
    def num_queued(self) -> int:
        """Prompts accepted and not yet computed."""
        return len(self._prefills)

    def become(self, state: WorkerState) -> None:
        """Change the state, as the lifecycle allows."""
        self.state = move_worker(self.state, state)
        self._view = None

    def take_role(self, role: Role) -> None:
        """Change the role."""
        self.role = role
        self.epoch += 1
        self._view = None

    def view(self) -> WorkerView:
        """Return the worker as policy sees it."""
        view = self._view
        if view is None:
            latency = self.engine.latency
            view = self._view = WorkerView(
                worker_id=self.worker_id,
                epoch=self.epoch,
                role=self.role,
                ready=self.state is WorkerState.READY,
                pairs_with=_SAME,
                hand_offs=self._hand_offs,
                max_running=latency.max_running,
                context_tokens=_CONTEXT_TOKENS,
                kv_capacity_tokens=latency.kv_capacity_tokens,
                num_requests=len(self.jobs),
                kv_tokens=max(self._charged_kv, self.engine.kv_used_tokens),
                queued_prefill_tokens=self._queued_prefill,
                num_decoding=len(self._decoding),
                decoding_kv_tokens=max(self._decoding_kv, self.engine.batch_kv_tokens),
            )
        return view

    def charge(self, job: Job, *, kv_tokens: int, prefill_tokens: int, decoding_kv_tokens: int = 0) -> None:
        """Count a request that is placed here; it decodes here if it holds KV tokens half-way through its answer."""
        self.jobs[job] = kv_tokens
        self._charged_kv += kv_tokens
        if decoding_kv_tokens:
            self._decoding[job] = decoding_kv_tokens
            self._decoding_kv += decoding_kv_tokens
        if prefill_tokens:
            self._prefills[job] = prefill_tokens
            self._queued_prefill += prefill_tokens
        self._view = None

    def prefill_computed(self, job: Job) -> None:
        """Count a prompt as computed."""
        self._queued_prefill -= self._prefills.pop(job, 0)
        self._view = None

    def release(self, job: Job) -> None:
        """Stop counting a request."""
        kv_tokens = self.jobs.pop(job, None)
        if kv_tokens is not None:
            self._charged_kv -= kv_tokens
            self._decoding_kv -= self._decoding.pop(job, 0)
            self.prefill_computed(job)

    def release_all(self) -> None:
        """Stop counting everything: the worker died."""
        self.jobs.clear()
        self._prefills.clear()
        self._decoding.clear()
        self._charged_kv = self._decoding_kv = self._queued_prefill = 0
        self._view = None

    def room_for_cache(self) -> int:
        """Return the KV tokens that running work leaves to the prefix cache."""
        return self.engine.latency.kv_capacity_tokens - self.engine.kv_used_tokens
