"""Order of waiting requests: tiers, tenants, deadlines, and who may never starve."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.policy.fairness import FairLimits, FairQueue, Ticket, TokenWeights
from scheduler.policy.turns import Turns


def ticket(tenant: str = "a", *, tier: str = "default", deadline: float = math.inf, latest: float = math.inf,
           cost: float = 100.0, group: object = None) -> Ticket:  # fmt: skip
    return Ticket(tier=tier, tenant=tenant, deadline_ms=deadline, latest_start_ms=latest, cost=cost, group=group)


def drain(queue: FairQueue, now_ms: float = 0.0) -> list:
    order = []
    while (request := queue.head(now_ms)) is not None:
        queue.take(request)
        order.append(request)
    return order


def test_tiers_go_in_order_and_a_tenants_earliest_deadline_first():
    queue = FairQueue(FairLimits())
    queue.push("flex", ticket(tier="flex"))
    queue.push("late deadline", ticket(deadline=900))
    queue.push("early deadline", ticket(deadline=300))
    queue.push("priority", ticket(tier="priority"))
    queue.push("unknown tier", ticket(tier="gold", deadline=600))
    assert drain(queue) == ["priority", "early deadline", "unknown tier", "late deadline", "flex"]


def test_a_request_that_cannot_make_it_goes_behind_those_that_can():
    queue = FairQueue(FairLimits())
    queue.push("hopeless", ticket(deadline=100, latest=50))
    queue.push("hopeful", ticket(deadline=500, latest=400))
    assert queue.num_in_time == 2
    assert queue.head(60.0) == "hopeful"
    assert queue.num_in_time == 1
    assert not queue.gives_way("hopeful")
    assert drain(queue, 60.0) == ["hopeful", "hopeless"]


def test_a_late_request_gets_one_turn_in_so_many():
    queue = FairQueue(FairLimits(late_share=4))
    queue.push("late", ticket(latest=-1.0))
    for number in range(20):
        queue.push(number, ticket())
    order = drain(queue)
    assert order.index("late") == 3
    assert [entry for entry in order if entry != "late"] == list(range(20))


def test_late_requests_have_their_part_of_the_work_not_of_the_turns():
    queue = FairQueue(FairLimits(late_share=4))
    queue.push("late", ticket(latest=-1.0, cost=1000.0))
    for number in range(40):
        queue.push(number, ticket(cost=100.0))
    assert drain(queue).index("late") == 30  # 1,000 of 4,000


def test_nobody_saves_up_turns_for_requests_that_become_late():
    queue = FairQueue(FairLimits(late_share=4))
    for number in range(40):
        queue.push(number, ticket())
        queue.take(queue.head(0.0))
    queue.push("late", ticket(latest=-1.0))
    queue.push("in time", ticket())
    assert queue.head(0.0) == "in time"


def test_one_that_was_given_up_and_has_its_turn_does_not_hold_up_those_in_time_for_want_of_room():
    queue = FairQueue(FairLimits(late_share=1))
    given_up, hopeful = ticket(deadline=500.0, latest=400.0), ticket(deadline=600.0, latest=500.0)
    queue.push("given up", given_up)
    queue.push("in time", hopeful)
    queue.give_up("given up")
    turns = Turns(queue, 0.0)
    assert turns.next() == "given up"
    assert not turns.no_room(given_up)
    assert turns.next() == "in time"
    assert turns.no_room(hopeful)
    assert turns.next() is None


def test_a_late_request_without_room_does_not_hold_up_the_others():
    queue = FairQueue(FairLimits(late_share=1))
    queue.push("late", ticket(latest=-1.0))
    queue.push("in time", ticket())
    assert queue.head(0.0) == "late"
    assert queue.head(0.0, late=False) == "in time"


def test_a_tier_that_is_passed_over_gets_a_turn():
    queue = FairQueue(FairLimits(starve_after=5))
    queue.push("batch", ticket(tier="batch"))
    for number in range(50):
        queue.push(number, ticket())
    assert drain(queue).index("batch") == 5


def test_requests_of_a_group_follow_each_other():
    queue = FairQueue(FairLimits())
    for number in range(9):
        queue.push((number % 3, number), ticket(tier="batch", group=number % 3))
    assert [group for group, _ in drain(queue)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_removed_requests_are_gone_and_leave_no_trace():
    queue = FairQueue(FairLimits())
    for number in range(10):
        queue.push(number, ticket(f"t{number}"))
    assert all(queue.remove(number) for number in range(0, 10, 2))
    assert not queue.remove(0)
    assert sorted(drain(queue)) == [1, 3, 5, 7, 9]
    assert len(queue) == 0


def test_a_tenant_that_was_idle_gets_no_credit_for_it():
    queue = FairQueue(FairLimits())
    for number in range(100):
        queue.push(("busy", number), ticket("busy"))
        queue.take(queue.head(0.0))
    queue.push(("busy", 100), ticket("busy"))
    for number in range(10):
        queue.push(("back", number), ticket("back"))
    assert queue.counter("default", "back") == queue.counter("default", "busy")


costs = st.floats(1.0, 1000.0)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    demands=st.dictionaries(st.sampled_from("abcd"), st.lists(costs, min_size=150, max_size=150), min_size=2),
    corrections=st.lists(st.floats(0.0, 2.0), min_size=40, max_size=40),
    turns=st.integers(1, 120),
)
def test_backlogged_tenants_never_differ_by_more_than_two_of_the_largest_request(demands, corrections, turns):
    """The bound of the virtual token counter: 2 * max cost, here with forecasts that are up to twice too low."""
    queue = FairQueue(FairLimits())
    for tenant, tenant_costs in demands.items():
        for number, cost in enumerate(tenant_costs):
            queue.push((tenant, number), ticket(tenant, cost=cost))
    largest = max(max(tenant_costs) for tenant_costs in demands.values())
    for turn in range(turns):
        request = queue.head(0.0)
        queue.take(request)
        tenant, number = request
        actual = demands[tenant][number] * corrections[turn % len(corrections)]
        queue.correct(ticket(tenant, cost=demands[tenant][number]), actual)
        counters = [queue.counter("default", name) for name in demands]
        assert max(counters) - min(counters) <= 2 * 2 * largest + 1e-6


@pytest.mark.parametrize(
    ("uncached", "cached", "output", "expected"), [(100, 0, 0, 100), (0, 100, 0, 10), (0, 0, 100, 400)]
)
def test_tokens_count_what_they_cost(uncached, cached, output, expected):
    got = TokenWeights().cost(uncached_tokens=uncached, cached_tokens=cached, output_tokens=output)
    assert got == pytest.approx(expected)


def test_a_request_that_would_be_late_everywhere_makes_way_at_once():
    queue = FairQueue(FairLimits())
    for name in ("hopeless", "next"):
        queue.push(name, ticket(deadline=100.0 if name == "hopeless" else 200.0, latest=1e9))
    assert queue.head(0.0) == "hopeless"
    queue.give_up("hopeless")
    queue.give_up("hopeless")
    assert queue.head(0.0) == "next"
    assert queue.is_late("hopeless")
    assert queue.num_in_time == 1
    queue.take("next")
    assert queue.head(0.0) == "hopeless"
    assert queue.gives_way("hopeless")
    queue.take("hopeless")
    assert queue.head(0.0) is None
