"""The pool's series (contracts.series): every period one point of what users got and what the pool did."""

import time
from collections.abc import Callable

from contracts.lifecycle import Role
from contracts.series import Point
from scheduler.controller import RatioController
from scheduler.costs import Costs
from scheduler.degrade import Ladder
from scheduler.policy.headcount import ScalePlan
from scheduler.registry import WorkerRegistry
from scheduler.waiting import WaitingQueue
from scheduler.window import SloWindow


class Course:
    """Makes the points of one term."""

    def __init__(
        self,
        *,
        registry: WorkerRegistry,
        waiting: WaitingQueue,
        window: SloWindow,
        controller: RatioController,
        ladder: Ladder,
        costs: Costs,
        plan: Callable[[], ScalePlan | None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
        now_unix_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._registry = registry
        self._waiting = waiting
        self._window = window
        self._controller = controller
        self._ladder = ladder
        self._costs = costs
        self._plan = plan
        self._now_s = now_s
        self._now_unix_ms = now_unix_ms

    def point(self) -> Point:
        """Return what happened since the last point, and how the pool stands."""
        ready = [worker for worker in self._registry.workers() if worker.ready]
        decodes = [worker for worker in ready if worker.role is not Role.PREFILL]
        capacity = sum(worker.kv_capacity_tokens for worker in decodes)
        latency = self._costs.latency() if self._costs.known() else None
        step_ms = latency.decode.step_ms(1, 1) if latency is not None else None
        hand_off_ms = latency.transfer.ms(1) if latency is not None and len(decodes) < len(ready) else 0.0
        plan = self._plan()
        span, last, demand = self._window.take_span(), self._controller.last, self._controller.demand
        return Point(
            at_unix_ms=self._now_unix_ms(),
            prefill=sum(1 for worker in ready if worker.role is Role.PREFILL),
            decode=sum(1 for worker in ready if worker.role is Role.DECODE),
            unified=sum(1 for worker in ready if worker.role is Role.UNIFIED),
            target=str(last.target) if last is not None else "",
            why=last.why.value if last is not None else "",
            mode=self._controller.steering.mode,
            rung=self._ladder.rung.label,
            met=span.met,
            missed=span.missed,
            structural=span.structural,
            refused=span.refused,
            by_stage=span.by_stage,
            num_waiting=len(self._waiting),
            oldest_wait_s=self._waiting.oldest_in_time_ms(self._now_s() * 1000) / 1000,
            queued_prefill_tokens=sum(worker.queued_prefill_tokens for worker in ready),
            decode_use=min(1.0, sum(worker.kv_tokens for worker in decodes) / capacity) if capacity else 0.0,
            num_running=sum(worker.num_requests for worker in ready),
            rate_rps=demand.rate_rps if demand is not None else None,
            goodput_rps=last.now.goodput_rps if last is not None and last.now is not None else None,
            pairs=self._registry.pairs.counts(),
            idle_step_ms=step_ms,
            idle_first_ms=latency.prefill.ms(1) + hand_off_ms + (step_ms or 0.0) if latency is not None else None,
            flips=self._controller.take_flips(),
            desired=str(plan.desired) if plan is not None else "",
            scale_why=plan.why.value if plan is not None else "",
        )
