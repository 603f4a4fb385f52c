"""What the scheduler learns of decode steps from what workers say ten times a second."""

import pytest
from rig import FAST
from test_scheduler_worker import status, worker

from contracts.v1 import worker_pb2 as pb
from scheduler.costs import Costs
from scheduler.profile import PoolProfile
from scheduler.worker import ChargeKey, Worker

STEP_MS = 10


def named(name: str) -> ChargeKey:
    return name.encode(), 1, 0


def said(costs: Costs, of: Worker, at_ms: int, tokens: int, running: int) -> None:
    costs.status(
        of,
        status(role=pb.ROLE_DECODE, sent_unix_ms=at_ms, tokens_produced=tokens, num_running=running, kv_used_tokens=50),
    )


@pytest.fixture
def costs() -> Costs:
    return Costs(PoolProfile(model="tiny", latency=FAST))


def test_steps_are_measured_while_a_request_goes_on(costs: Costs):
    decode = worker()
    decode.charge(named("a"), kv_tokens=100, prefill_tokens=0)
    said(costs, decode, 1_000, 0, 1)
    said(costs, decode, 1_100, 100 // STEP_MS, 1)
    assert costs.num_seen == (0, 1)


def test_a_pause_between_two_requests_is_no_part_of_a_step(costs: Costs):
    decode = worker()
    decode.charge(named("a"), kv_tokens=100, prefill_tokens=0)
    said(costs, decode, 1_000, 0, 1)
    decode.release(named("a"))  # after five steps; the next one begins 40 ms later, and makes five more until then
    decode.charge(named("b"), kv_tokens=100, prefill_tokens=0)
    said(costs, decode, 1_140, 10, 1)
    assert costs.num_seen == (0, 0)
    said(costs, decode, 1_240, 20, 1)  # from there on it is known again
    assert costs.num_seen == (0, 1)


def test_one_that_waited_for_its_prompt_does_not_stand_for_the_one_that_ran(costs: Costs):
    decode = worker()
    for name in ("a", "b"):
        decode.charge(named(name), kv_tokens=100, prefill_tokens=0)
    said(costs, decode, 1_000, 0, 1)  # a runs, b's prompt is being computed elsewhere
    decode.release(named("a"))
    said(costs, decode, 1_140, 10, 1)
    assert costs.num_seen == (0, 0)


def test_many_at_once_are_measured_while_some_come_and_go(costs: Costs):
    decode = worker()
    for i in range(20):
        decode.charge(named(f"a{i}"), kv_tokens=10, prefill_tokens=0)
    said(costs, decode, 1_000, 0, 16)
    for i in range(8):
        decode.release(named(f"a{i}"))
        decode.charge(named(f"b{i}"), kv_tokens=10, prefill_tokens=0)
    said(costs, decode, 1_100, 160, 16)
    assert costs.num_seen == (0, 1)
