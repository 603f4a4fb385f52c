"""Scored placement: where a request goes, and what must hold wherever it goes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.lifecycle import HandOff, Path, Role
from contracts.slo import SloTarget
from scheduler.policy.cluster import ClusterView, Compatibility, RequestView, WorkerView
from scheduler.policy.outlook import Outlook, ScoringLimits
from scheduler.policy.placement import Placement, Reason
from scheduler.policy.scoring import NotScored, Scored, score
from scheduler.simulator.setup import H100_8B

SAME = Compatibility("revision", "auto", 64, "mooncake")
OTHER = Compatibility("revision", "auto", 32, "mooncake")
LIMITS = ScoringLimits(explore=0.0)


def worker(worker_id: str, role: Role, **other: object) -> WorkerView:
    view = WorkerView(
        worker_id=worker_id,
        epoch=1,
        role=role,
        ready=True,
        pairs_with=SAME,
        hand_offs=frozenset({HandOff.DIRECT}),
        max_running=256,
        context_tokens=200_000,
        kv_capacity_tokens=400_000,
    )
    return msgspec.structs.replace(view, **other)


def outlook(**other: object) -> Outlook:
    base = Outlook(
        latency=H100_8B, target=SloTarget(ttft_ms=2000, tpot_ms=20), output_tokens=200.0, promised_output_tokens=300
    )
    return msgspec.structs.replace(base, **other)


def request(prompt: int = 4000, **other: object) -> RequestView:
    return RequestView(prompt_tokens=prompt, max_tokens=1000, **other)


def place(asked: RequestView, *workers: WorkerView, limits: ScoringLimits = LIMITS, **other: object):
    return score(asked, ClusterView.of(workers), limits, outlook(**other))


P0, P1 = worker("p0", Role.PREFILL), worker("p1", Role.PREFILL)
D0, D1 = worker("d0", Role.DECODE), worker("d1", Role.DECODE)
U0 = worker("u0", Role.UNIFIED)


def test_a_long_prompt_takes_the_pair_and_a_short_one_the_idle_unified_worker():
    long, short = place(request(8000), P0, D0, U0), place(request(200), P0, D0, U0)
    assert (long.path, long.prefill.worker_id, long.decode.worker_id) == (Path.PD, "p0", "d0")
    assert (short.path, short.decode.worker_id, short.reason) == (Path.UNIFIED, "u0", Reason.SHORT_PROMPT)


def test_a_short_prompt_stays_with_the_pair_when_the_unified_worker_is_fuller():
    full = msgspec.structs.replace(U0, kv_tokens=100_000, num_requests=50)
    assert place(request(200), P0, D0, full).path is Path.PD


def test_a_prompt_that_would_queue_goes_to_the_unified_worker_if_it_is_done_sooner_there():
    busy = msgspec.structs.replace(P0, queued_prefill_tokens=8000, num_requests=1)
    fuller = msgspec.structs.replace(U0, kv_tokens=50_000, num_requests=3)
    got = place(request(4000), busy, D0, fuller)
    assert (got.path, got.reason) == (Path.UNIFIED, Reason.SOONER)
    assert place(request(4000), P0, D0, fuller).path is Path.PD


def test_a_prefill_worker_with_its_quota_of_queued_work_gets_no_more():
    queued = int(LIMITS.prefill_quota_ms / H100_8B.prefill.per_token_ms) + 1
    busy = msgspec.structs.replace(P0, queued_prefill_tokens=queued)
    got = place(request(), busy, D0)
    assert isinstance(got, NotScored)
    assert (got.reason, got.short_of) == (Reason.ALL_FULL, Role.PREFILL)
    assert place(request(), busy, P1, D0).prefill.worker_id == "p1"


def test_a_decode_worker_whose_step_would_pass_the_target_counts_as_full():
    slow = msgspec.structs.replace(D0, kv_tokens=310_000, num_requests=20)
    got = place(request(), P0, slow)
    assert isinstance(got, NotScored)
    assert got.short_of is Role.DECODE
    assert place(request(), P0, slow, D1).decode.worker_id == "d1"
    assert isinstance(place(request(), P0, slow, target=SloTarget(ttft_ms=2000)), Scored)


def test_a_prefix_hit_wins_unless_its_worker_is_overloaded_and_then_only_that_one_loses_its_pull():
    hits = {"p0": 3584, "p1": 2048}
    assert place(request(), P0, P1, D0, cached_tokens=hits).prefill.worker_id == "p0"
    swamped = msgspec.structs.replace(P0, num_requests=200)
    third = worker("p2", Role.PREFILL)
    got = place(request(), swamped, P1, third, D0, cached_tokens=hits)
    assert (got.prefill.worker_id, got.cached_tokens) == ("p1", 2048)


def test_a_hit_is_never_the_whole_prompt():
    got = place(request(1024), P0, D0, cached_tokens={"p0": 1024})
    assert got.cached_tokens == 1023


def test_only_workers_that_fit_together_are_paired():
    stranger = msgspec.structs.replace(D0, pairs_with=OTHER)
    assert isinstance(place(request(), P0, stranger), NotScored)
    got = place(request(), P0, msgspec.structs.replace(P1, pairs_with=OTHER), stranger)
    assert (got.prefill.worker_id, got.decode.worker_id) == ("p1", "d0")


def test_what_gives_way_leaves_room_for_those_in_time():
    loaded = msgspec.structs.replace(D0, kv_tokens=230_000, num_requests=20)  # a step of about 17 of 20 ms
    assert isinstance(place(request(), P0, loaded), Scored)
    assert isinstance(place(request(), P0, loaded, gives_way=True), NotScored)


def test_batch_work_runs_on_unified_workers_with_no_prompt_waiting():
    assert place(request(8000), P0, D0, U0, background=True).decode.worker_id == "u0"
    waiting = msgspec.structs.replace(U0, queued_prefill_tokens=100)
    got = place(request(8000), P0, D0, waiting, background=True)
    assert (got.short_of, got.reason) == (Role.UNIFIED, Reason.ALL_FULL)
    assert place(request(8000), P0, D0, background=True).path is Path.PD


def test_a_session_keeps_its_worker_and_leaves_it_only_above_the_load_bound():
    workers = [worker(f"p{number}", Role.PREFILL) for number in range(8)]
    homes = {
        session: place(request(), *workers, D0, affinity=session).prefill.worker_id for session in map(str, range(60))
    }
    assert len(set(homes.values())) >= 6
    for session, home in homes.items():
        assert place(request(), *workers, D0, affinity=session).prefill.worker_id == home
        loaded = [msgspec.structs.replace(w, num_requests=20) if w.worker_id == home else w for w in workers]
        assert place(request(), *loaded, D0, affinity=session).prefill.worker_id != home
        gone = [w for w in workers if w.worker_id != home]
        assert place(request(), *gone, D0, affinity=session).prefill.worker_id != home


def test_near_equals_are_drawn_and_one_in_a_hundred_explores():
    assert {place(request(), P0, P1, D0, draw=draw / 10).prefill.worker_id for draw in range(10)} == {"p0", "p1"}
    cached = {"p0": 3584}
    explored = place(request(), P0, P1, D0, limits=ScoringLimits(explore=0.01), cached_tokens=cached, draw=0.005)
    assert explored.prefill.worker_id == "p1"


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ((), Reason.NO_WORKER),
        ((msgspec.structs.replace(P0, ready=False), D0), Reason.NO_WORKER),
        ((msgspec.structs.replace(P0, context_tokens=100), D0), Reason.TOO_LONG),
        ((P0, msgspec.structs.replace(D0, kv_tokens=399_000)), Reason.ALL_FULL),
    ],
)
def test_nowhere_has_a_reason(workers, reason):
    got = place(request(), *workers)
    assert isinstance(got, NotScored)
    assert got.reason is reason


def test_a_worker_where_an_attempt_failed_is_not_tried_again():
    excluded = request(excluded=frozenset({"p0", "d0"}))
    got = place(excluded, P0, P1, D0, D1)
    assert (got.prefill.worker_id, got.decode.worker_id) == ("p1", "d1")
    assert place(excluded, P0, D0).reason is Reason.ALL_EXCLUDED


def test_steps_take_as_long_as_what_is_held_half_way_though_memory_is_promised_to_the_end():
    """99 answers of 2,000 tokens: with all that is promised to them they would step in 20.2 ms, half-way in 15.4 ms."""
    answers = msgspec.structs.replace(D0, num_requests=99, kv_tokens=270_000)
    growing = msgspec.structs.replace(answers, num_decoding=99, decoding_kv_tokens=165_000)
    asked, long = request(640), {"output_tokens": 2000.0, "promised_output_tokens": 2100}
    assert isinstance(place(asked, P0, answers, **long), NotScored)
    got = place(asked, P0, growing, **long)
    assert got.predicted_step_ms == pytest.approx(6 + 0.02 * 100 + 4.5e-5 * (165_000 + 640 + 1000))
    assert (got.promised_kv_tokens, got.decoding_kv_tokens) == (1640, 1640)  # its own limit is 1,000 tokens
    full = msgspec.structs.replace(growing, kv_tokens=399_000)
    assert place(asked, P0, full, **long).short_of is Role.DECODE


def test_a_prompt_waits_for_a_pair_that_will_be_in_time_rather_than_be_late_on_a_busy_unified_worker():
    queued = int(LIMITS.prefill_quota_ms / H100_8B.prefill.per_token_ms) + 1
    busy = msgspec.structs.replace(P0, queued_prefill_tokens=queued)
    slow = msgspec.structs.replace(U0, num_requests=60, kv_tokens=210_000)  # steps of 17 ms: 8,000 tokens take 3 s
    assert place(request(8000), busy, D0, slow).reason is Reason.ALL_FULL
    late = place(request(8000), busy, D0, slow, waited_ms=1900.0)  # late anywhere
    assert (late.path, late.reason) == (Path.FALLBACK, Reason.PAIR_FULL)
    assert place(request(800), busy, D0, slow).reason is Reason.PAIR_FULL  # in time here


def by_store(worker_id: str, role: Role, **other: object) -> WorkerView:
    return worker(worker_id, role, hand_offs=frozenset({HandOff.STORE}), **other)


def test_a_prefill_worker_that_still_decodes_is_as_slow_as_its_steps_leave_room():
    """A label changed, its answers did not end: 13 ms of 18 are theirs, prompts get the rest."""
    label = by_store(
        "p0", Role.PREFILL, num_requests=50, num_decoding=50, kv_tokens=133_333, decoding_kv_tokens=133_333
    )
    free = by_store("p1", Role.PREFILL, queued_prefill_tokens=4000, num_requests=1)
    decode, asked = by_store("d0", Role.DECODE), request(4000, hand_off=HandOff.STORE)
    assert place(asked, label, free, decode).prefill.worker_id == "p1"
    alone = place(asked, label, decode)
    own_ms = H100_8B.prefill.ms(4000) * 1.1 / (1 - (6 + 0.02 * 50 + 6.0) / 18)
    assert alone.predicted_ttft_ms == pytest.approx(own_ms, rel=0.1)


views = st.builds(
    lambda number, role, ready, kv, requests, queued, kind: worker(
        f"{role.value}{number}",
        role,
        ready=ready,
        kv_tokens=kv,
        num_requests=requests,
        queued_prefill_tokens=queued,
        pairs_with=kind,
    ),
    st.integers(0, 99),
    st.sampled_from(list(Role)),
    st.booleans(),
    st.integers(0, 400_000),
    st.integers(0, 256),
    st.integers(0, 20_000),
    st.sampled_from([SAME, OTHER]),
)


@given(
    workers=st.lists(views, max_size=10, unique_by=lambda w: w.worker_id),
    prompt=st.integers(1, 150_000),
    samples=st.integers(1, 4),
    draw=st.floats(0, 0.999),
    background=st.booleans(),
    gives_way=st.booleans(),
)
def test_a_chosen_worker_is_ready_has_room_and_fits_its_partner(workers, prompt, samples, draw, background, gives_way):
    asked = request(prompt, num_samples=samples)
    got = place(asked, *workers, draw=draw, background=background, gives_way=gives_way)
    if not isinstance(got, Placement):
        return
    assert got.decode.ready
    assert got.decode.kv_tokens + got.promised_kv_tokens <= got.decode.kv_capacity_tokens
    assert got.decode.num_requests + samples <= got.decode.max_running
    assert (got.prefill is None) == (got.decode.role is Role.UNIFIED)
    if got.prefill is not None:
        assert got.prefill.ready
        assert got.prefill.role is Role.PREFILL
        assert got.decode.role is Role.DECODE
        assert got.prefill.pairs_with == got.decode.pairs_with
    assert 0 <= got.cached_tokens < prompt
