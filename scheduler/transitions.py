"""Counts the changes of workers' states, as the leader sees them."""

from collections.abc import Iterable

from contracts.lifecycle import WorkerState
from observability.metrics import Instruments
from scheduler.worker import Standing, Worker

GONE = "gone"


def shown_state(worker: Worker) -> str:
    """Return the worker's own state, or how we stand with it when that is worse."""
    if worker.standing is not Standing.UP:
        return worker.standing.value
    if not worker.leased:
        return WorkerState.STOPPED.value
    return worker.state.value


class Transitions:
    """Compares two looks; what changes and changes back between them is not counted."""

    def __init__(self, pool: str, instruments: Instruments) -> None:
        self._pool = pool
        self._instruments = instruments
        self._last: dict[str, tuple[str, str]] = {}

    def look(self, workers: Iterable[Worker]) -> None:
        """Count what has changed since the last look. A worker's first state is no change."""
        now = {worker.worker_id: (worker.role.value, shown_state(worker)) for worker in workers}
        for worker_id, (role, before) in self._last.items():
            role_now, after = now.get(worker_id, (role, GONE))
            if after != before:
                labels = {"pool": self._pool, "role": role_now, "from": before, "to": after}
                self._instruments.worker_transitions.add(1, labels)
        self._last = now
