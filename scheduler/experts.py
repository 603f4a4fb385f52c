"""How the phases of a mixture-of-experts pool hit its experts: each role's imbalance, and how far apart they are.

A worker tells its hits of the last seconds (`ExpertHits`). They are summed by the worker's role at that moment, earlier
ones with less and less weight, so that a role's sum follows its traffic.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from contracts.experts import distance, imbalance
from contracts.lifecycle import Role
from contracts.v1 import worker_pb2 as pb
from contracts.wire import unpack_ids
from scheduler.worker import Worker

log = structlog.get_logger()

KEPT: Final = 0.9
"""Weight of what was known, at each report."""


class Experts:
    """The hits of one pool."""

    def __init__(self) -> None:
        self._num_experts = 0
        self._hits: dict[Role, Sequence[float]] = {}

    def heard(self, worker: Worker, report: pb.ExpertHits) -> None:
        """Add what a worker tells."""
        new = unpack_ids(report.tokens)
        if not report.experts or not new or len(new) % report.experts:
            log.warning("bad_expert_hits", worker_id=worker.worker_id, experts=report.experts, hits=len(new))
            return
        if report.experts != self._num_experts or any(len(hits) != len(new) for hits in self._hits.values()):
            self._num_experts, self._hits = report.experts, {}  # another model
        before = self._hits.get(worker.role, [0.0] * len(new))
        self._hits[worker.role] = [KEPT * old + hits for old, hits in zip(before, new, strict=True)]

    @property
    def imbalances(self) -> Mapping[Role, float]:
        """The busiest expert's hits over the mean, by role; 1.0 = all alike."""
        return {role: imbalance(hits, self._num_experts) for role, hits in self._hits.items()}

    @property
    def distance(self) -> float | None:
        """How differently prefill and decode hit the experts, 0 to 1; None before both have told."""
        prefill, decode = self._hits.get(Role.PREFILL), self._hits.get(Role.DECODE)
        if prefill is None or decode is None:
            return None
        return distance(prefill, decode, self._num_experts)
