"""Rivals of the ratio controller, for comparison only: a queue threshold, and a load planner.

The planner is our own reading of the rules that a replica planner publishes for its latency-target load loop, not its
code: where it would start and stop replicas on a fixed budget of workers, it flips roles here, one every 5 s.
"""

from collections.abc import Sequence

from contracts.lifecycle import Role
from contracts.perf import LatencyModel
from contracts.slo import SloTarget
from scheduler.policy.cluster import WorkerView
from scheduler.policy.demand import DemandSample, Forecast
from scheduler.policy.ratio import Move
from scheduler.simulator.pilot import FleetSight, StaticPilot


class ThresholdPilot(StaticPilot):
    """The usual rule: more than `queue` waiting -> one decode worker to prefill; none for `idle_s` -> one back."""

    def __init__(self, *, queue: int = 8, idle_s: float = 60.0) -> None:
        self._queue = queue
        self._idle_s = idle_s
        self._empty_since_s: float | None = None

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:  # noqa: ARG002
        """Compare the queue with the threshold."""
        if sight.num_waiting:
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = now_s
        if sight.moving:
            return None
        if sight.num_waiting > self._queue and sight.split.decode > 1:
            return _move(sight, Role.DECODE, Role.PREFILL)
        if self._empty_since_s is not None and now_s - self._empty_since_s >= self._idle_s and sight.split.prefill > 1:
            self._empty_since_s = now_s
            return _move(sight, Role.PREFILL, Role.DECODE)
        return None


class PlannerPilot(StaticPilot):
    """Scales each pool by one when all its workers are predicted to miss, or would keep the target with one less.

    1. Prefill: predicted TTFT of a worker = queued work + the mean prompt's own. Up if it exceeds the target on all
       workers; down if the queue on one worker less stays within `sensitivity` of what the target leaves.
    2. Decode: predicted ITL = a step with what is scheduled and queued. Up and down alike.
    3. The two wishes are scaled to the fixed number of workers, and the nearest split is approached.
    """

    def __init__(self, latency: LatencyModel, target: SloTarget, *, sensitivity: float = 0.8) -> None:
        self._latency = latency
        self._ttft_ms = target.ttft_ms if target.ttft_ms is not None else float("inf")
        self._tpot_ms = target.tpot_ms if target.tpot_ms is not None else float("inf")
        self._sensitivity = sensitivity
        self._own_ms = 0.0  # mean computing time of a prompt, exponentially weighted

    def arrived(self, now_s: float, request: int, sample: DemandSample) -> None:  # noqa: ARG002
        """Average the prompts."""
        self._own_ms += (sample.prefill_ms - self._own_ms) * (0.02 if self._own_ms else 1.0)

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:  # noqa: ARG002
        """Compare predictions with the targets."""
        prefills = [worker for worker in sight.ready if worker.role is Role.PREFILL]
        decodes = [worker for worker in sight.ready if worker.role is Role.DECODE]
        if sight.moving or not prefills or not decodes:
            return None
        wished_prefill = max(1, len(prefills) + self._more_prefill(prefills, sight.waiting_work_ms))
        wished_decode = max(1, len(decodes) + self._more_decode(decodes))
        total = len(prefills) + len(decodes)
        fitting = min(max(1, round(total * wished_prefill / (wished_prefill + wished_decode))), total - 1)
        if fitting > len(prefills):
            return _move(sight, Role.DECODE, Role.PREFILL)
        if fitting < len(prefills):
            return _move(sight, Role.PREFILL, Role.DECODE)
        return None

    def _more_prefill(self, prefills: Sequence[WorkerView], waiting_ms: float) -> int:
        per_token_ms = self._latency.prefill.per_token_ms
        queues_ms = [waiting_ms / len(prefills) + w.queued_prefill_tokens * per_token_ms for w in prefills]
        if all(queue_ms + self._own_ms > self._ttft_ms for queue_ms in queues_ms):
            return 1
        count = len(prefills)
        budget_ms = self._sensitivity * (self._ttft_ms - self._own_ms)
        fewer = count > 1 and all(queue_ms * count / (count - 1) <= budget_ms for queue_ms in queues_ms)
        return -1 if fewer else 0

    def _more_decode(self, decodes: Sequence[WorkerView]) -> int:
        cost, count = self._latency.decode, len(decodes)
        if all(cost.step_ms(w.num_requests, w.kv_tokens) > self._tpot_ms for w in decodes):
            return 1
        grown = count / (count - 1) if count > 1 else float("inf")
        budget_ms = self._sensitivity * self._tpot_ms
        if count > 1 and all(
            cost.step_ms(int(w.num_requests * grown), int(w.kv_tokens * grown)) <= budget_ms
            and w.kv_tokens * grown <= w.kv_capacity_tokens
            for w in decodes
        ):
            return -1
        return 0


def _move(sight: FleetSight, from_role: Role, to_role: Role) -> Move | None:
    donors = [donor for donor in sight.donors if donor.role is from_role]
    donor = min(donors, key=lambda d: (d.drain_s, d.worker_id), default=None)
    return Move(worker_id=donor.worker_id, from_role=from_role, to_role=to_role) if donor else None
