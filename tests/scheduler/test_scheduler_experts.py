"""What workers tell of their experts, by role."""

import pytest
from test_scheduler_prefixes import worker

from contracts.lifecycle import Role
from contracts.v1 import worker_pb2 as pb
from contracts.wire import pack_ids
from scheduler.experts import KEPT, Experts
from workers.expert_table import ExpertTable


def told(*hits: int, experts: int = 2) -> pb.ExpertHits:
    return pb.ExpertHits(experts=experts, tokens=pack_ids(hits))


def test_roles_are_apart_and_their_distance_is_known_when_both_have_told():
    experts = Experts()
    experts.heard(worker("p", role=Role.PREFILL), told(3, 1))
    assert (experts.imbalances, experts.distance) == ({Role.PREFILL: 1.5}, None)
    experts.heard(worker("d", role=Role.DECODE), told(0, 8))
    assert experts.imbalances == {Role.PREFILL: 1.5, Role.DECODE: 2.0}
    assert experts.distance == 0.75


def test_what_was_told_earlier_weighs_less():
    experts = Experts()
    experts.heard(worker("a", role=Role.DECODE), told(10, 0))
    experts.heard(worker("b", role=Role.DECODE), told(0, 10))
    assert experts.imbalances[Role.DECODE] == pytest.approx(2 / (1 + KEPT))


def test_another_model_begins_afresh_and_nonsense_changes_nothing():
    experts = Experts()
    experts.heard(worker("a", role=Role.DECODE), told(10, 0))
    experts.heard(worker("a", role=Role.DECODE), told(1, 2, 3))
    experts.heard(worker("a", role=Role.DECODE), told(experts=0))
    assert experts.imbalances == {Role.DECODE: 2.0}
    experts.heard(worker("a", role=Role.PREFILL), told(1, 1, 1, 1, experts=4))
    assert experts.imbalances == {Role.PREFILL: 1.0}


def test_a_worker_tells_what_has_gathered_once():
    table = ExpertTable()
    assert table.take() is None
    table.add(2, [1, 2])
    table.add(2, [3, 4])
    assert table.take() == told(4, 6)
    assert table.take() is None
    table.add(2, [1, 0])
    assert table.take() == told(1, 0)
