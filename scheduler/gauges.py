"""What the scheduler's gauges show when they are scraped."""

import time
from collections import Counter
from collections.abc import Iterable

from contracts.lifecycle import Role
from observability.metrics import Instruments
from scheduler.pool import PoolScheduler
from scheduler.transitions import shown_state

Observations = Iterable[tuple[float, dict[str, str]]]


class Gauges:
    """Reads the pools of one process, whichever there are when it is asked."""

    def __init__(self, pools: Iterable[PoolScheduler]) -> None:
        self._pools = pools

    def register(self, instruments: Instruments) -> None:
        """Declare every gauge of the scheduler."""
        instruments.observe("pdgate_leader", self.leader)
        instruments.observe("pdgate_inbox_pending", self.inbox_pending)
        instruments.observe("pdgate_workers", self.workers)
        instruments.observe("pdgate_worker_pairs", self.pairs)
        instruments.observe("pdgate_prefill_pool_queue_depth", self.prefill_queue)
        instruments.observe("pdgate_decode_pool_utilization", self.decode_use)
        instruments.observe("pdgate_pd_ratio_actual", self.ratio_actual)
        instruments.observe("pdgate_pd_ratio_config", self.ratio_config)
        instruments.observe("pdgate_workers_desired", self.workers_desired)
        instruments.observe("pdgate_workers_cost", self.workers_cost)
        instruments.observe("pdgate_expert_imbalance", self.expert_imbalance)
        instruments.observe("pdgate_expert_distance", self.expert_distance)
        instruments.observe("pdgate_degrade_step", self.degrade_step)
        instruments.observe("pdgate_queue_age_seconds", self.queue_age)

    def leader(self) -> Observations:
        """Yield 1 or 0 per pool."""
        return [(float(pool.lease.held), {"pool": pool.pool}) for pool in self._pools]

    def inbox_pending(self) -> Observations:
        """Yield the pending entries per pool that this process leads."""
        return [(p.term.num_pending, {"pool": p.pool}) for p in self._pools if p.term is not None]

    def workers(self) -> Observations:
        """Yield the number of workers per role and state."""
        counts = Counter(
            (pool.pool, w.role.value, shown_state(w)) for pool in self._pools for w in pool.registry.workers()
        )
        return [(n, {"pool": pool, "role": role, "state": state}) for (pool, role, state), n in counts.items()]

    def pairs(self) -> Observations:
        """Yield the number of pairs of a prefill and a decode worker by state, or by what keeps them apart."""
        return [
            (number, {"pool": pool.pool, "state": state})
            for pool in self._pools
            for state, number in pool.registry.pairs.counts().items()
        ]

    def prefill_queue(self) -> Observations:
        """Yield how many requests wait for a worker or for the end of their prefill."""
        for pool in self._pools:
            if pool.term is None:
                continue
            computing = sum(w.num_computing for w in pool.registry.workers())
            yield len(pool.term.waiting) + computing, {"pool": pool.pool}

    def decode_use(self) -> Observations:
        """Yield the share of KV room in use on ready workers that decode."""
        for pool in self._pools:
            workers = [w for w in pool.registry.workers() if w.ready and w.role is not Role.PREFILL]
            capacity = sum(w.kv_capacity_tokens for w in workers)
            if capacity:
                yield min(1.0, sum(w.kv_tokens for w in workers) / capacity), {"pool": pool.pool}

    def ratio_actual(self) -> Observations:
        """Yield the PD ratio of ready workers."""
        return self._ratio(ready_only=True)

    def ratio_config(self) -> Observations:
        """Yield the PD ratio that the controller aims at; that of all registered workers before it said one."""
        for pool in self._pools:
            last = pool.term.helm.controller.last if pool.term is not None else None
            if last is not None and last.target.decode:
                yield last.target.prefill / last.target.decode, {"pool": pool.pool}
            else:
                yield from self._ratio_of(pool, ready_only=False)

    def workers_desired(self) -> Observations:
        """Yield the workers that the autoscaler asks for, per role."""
        for pool in self._pools:
            autoscaler = pool.term.helm.autoscaler if pool.term is not None else None
            if autoscaler is not None and autoscaler.desired is not None:
                for role in Role:
                    yield getattr(autoscaler.desired, role.value), {"pool": pool.pool, "role": role.value}

    def workers_cost(self) -> Observations:
        """Yield what the workers that were started cost per hour."""
        for pool in self._pools:
            autoscaler = pool.term.helm.autoscaler if pool.term is not None else None
            if autoscaler is not None:
                yield autoscaler.cost_per_hour, {"pool": pool.pool}

    def expert_imbalance(self) -> Observations:
        """Yield how unevenly each role's tokens hit the experts of a mixture."""
        for pool in self._pools:
            for role, value in pool.memory.experts.imbalances.items():
                yield value, {"pool": pool.pool, "role": role.value}

    def expert_distance(self) -> Observations:
        """Yield how differently prefill and decode hit the experts."""
        for pool in self._pools:
            if (value := pool.memory.experts.distance) is not None:
                yield value, {"pool": pool.pool}

    def degrade_step(self) -> Observations:
        """Yield where the degrade ladder of each pool that we lead stands."""
        return [(float(p.term.helm.ladder.rung), {"pool": p.pool}) for p in self._pools if p.term is not None]

    def queue_age(self) -> Observations:
        """Yield the age of the oldest waiting request per tier."""
        now_ms = time.monotonic() * 1000
        for pool in self._pools:
            if pool.term is None:
                continue
            oldest_ms: dict[str, float] = {}
            for request in pool.term.waiting:
                oldest_ms.setdefault(request.tier, request.pushed_ms)
            for tier, pushed_ms in oldest_ms.items():
                yield (now_ms - pushed_ms) / 1000, {"pool": pool.pool, "tier": tier}

    def _ratio(self, *, ready_only: bool) -> Observations:
        for pool in self._pools:
            yield from self._ratio_of(pool, ready_only=ready_only)

    def _ratio_of(self, pool: PoolScheduler, *, ready_only: bool) -> Observations:
        roles = Counter(w.role for w in pool.registry.workers() if w.ready or (w.leased and not ready_only))
        if roles[Role.DECODE]:
            yield roles[Role.PREFILL] / roles[Role.DECODE], {"pool": pool.pool}
