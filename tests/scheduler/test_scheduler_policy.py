"""Placement and admission: examples, and what holds for every snapshot."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.lifecycle import HandOff, Path, Role
from scheduler.policy.admission import (
    QueueView,
    Refusal,
    WaitingView,
    order,
    refuse_on_arrival,
    refuse_waiting,
    retry_after_s,
)
from scheduler.policy.cluster import ClusterView, Compatibility, Limits, RequestView, WorkerView
from scheduler.policy.placement import NoPlacement, Placement, Reason, place

LIMITS = Limits()
SAME = Compatibility("r1", "bf16", 16, "mooncake")


def worker(worker_id: str, role: Role, **fields) -> WorkerView:
    return WorkerView(
        **{
            "worker_id": worker_id,
            "epoch": 1,
            "role": role,
            "ready": True,
            "pairs_with": SAME,
            "hand_offs": frozenset({HandOff.DIRECT}),
            "max_running": 8,
            "context_tokens": 4096,
            "kv_capacity_tokens": 10_000,
            **fields,
        }
    )


def request(**fields) -> RequestView:
    return RequestView(**{"prompt_tokens": 1000, "max_tokens": 100, **fields})


def cluster(*workers: WorkerView) -> ClusterView:
    return ClusterView.of(workers)


P, D, U = (worker(name, role) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("u", Role.UNIFIED)))
replace = msgspec.structs.replace


def test_a_pair_is_preferred_over_a_unified_worker():
    got = place(request(), cluster(P, D, U), LIMITS)
    assert (got.path, got.prefill, got.decode, got.reason) == (Path.PD, P, D, Reason.LEAST_LOADED_PAIR)


def test_a_short_prompt_prefers_a_unified_worker_with_room():
    got = place(request(prompt_tokens=LIMITS.unified_up_to_tokens), cluster(P, D, U), LIMITS)
    assert (got.path, got.decode, got.reason) == (Path.UNIFIED, U, Reason.SHORT_PROMPT)
    full = replace(U, num_requests=8)
    assert place(request(prompt_tokens=10), cluster(P, D, full), LIMITS).path is Path.PD


def test_a_pool_without_pairs_is_unified_not_a_fallback():
    got = place(request(), cluster(U), LIMITS)
    assert (got.path, got.reason) == (Path.UNIFIED, Reason.UNIFIED_POOL)


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (replace(P, ready=False), D, Reason.PAIR_DOWN),
        (P, replace(D, ready=False), Reason.PAIR_DOWN),
        (P, replace(D, num_requests=8), Reason.PAIR_FULL),
        (replace(P, kv_tokens=9_500), D, Reason.PAIR_FULL),
        (replace(P, pairs_with=replace(SAME, page_size=32)), D, Reason.PAIR_DOWN),
    ],
)
def test_without_a_usable_pair_a_unified_worker_is_the_fallback(prefill, decode, reason):
    got = place(request(), cluster(prefill, decode, U), LIMITS)
    assert (got.path, got.decode, got.reason) == (Path.FALLBACK, U, reason)


def test_the_least_loaded_of_each_side_is_taken():
    busy, idle = replace(P, worker_id="p1", queued_prefill_tokens=500), replace(P, worker_id="p2")
    full, light = replace(D, worker_id="d1", kv_tokens=3000), replace(D, worker_id="d2", kv_tokens=2000)
    got = place(request(), cluster(busy, idle, full, light), LIMITS)
    assert (got.prefill, got.decode) == (idle, light)


def test_the_least_loaded_pair_that_fits_together_is_taken():
    other = replace(SAME, kv_dtype="fp8")
    lone = replace(D, worker_id="d1", pairs_with=other)
    mate = replace(D, worker_id="d2", kv_tokens=5000)
    assert place(request(), cluster(P, lone, mate), LIMITS).decode == mate


@pytest.mark.parametrize(
    ("workers", "fields", "reason"),
    [
        ((), {}, Reason.NO_WORKER),
        ((replace(U, ready=False),), {}, Reason.NO_WORKER),
        ((P,), {}, Reason.NO_WORKER),
        ((P, replace(D, hand_offs=frozenset({HandOff.STORE}))), {}, Reason.NO_WORKER),
        ((P, replace(D, num_requests=8)), {}, Reason.ALL_FULL),
        ((P, replace(D, kv_tokens=9_999)), {}, Reason.ALL_FULL),
        ((replace(P, ready=False), replace(D, num_requests=8)), {}, Reason.NO_WORKER),
        ((P, D, U), {"excluded": frozenset({"d", "u"})}, Reason.ALL_EXCLUDED),
        ((P, D, replace(U, num_requests=8)), {"excluded": frozenset({"d"})}, Reason.ALL_FULL),
        ((P, D), {"prompt_tokens": 4000}, Reason.TOO_LONG),
        ((P, D), {"num_samples": 9, "prompt_tokens": 10}, Reason.TOO_LONG),
        ((replace(U, kv_capacity_tokens=500),), {}, Reason.TOO_LONG),
    ],
)
def test_why_a_request_is_placed_nowhere(workers, fields, reason):
    assert place(request(**fields), cluster(*workers), LIMITS) == NoPlacement(reason=reason)


views = st.builds(
    worker,
    st.sampled_from([f"w{n}" for n in range(6)]),
    st.sampled_from(list(Role)),
    ready=st.booleans(),
    pairs_with=st.sampled_from([SAME, replace(SAME, page_size=1)]),
    hand_offs=st.sets(st.sampled_from(list(HandOff))).map(frozenset),
    max_running=st.integers(1, 8),
    num_requests=st.integers(0, 9),
    kv_tokens=st.integers(0, 12_000),
    queued_prefill_tokens=st.integers(0, 5000),
    context_tokens=st.integers(16, 4096),
)
clusters = st.lists(views, max_size=8, unique_by=lambda w: w.worker_id).map(lambda w: ClusterView.of(tuple(w)))
requests = st.builds(
    RequestView,
    prompt_tokens=st.integers(1, 5000),
    max_tokens=st.integers(1, 2000),
    num_samples=st.integers(1, 4),
    excluded=st.sets(st.sampled_from([f"w{n}" for n in range(6)]), max_size=3).map(frozenset),
)


@given(requests, clusters)
def test_a_placement_is_always_one_that_works(asked, seen):
    got = place(asked, seen, LIMITS)
    if isinstance(got, NoPlacement):
        return
    sides = [got.decode] + ([got.prefill] if got.prefill is not None else [])
    for side in sides:
        assert side in seen.workers
        assert side.ready
        assert side.worker_id not in asked.excluded
        assert side.num_requests + asked.num_samples <= side.max_running
        assert side.kv_tokens + asked.num_samples * asked.prompt_tokens <= side.kv_capacity_tokens
    assert asked.context_tokens <= got.decode.context_tokens
    if got.prefill is None:
        assert got.decode.role is Role.UNIFIED
        assert got.path in (Path.UNIFIED, Path.FALLBACK)
    else:
        assert (got.prefill.role, got.decode.role, got.path) == (Role.PREFILL, Role.DECODE, Path.PD)
        assert got.prefill.pairs_with == got.decode.pairs_with
        assert asked.hand_off in got.prefill.hand_offs & got.decode.hand_offs


@given(requests, clusters)
def test_equal_snapshots_give_equal_decisions_in_any_order(asked, seen):
    turned = ClusterView(prefill=seen.prefill[::-1], decode=seen.decode[::-1], unified=seen.unified[::-1])
    assert place(asked, turned, LIMITS) == place(asked, seen, LIMITS)


@given(requests, clusters)
def test_nothing_better_is_overlooked(asked, seen):
    """No placement means that no worker can take the request alone, and no two together."""
    got = place(asked, seen, LIMITS)
    for unified in seen.unified:
        if isinstance(got, NoPlacement) and got.reason is Reason.NO_WORKER:
            assert not unified.ready
    if isinstance(got, Placement) and got.prefill is None and got.reason is not Reason.SHORT_PROMPT:
        alone = ClusterView(prefill=seen.prefill, decode=seen.decode)
        assert isinstance(place(asked, alone, LIMITS), NoPlacement)


@given(requests, clusters)
def test_more_load_elsewhere_never_moves_a_request_there(asked, seen):
    got = place(asked, seen, LIMITS)
    if not isinstance(got, Placement):
        return
    heavier = tuple(
        w
        if w.worker_id == got.decode.worker_id or w.role is not got.decode.role
        else replace(w, kv_tokens=w.kv_tokens + 1)
        for w in seen.workers
    )
    again = place(asked, ClusterView.of(heavier), LIMITS)
    assert isinstance(again, Placement)
    if got.path is not Path.PD:
        assert again.decode.worker_id == got.decode.worker_id


# -- admission -----------------------------------------------------------------------------------------


def waiting(**fields) -> WaitingView:
    return WaitingView(**{"tier": "default", "arrival_seq": 1, "deadline_unix_ms": 1000, **fields})


def test_tiers_go_first_and_arrival_decides_within_one():
    in_order = [
        waiting(tier="priority", arrival_seq=9),
        waiting(tier="default", arrival_seq=1),
        waiting(tier="unheard of", arrival_seq=2),
        waiting(tier="flex", arrival_seq=0),
        waiting(tier="batch", arrival_seq=0),
    ]
    assert sorted(set(in_order), key=order) == in_order


@pytest.mark.parametrize(
    ("fields", "now", "refusal"),
    [
        ({}, 999, None),
        ({}, 1000, Refusal.DEADLINE),
        ({"blocked_by": Reason.TOO_LONG}, 0, Refusal.TOO_LONG),
        ({"blocked_by": Reason.NO_WORKER, "waited_s": 4.9}, 0, None),
        ({"blocked_by": Reason.NO_WORKER, "waited_s": 5.0}, 0, Refusal.NO_WORKER),
        ({"blocked_by": Reason.ALL_FULL, "waited_s": 500.0}, 0, None),
    ],
)
def test_who_waits_no_longer(fields, now, refusal):
    assert refuse_waiting(waiting(**fields), now, LIMITS) is refusal


def test_the_queue_is_bounded():
    most = LIMITS.max_queued_requests
    alone = QueueView(num_waiting=most - 1, num_of_tenant=most - 1, num_tenants=1)
    assert refuse_on_arrival(alone, LIMITS) is None
    assert refuse_on_arrival(replace(alone, num_waiting=most, num_of_tenant=most), LIMITS) is Refusal.QUEUE_FULL


def test_a_full_queue_sends_away_who_fills_it_first():
    most = LIMITS.max_queued_requests
    full = QueueView(num_waiting=most, num_of_tenant=most - 10, num_tenants=2)
    assert refuse_on_arrival(full, LIMITS) is Refusal.TENANT_SHARE
    assert refuse_on_arrival(replace(full, num_of_tenant=10), LIMITS) is None
    over = replace(full, num_waiting=most + most // 4, num_of_tenant=10)
    assert refuse_on_arrival(over, LIMITS) is Refusal.QUEUE_FULL


def test_what_waits_longer_than_the_deadline_refuses_at_once_and_says_when_to_come_back():
    queue = QueueView(num_waiting=40, num_of_tenant=1, num_tenants=5, work_ms=80_000, num_computing=4)
    assert refuse_on_arrival(queue, LIMITS, left_s=10) is Refusal.OVERLOADED
    assert refuse_on_arrival(queue, LIMITS, left_s=30) is None
    assert retry_after_s(queue, LIMITS) == 20
    assert retry_after_s(replace(queue, work_ms=0), LIMITS) == LIMITS.retry_after_s
    assert retry_after_s(replace(queue, work_ms=1e9), LIMITS) == LIMITS.longest_retry_after_s
