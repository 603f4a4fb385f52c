"""The degrade ladder: who gives way, in which order, and how it comes back."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.ladder import (
    Asking,
    Ground,
    Hybrid,
    LadderLimits,
    LadderState,
    Rung,
    Strain,
    Way,
    WhyRung,
    climb,
    passage,
)

LIMITS = LadderLimits()
WELL = Strain(pairs=True, wants_pairs=True, unified=1, load=0.2, oldest_wait_s=0.0, wait_limit_s=2.0)
FLOODED = msgspec.structs.replace(WELL, load=3.0)
GROUND = Ground(pairs=True, wants_pairs=True, unified=1, unified_queued_tokens=0, local_model=True)
NO_PAIR = msgspec.structs.replace(GROUND, pairs=False)


def course(*strains: tuple[Strain, float]) -> list[tuple[Rung, WhyRung]]:
    """Tick once a second through strains, each for some seconds; return the moves."""
    state, now_s, moves = LadderState(), 0.0, []
    for strain, length_s in strains:
        for _ in range(int(length_s)):
            state, step = climb(state, strain, LIMITS, now_s)
            if step.moved:
                moves.append((step.after, step.why))
            now_s += 1
    return moves


def test_overload_climbs_rung_by_rung_to_503_and_calm_leads_back_more_slowly():
    up = course((FLOODED, 60))
    assert [rung for rung, _ in up] == list(Rung)[1:]
    assert {why for _, why in up} == {WhyRung.OVERLOAD}
    down = course((FLOODED, 60), (WELL, 300))[len(up) :]
    assert [rung for rung, _ in down] == list(reversed(list(Rung)[:-1]))
    assert LIMITS.down_s > LIMITS.up_s


def test_a_burst_shorter_than_the_patience_moves_nothing():
    assert course((FLOODED, 3), (WELL, 10), (FLOODED, 3), (WELL, 10)) == []


def test_between_calm_and_overload_the_rung_stays():
    moves = course((FLOODED, 8), (msgspec.structs.replace(WELL, load=0.8), 200))
    assert [rung for rung, _ in moves] == [Rung.SHORT_ON_UNIFIED, Rung.LONGER_ON_UNIFIED]


def test_an_old_queue_counts_even_when_it_is_short():
    assert course((msgspec.structs.replace(WELL, oldest_wait_s=2.5), 5)) == [
        (Rung.SHORT_ON_UNIFIED, WhyRung.LATE_QUEUE)
    ]


def test_losing_the_prefill_pool_moves_at_once_and_its_return_leads_back():
    dead = msgspec.structs.replace(WELL, pairs=False)
    assert course((dead, 1)) == [(Rung.SHORT_ON_UNIFIED, WhyRung.NO_PAIR)]
    assert course((dead, 100)) == [(Rung.SHORT_ON_UNIFIED, WhyRung.NO_PAIR)]
    assert course((dead, 5), (WELL, 40))[-1] == (Rung.NORMAL, WhyRung.RECOVERED)


def test_losing_everything_leads_to_the_local_model_at_once():
    gone = msgspec.structs.replace(WELL, pairs=False, unified=0)
    assert course((gone, 1)) == [(Rung.LOCAL, WhyRung.NO_WORKER)]


def test_workers_that_come_back_lead_straight_to_where_it_was_before_they_went():
    gone = msgspec.structs.replace(WELL, pairs=False, unified=0)
    whole = msgspec.structs.replace(WELL, pairs=False)
    # A pool that starts has no worker at first: it must not shed for a minute once it has them.
    assert course((gone, 3), (WELL, 5)) == [(Rung.LOCAL, WhyRung.NO_WORKER), (Rung.NORMAL, WhyRung.RECOVERED)]
    assert course((gone, 3), (WELL, int(LIMITS.back_s))) == [(Rung.LOCAL, WhyRung.NO_WORKER)]
    by_and_by = course((gone, 3), (whole, 5), (WELL, 5))
    assert [rung for rung, _ in by_and_by] == [Rung.LOCAL, Rung.SHORT_ON_UNIFIED, Rung.NORMAL]
    flooded = course((FLOODED, 11), (gone, 3), (FLOODED, 5))
    assert [rung for rung, _ in flooded][-2:] == [Rung.LOCAL, Rung.SHED_BATCH]  # overload had led there, and lasts


def test_a_pool_without_unified_workers_starts_with_shedding_and_a_unified_pool_too():
    assert course((msgspec.structs.replace(FLOODED, unified=0), 5)) == [(Rung.SHED_BATCH, WhyRung.OVERLOAD)]
    whole = msgspec.structs.replace(FLOODED, pairs=False, wants_pairs=False, unified=8)
    assert course((whole, 5)) == [(Rung.SHED_BATCH, WhyRung.OVERLOAD)]


@pytest.mark.parametrize(
    ("rung", "tier", "tokens", "ground", "way"),
    [
        (Rung.NORMAL, "batch", 9000, GROUND, Way.RUN),
        (Rung.SHORT_ON_UNIFIED, "default", 300, NO_PAIR, Way.UNIFIED),
        (Rung.SHORT_ON_UNIFIED, "default", 3000, NO_PAIR, Way.WAIT),
        (Rung.SHORT_ON_UNIFIED, "default", 3000, GROUND, Way.RUN),
        (Rung.LONGER_ON_UNIFIED, "default", 3000, NO_PAIR, Way.UNIFIED),
        (Rung.SHED_BATCH, "batch", 300, GROUND, Way.SHED),
        (Rung.SHED_BATCH, "flex", 300, GROUND, Way.UNIFIED),
        (Rung.SHED_FLEX, "flex", 300, GROUND, Way.SHED),
        (Rung.SHED_FLEX, "default", 300, GROUND, Way.UNIFIED),
        (Rung.UNAVAILABLE, "priority", 300, GROUND, Way.UNAVAILABLE),
    ],
)
def test_each_rung_does_what_it_says(rung, tier, tokens, ground, way):
    assert passage(rung, Asking(tier=tier, uncached_tokens=tokens), ground, LIMITS) is way


def test_longer_prompts_stop_at_the_budget_of_the_unified_workers():
    full = msgspec.structs.replace(NO_PAIR, unified_queued_tokens=LIMITS.unified_budget_tokens)
    long = Asking(tier="default", uncached_tokens=3000)
    assert passage(Rung.LONGER_ON_UNIFIED, long, full, LIMITS) is Way.WAIT
    assert passage(Rung.LONGER_ON_UNIFIED, Asking(tier="default", uncached_tokens=60_000), NO_PAIR, LIMITS) is (
        Way.UNIFIED
    )


def test_only_tenants_who_agreed_get_the_local_model():
    agreed = Asking(tier="batch", uncached_tokens=3000, hybrid=Hybrid())
    assert passage(Rung.LOCAL, agreed, GROUND, LIMITS) is Way.LOCAL
    assert passage(Rung.UNAVAILABLE, agreed, GROUND, LIMITS) is Way.LOCAL
    assert passage(Rung.NORMAL, agreed, GROUND, LIMITS) is Way.RUN
    assert passage(Rung.LOCAL, msgspec.structs.replace(agreed, hybrid=None), GROUND, LIMITS) is Way.SHED
    nobody = Ground(pairs=False, wants_pairs=True, unified=0, unified_queued_tokens=0, local_model=False)
    assert passage(Rung.LOCAL, agreed, nobody, LIMITS) is Way.UNAVAILABLE


def test_a_hybrid_route_sends_its_share_or_its_short_prompts_when_all_is_well():
    split = Hybrid(share=0.2)
    ways = [
        passage(
            Rung.NORMAL,
            Asking(tier="default", uncached_tokens=900, hybrid=split, draw=(i + 0.5) / 100),
            GROUND,
            LIMITS,
        )
        for i in range(100)
    ]
    assert ways.count(Way.LOCAL) == 20
    by_length = Hybrid(up_to_tokens=500)
    for tokens, way in ((400, Way.LOCAL), (600, Way.RUN)):
        asking = Asking(tier="default", uncached_tokens=tokens, hybrid=by_length)
        assert passage(Rung.NORMAL, asking, GROUND, LIMITS) is way


strains = st.builds(
    Strain,
    pairs=st.booleans(),
    wants_pairs=st.booleans(),
    unified=st.integers(0, 3),
    load=st.floats(0, 5),
    oldest_wait_s=st.floats(0, 5),
    wait_limit_s=st.just(2.0),
)


@given(st.lists(strains, max_size=80))
def test_a_tick_climbs_down_by_one_step_and_up_by_one_unless_workers_are_lost(seen):
    state = LadderState()
    for now_s, strain in enumerate(seen):
        lost = state.before_loss is not None
        state, step = climb(state, strain, LIMITS, float(now_s))
        mixed = strain.unified > 0 and strain.wants_pairs
        if step.why in (WhyRung.NO_PAIR, WhyRung.NO_WORKER):
            assert step.after > step.before
        elif lost and step.why is WhyRung.RECOVERED:
            assert step.after < step.before
        elif mixed:
            assert abs(step.after - step.before) <= 1
        assert state.rung is step.after


@given(
    st.sampled_from(list(Rung)),
    st.sampled_from(["priority", "default", "flex", "batch"]),
    st.integers(1, 100_000),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_a_higher_rung_never_serves_what_a_lower_one_refuses(rung, tier, tokens, pairs, wants, unified):
    ground = Ground(pairs=pairs, wants_pairs=wants, unified=unified, unified_queued_tokens=0, local_model=False)
    asking = Asking(tier=tier, uncached_tokens=tokens)
    refused = {Way.SHED, Way.UNAVAILABLE}
    if rung < Rung.UNAVAILABLE and passage(rung, asking, ground, LIMITS) in refused:
        assert passage(Rung(rung + 1), asking, ground, LIMITS) in refused
