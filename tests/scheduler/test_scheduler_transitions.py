"""Changes of workers' states are counted once, in the direction they went."""

from types import SimpleNamespace

from contracts.lifecycle import Role, WorkerState
from observability.metrics import Instruments
from scheduler.transitions import Transitions
from scheduler.worker import Standing


def worker(name, state=WorkerState.READY, standing=Standing.UP, leased=True):
    return SimpleNamespace(worker_id=name, role=Role.DECODE, state=state, standing=standing, leased=leased)


def counted(instruments):
    families = {family.name: family for family in instruments.registry.collect()}
    samples = families["pdgate_worker_transitions"].samples
    return {(s.labels["from"], s.labels["to"]): s.value for s in samples if s.name.endswith("_total")}


def test_a_change_is_counted_once_and_a_first_look_is_none():
    instruments = Instruments()
    transitions = Transitions("tiny", instruments)
    transitions.look([worker("a"), worker("b")])
    assert counted(instruments) == {}
    for _ in range(2):
        transitions.look([worker("a", standing=Standing.DEAD), worker("b", state=WorkerState.DRAINING)])
    transitions.look([worker("b", leased=False)])
    assert counted(instruments) == {
        ("ready", Standing.DEAD.value): 1,
        ("ready", "draining"): 1,
        (Standing.DEAD.value, "gone"): 1,
        ("draining", "stopped"): 1,
    }
