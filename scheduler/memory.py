"""What one pool's scheduler has learned, leading or standing by: it outlives the term, not the process."""

from collections.abc import Callable

from contracts.v1 import worker_pb2 as pb
from scheduler.costs import Costs
from scheduler.experts import Experts
from scheduler.prefixes import Prefixes
from scheduler.profile import PoolProfile
from scheduler.router import Router
from scheduler.worker import Worker

Send = Callable[[Worker, pb.ControlCommand], bool]


class PoolMemory:
    """Costs of workers, prefixes in their caches, experts that were hit, lengths of answers. Hears to the registry."""

    def __init__(self, profile: PoolProfile, *, send: Send) -> None:
        self.costs = Costs(profile)
        self.prefixes = Prefixes()
        self.experts = Experts()
        self.router = Router(profile, prefixes=self.prefixes, latency=self.costs.latency, costs_known=self.costs.known)
        self._send = send

    def registered(self, worker: Worker) -> None:
        """Take what a worker says of itself."""
        self.costs.registered(worker)
        if not self.router.revision:
            self.router.revision = worker.registration.model_revision

    def reported(self, worker: Worker, kind: str | None, report: pb.ControlReport) -> None:
        """Learn from a report."""
        match kind:
            case "status":
                if report.status.worker_epoch == worker.epoch:
                    self.costs.status(worker, report.status)
            case "prefill_done":
                self.costs.prompt_computed(report.prefill_done)
            case "kv_events":
                if not self.prefixes.heard(worker, report.kv_events):
                    self._send(worker, pb.ControlCommand(kv_resync=pb.KvResync()))
            case "expert_hits":
                self.experts.heard(worker, report.expert_hits)
            case _:
                pass

    def lost(self, worker: Worker) -> None:
        """Forget what died with a worker."""
        self.costs.forget(worker.worker_id)
        self.prefixes.gone(worker.worker_id)
