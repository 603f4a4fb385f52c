"""The degrade ladder of one pool in production: strain from queue and workers, and what a rung does with a request."""

import time
from collections.abc import Callable

import structlog

from contracts.lifecycle import Role
from contracts.perf import LatencyModel
from scheduler.book import Request
from scheduler.decision_log import DecisionLog
from scheduler.policy.cluster import ClusterView
from scheduler.policy.ladder import (
    Asking,
    Ground,
    LadderLimits,
    LadderState,
    Rung,
    Strain,
    Way,
    climb,
    passage,
)
from scheduler.policy.queueing import Split
from scheduler.profile import PoolProfile
from scheduler.registry import WorkerRegistry
from scheduler.waiting import WaitingQueue

log = structlog.get_logger()

_WAIT_LIMIT_S = 10.0
"""For pools whose targets do not bound the wait."""


class Ladder:
    """Climbs with each tick of the scheduler. `rung` is what metrics and readers see."""

    def __init__(
        self,
        pool: str,
        *,
        profile: PoolProfile,
        registry: WorkerRegistry,
        waiting: WaitingQueue,
        latency: Callable[[], LatencyModel],
        decisions: DecisionLog,
        limits: LadderLimits | None = None,
        wanted: Callable[[], Split | None] = lambda: None,
        grace_s: float = 5.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted` is the mix that an autoscaler asks for; None = nobody scales, and workers that are away are lost."""
        self._pool = pool
        self._profile = profile
        self._registry = registry
        self._waiting = waiting
        self._latency = latency
        self._decisions = decisions
        self._limits = limits or LadderLimits()
        self._wanted = wanted
        self._grace_s = grace_s
        self._now_s = now_s
        self._state = LadderState()
        self._began_s = now_s()
        self._had_pairs = False

    @property
    def rung(self) -> Rung:
        """Where the ladder stands."""
        return self._state.rung

    @property
    def legacy(self) -> Rung:
        """The rung that overload led to: what workers are lost, the next leader sees itself."""
        return self._state.rung if self._state.before_loss is None else self._state.before_loss

    def restore(self, rung: Rung) -> None:
        """Begin on a former leader's rung: from there it comes down as always, if all is well."""
        self._state = LadderState(rung=rung)

    def tick(self) -> bool:
        """Look at the strain and return whether the rung changed.

        In the first seconds of a term workers are still being found.
        """
        now_s, cluster = self._now_s(), self._registry.cluster()
        pairs = _pairs(cluster)
        self._had_pairs = self._had_pairs or pairs
        serves = pairs or _ready(cluster, Role.UNIFIED)
        if not serves and (now_s - self._began_s < self._grace_s or self._wanted() is not None):
            return False  # they are being found; or asleep or on their way, which is no emergency
        self._state, step = climb(self._state, self._strain(cluster, now_s), self._limits, now_s)
        if step.moved:
            self._decisions.climbed(step)
            write = log.warning if step.after > step.before else log.info
            write("degraded", pool=self._pool, before=step.before.label, after=step.after.label, why=step.why.value)
        return step.moved

    def way(self, request: Request, cluster: ClusterView) -> Way:
        """Return what becomes of a request at the moment."""
        if self._state.rung is Rung.NORMAL:
            return Way.RUN
        sized = request.sized
        assert sized is not None
        unified = [w for w in cluster.unified if w.ready]
        asking = Asking(tier=request.tier, uncached_tokens=sized.uncached_tokens)
        ground = Ground(
            pairs=_pairs(cluster),
            wants_pairs=self._wants_pairs(cluster),
            unified=len(unified),
            unified_queued_tokens=sum(w.queued_prefill_tokens for w in unified),
            local_model=False,
        )
        if not (ground.pairs or ground.unified):
            return Way.RUN  # nobody can: placement says so, and admission how long to wait for a worker
        return passage(self._state.rung, asking, ground, self._limits)

    def _strain(self, cluster: ClusterView, now_s: float) -> Strain:
        target = self._profile.target
        wait_limit_s = target.ttft_ms / 1000 if target.ttft_ms is not None else _WAIT_LIMIT_S
        pairs = _pairs(cluster)
        unified = _ready(cluster, Role.UNIFIED)
        computing = [w for w in (*cluster.unified, *(cluster.prefill if pairs else ())) if w.ready]
        per_token_ms = self._latency().prefill.per_token_ms
        queued_ms = self._waiting.work_ms + sum(w.queued_prefill_tokens for w in computing) * per_token_ms
        return Strain(
            pairs=pairs,
            wants_pairs=self._wants_pairs(cluster),
            unified=unified,
            load=queued_ms / (1000 * wait_limit_s * len(computing)) if computing else 0.0,
            oldest_wait_s=self._waiting.oldest_in_time_ms(now_s * 1000) / 1000,
            wait_limit_s=wait_limit_s,
        )

    def _wants_pairs(self, cluster: ClusterView) -> bool:
        both = bool(cluster.prefill and cluster.decode)
        wanted = self._wanted()
        if wanted is not None:  # pairs come and go on purpose: only those that should be there are missed
            return both and bool(wanted.prefill and wanted.decode)
        return self._had_pairs or both


def _ready(cluster: ClusterView, role: Role) -> int:
    return sum(1 for worker in getattr(cluster, role.value) if worker.ready)


def _pairs(cluster: ClusterView) -> bool:
    return bool(_ready(cluster, Role.PREFILL) and _ready(cluster, Role.DECODE))
