"""The ratio controller: what it does, and what it must never do."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.lifecycle import HandOff, Role
from contracts.slo import SloTarget
from scheduler.policy.blame import Blamed, Stage
from scheduler.policy.demand import Demand
from scheduler.policy.offers import expected_hold_s, floors
from scheduler.policy.queueing import Fleet, Split
from scheduler.policy.ratio import Decision, Mode, Why, decide, is_early
from scheduler.policy.sight import Donor, RatioLimits, RatioState, Sight
from scheduler.policy.ways import moved
from scheduler.simulator.setup import H100_8B

FLEET = Fleet(latency=H100_8B, target=SloTarget(ttft_ms=2000, tpot_ms=20))
FRESH = RatioState()
DIRECT, STORE = RatioLimits.of(HandOff.DIRECT), RatioLimits.of(HandOff.STORE)


def demand_of(*, rate: float, prompt_ms: float, prompt: int, output: int) -> Demand:
    steps = prompt * output + output * output / 2
    return Demand(
        rate_rps=rate,
        prefill_ms=prompt_ms,
        feasible_share=1.0,
        feasible_prefill_ms=prompt_ms,
        dispersion=1.6,
        prefill_ms_quantiles=tuple(prompt_ms * f for f in (0.4, 0.6, 0.75, 0.9, 1.05, 1.2, 1.4, 1.7)),
        prompt_tokens=prompt,
        output_tokens=output,
        kv_token_steps=steps,
        kv_token_steps_square=steps * (prompt + output / 2),
        kv_token_ms_before=prompt * prompt_ms,
        span_s=120.0,
    )


PROMPTS = demand_of(rate=20.0, prompt_ms=220.0, prompt=6000, output=100)  # 4.4 prefill workers' work
ANSWERS = demand_of(rate=30.0, prompt_ms=25.0, prompt=550, output=1200)
BALANCED = demand_of(rate=12.0, prompt_ms=140.0, prompt=4000, output=400)


def sight_of(split: Split, demand: Demand | None, **other: object) -> Sight:
    donors = [
        Donor(worker_id=f"{role.value}{number}", role=role, drain_s=2.0 + number)
        for role in Role
        for number in range(getattr(split, role))
    ]
    return Sight(**({"split": split, "moving": False, "donors": donors, "demand": demand} | other))


def blamed(*, prefill: float = 0.0, decode: float = 0.0, number: int = 400) -> Blamed:
    stages = {Stage.PREFILL_QUEUE: int(prefill * number), Stage.DECODE_LOAD: int(decode * number)}
    return Blamed(
        feasible=number,
        met=number - sum(stages.values()),
        refused=0,
        by_stage=stages | {Stage.NONE: number - sum(stages.values())},
    )


def ticks(
    sight: Sight, number: int, *, limits: RatioLimits = DIRECT, state: RatioState = FRESH, start_s: float = 0.0
) -> tuple[RatioState, Split, list[Decision]]:
    """Play ticks; each move takes effect before the next one."""
    decisions = []
    split = sight.split
    for tick in range(number):
        seen = msgspec.structs.replace(sight, split=split, donors=sight_of(split, None).donors)
        state, decision = decide(state, seen, FLEET, limits, mode=Mode.AUTO, now_s=start_s + tick * limits.period_s)
        decisions.append(decision)
        if decision.move is not None:
            split = moved(split, decision.move.from_role, decision.move.to_role)
    return state, split, decisions


def moves(decisions: list[Decision]) -> list[Decision]:
    return [decision for decision in decisions if decision.move is not None]


# -- what it does ------------------------------------------------------------------------------------------------


def test_prompts_pull_decode_workers_to_prefill_and_answers_push_them_back():
    _, split, made = ticks(sight_of(Split(prefill=2, decode=6), PROMPTS), 60)
    assert split.prefill >= 5
    assert {(d.move.from_role, d.move.to_role) for d in moves(made)} <= {(Role.DECODE, Role.PREFILL)}
    _, split, made = ticks(sight_of(Split(prefill=6, decode=2), ANSWERS), 60)
    assert split.decode >= 4
    assert all(d.move.from_role is Role.PREFILL for d in moves(made))


def test_the_donor_is_the_worker_that_is_empty_first():
    _, _, made = ticks(sight_of(Split(prefill=2, decode=6), PROMPTS), 10)
    assert moves(made)[0].move.worker_id == "decode0"


@pytest.mark.parametrize("limits", [DIRECT, STORE], ids=["direct", "store"])
def test_a_move_is_confirmed_first_and_each_has_a_reason(limits):
    few = msgspec.structs.replace(PROMPTS, span_s=5.0)
    _, _, made = ticks(sight_of(Split(prefill=2, decode=6), few), 2, limits=limits)
    assert [d.why for d in made] == [Why.UNCONFIRMED, Why.GAIN]
    assert made[0].target.prefill > 3  # it sees where the direction leads


def test_a_clear_measurement_needs_no_second_tick_before_the_first_move_of_all():
    clear = msgspec.structs.replace(PROMPTS, dispersion=2.0, span_s=11.0)  # 220 prompts: the work is known to 9.5 %
    _, _, made = ticks(sight_of(Split(prefill=2, decode=6), clear), 1)
    assert made[0].why is Why.GAIN
    for unclear in (msgspec.structs.replace(clear, span_s=5.0), msgspec.structs.replace(clear, dispersion=9.0)):
        _, _, made = ticks(sight_of(Split(prefill=2, decode=6), unclear), 1)
        assert made[0].why is Why.UNCONFIRMED
    answers = msgspec.structs.replace(
        ANSWERS, dispersion=2.0, span_s=60.0
    )  # their lengths are not measured as they come
    _, _, made = ticks(sight_of(Split(prefill=6, decode=2), answers), 1)
    assert made[0].why is Why.UNCONFIRMED
    moved_before = RatioState(last_move_s=-500.0, last_from=Role.DECODE, last_to=Role.PREFILL)
    _, _, made = ticks(sight_of(Split(prefill=2, decode=6), clear), 1, state=moved_before)
    assert made[0].why is Why.UNCONFIRMED


def test_a_decision_does_not_wait_for_its_period_when_a_move_has_ended_or_the_demand_has_changed():
    calm = sight_of(Split(prefill=2, decode=6), PROMPTS, alarms_s=(3.0,))
    changed = msgspec.structs.replace(calm, alarms_s=(3.0, 9.0))

    def after(state: RatioState, sight: Sight, now_s: float) -> RatioState:
        return decide(state, sight, FLEET, DIRECT, mode=Mode.AUTO, now_s=now_s)[0]

    state = after(FRESH, calm, 5.0)  # begins a move
    assert not is_early(state, moving=True, alarms_s=calm.alarms_s)
    assert is_early(state, moving=False, alarms_s=calm.alarms_s)
    assert is_early(state, moving=True, alarms_s=changed.alarms_s)
    state = after(state, msgspec.structs.replace(changed, moving=True), 10.0)
    assert is_early(state, moving=False, alarms_s=changed.alarms_s)
    state = after(state, msgspec.structs.replace(changed, demand=None), 11.0)
    assert not is_early(state, moving=False, alarms_s=changed.alarms_s)


def test_store_moves_a_label_as_often_as_it_pays_and_direct_waits_for_its_price():
    drained = sight_of(Split(prefill=2, decode=6), PROMPTS)
    slow = msgspec.structs.replace(
        drained, donors=[msgspec.structs.replace(d, drain_s=55.0) for d in drained.donors], alarms_s=(10.0, 60.0, 110.0)
    )
    assert decide(RatioState(favoured_ticks=5), slow, FLEET, DIRECT, mode=Mode.AUTO, now_s=130.0)[1].why in (
        Why.PRICE_TOO_HIGH,
        Why.GAIN_TOO_SMALL,
    )
    _, split, _ = ticks(slow, 30, limits=STORE, start_s=130.0)
    assert split.prefill >= 5


def test_misses_blamed_on_one_side_turn_its_gain_and_the_gain_leaks_away():
    sight = sight_of(Split(prefill=4, decode=4), BALANCED, blamed=blamed(prefill=0.3))
    state, _, _ = ticks(sight, 12)
    assert state.prefill_gain > 1.15
    assert state.decode_gain <= 1.0
    quiet = msgspec.structs.replace(sight, blamed=blamed(prefill=0.025, decode=0.025))
    later, _, _ = ticks(quiet, 120, state=state, start_s=60.0)
    assert 1.0 < later.prefill_gain < 1 + (state.prefill_gain - 1) / 2


@pytest.mark.parametrize(
    "change",
    [
        {"moving": True},
        {"blamed": blamed(prefill=0.5, number=20)},
        {"blamed": None},
        {"blamed": Blamed(feasible=300, met=100, refused=100, by_stage={Stage.PREFILL_QUEUE: 200})},
    ],
    ids=["during a move", "few samples", "no samples", "while refusing"],
)
def test_the_integrators_stand_still_when_they_cannot_learn(change):
    sight = sight_of(Split(prefill=4, decode=4), BALANCED, **({"blamed": blamed(prefill=0.5)} | change))
    state, _, _ = ticks(sight, 24)
    assert state.prefill_gain == pytest.approx(1.0)


def test_a_gain_does_not_wind_up_when_nobody_is_left_to_give_a_worker():
    sight = sight_of(Split(prefill=6, decode=2), PROMPTS, blamed=blamed(prefill=0.8))
    state, _, _ = ticks(sight, 100)
    assert state.prefill_gain == pytest.approx(1.0)


ALTERNATING = {
    "past": [demand_of(rate=27.0, prompt_ms=213.0, prompt=6000, output=139),
             demand_of(rate=24.0, prompt_ms=28.0, prompt=650, output=1880)],
    "alarms_s": (240.0, 300.0, 360.0),
}  # fmt: skip


@pytest.mark.parametrize(("limits", "minutes"), [(DIRECT, 20), (STORE, 3)], ids=["direct", "store"])
def test_demands_that_change_faster_than_workers_follow_end_in_a_pool_without_pairs(limits, minutes):
    state, split, made = FRESH, Split(prefill=3, decode=5), []
    for minute in range(6, 6 + minutes):
        alarms_s = tuple(60.0 * number for number in range(minute - 2, minute + 1))
        sight = sight_of(split, ALTERNATING["past"][minute % 2], past=ALTERNATING["past"], alarms_s=alarms_s)
        number = int(60 / limits.period_s)
        state, split, more = ticks(sight, number, limits=limits, state=state, start_s=60.0 * minute + 5)
        made += more
    assert split == Split(unified=8)
    assert len(moves(made)) <= 9  # eight workers, and no way back


def test_a_way_to_all_unified_is_confirmed_once():
    past = ALTERNATING["past"]
    begun = RatioState(last_move_s=300.0, last_from=Role.PREFILL, last_to=Role.UNIFIED, dissolving=True)
    sight = sight_of(Split(prefill=1, decode=1, unified=6), past[0], **ALTERNATING)
    other = msgspec.structs.replace(begun, dissolving=False)
    way = decide(begun, sight, FLEET, STORE, mode=Mode.AUTO, now_s=361.0)[1]
    assert way.target == Split(unified=8)
    assert way.gain < STORE.clear_gain
    assert way.move is not None
    assert decide(other, sight, FLEET, STORE, mode=Mode.AUTO, now_s=361.0)[1].why is Why.UNCONFIRMED


def test_a_small_gain_has_to_last_a_minute():
    limits = msgspec.structs.replace(DIRECT, clear_gain=10.0)
    _, _, made = ticks(sight_of(Split(prefill=2, decode=6), PROMPTS), 14, limits=limits)
    assert [d.why for d in made].index(Why.GAIN) == limits.patient_ticks - 1


def test_the_last_unified_worker_goes_only_for_a_large_gain():
    small = msgspec.structs.replace(DIRECT, last_unified_gain=10.0)
    split = Split(prefill=5, decode=2, unified=1)
    _, after, _ = ticks(sight_of(split, PROMPTS), 60, limits=small)
    assert after.unified >= 1


def test_an_empty_pool_is_refilled_at_once_whatever_the_cooldown():
    state = RatioState(last_move_s=0.0, last_from=Role.DECODE, last_to=Role.PREFILL)
    for split, to_role in ((Split(prefill=0, decode=6), Role.PREFILL), (Split(prefill=5, decode=0), Role.DECODE)):
        _, decision = decide(state, sight_of(split, None), FLEET, DIRECT, mode=Mode.AUTO, now_s=1.0)
        assert decision.why is Why.POOL_EMPTY
        assert decision.move.to_role is to_role


def test_an_all_unified_pool_is_legal_and_stays():
    _, split, made = ticks(sight_of(Split(unified=8), BALANCED), 200)
    assert split == Split(unified=8)
    assert moves(made) == []


def test_manual_goes_to_the_pin_and_stays_there():
    limits = msgspec.structs.replace(DIRECT, pinned=Split(prefill=3, decode=4, unified=1))
    state, split = RatioState(), Split(prefill=5, decode=3)
    for tick in range(10):
        state, decision = decide(state, sight_of(split, PROMPTS), FLEET, limits, mode=Mode.MANUAL, now_s=tick * 5.0)
        assert decision.why is Why.PINNED
        if decision.move is not None:
            split = moved(split, decision.move.from_role, decision.move.to_role)
    assert split == limits.pinned


# -- what it must never do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [DIRECT, STORE], ids=["direct", "store"])
@pytest.mark.parametrize("demand", [PROMPTS, ANSWERS, BALANCED], ids=["prompts", "answers", "balanced"])
def test_a_steady_load_moves_nothing_once_settled_in_a_thousand_ticks(limits, demand):
    start = Split(prefill=4, decode=3, unified=1)
    state, split, _ = ticks(sight_of(start, demand), 150, limits=limits)
    _, after, made = ticks(sight_of(split, demand), 1000, limits=limits, state=state, start_s=150 * limits.period_s)
    assert moves(made) == []
    assert after == split


@settings(max_examples=30, deadline=None)
@given(rates=st.lists(st.floats(0.85, 1.15), min_size=40, max_size=40), store=st.booleans())
def test_noise_around_a_constant_load_never_swings_back_and_forth(rates, store):
    limits = STORE if store else DIRECT
    split, state, made = Split(prefill=2, decode=2), RatioState(), []
    for tick, factor in enumerate(rates):
        demand = msgspec.structs.replace(BALANCED, rate_rps=BALANCED.rate_rps / 2 * factor)
        state, decision = decide(
            state, sight_of(split, demand), FLEET, limits, mode=Mode.AUTO, now_s=tick * limits.period_s
        )
        if decision.move is not None:
            split = moved(split, decision.move.from_role, decision.move.to_role)
            made.append((decision.move.from_role, decision.move.to_role))
    undone = sum(1 for first, second in itertools.pairwise(made) if first == second[::-1])
    assert undone == 0


def test_zero_traffic_and_missing_data_hold_and_yield_no_nan():
    for demand, why in ((msgspec.structs.replace(BALANCED, rate_rps=0.0), Why.IDLE), (None, Why.NO_DATA)):
        state, split, made = ticks(sight_of(Split(prefill=4, decode=3, unified=1), demand), 50)
        assert {d.why for d in made} == {why}
        assert split == Split(prefill=4, decode=3, unified=1)
        assert state.prefill_gain == state.decode_gain == 1.0


def test_one_infeasible_request_changes_nothing():
    with_giant = msgspec.structs.replace(BALANCED, prefill_ms=BALANCED.prefill_ms + 20.0, feasible_share=0.999)
    start = Split(prefill=4, decode=3, unified=1)
    _, plain, _ = ticks(sight_of(start, BALANCED), 100)
    _, with_it, _ = ticks(sight_of(start, with_giant), 100)
    assert with_it == plain
    only_giants = msgspec.structs.replace(BALANCED, feasible_share=0.0, prefill_ms_quantiles=())
    _, split, made = ticks(sight_of(start, only_giants), 20)
    assert split == start
    assert moves(made) == []


def test_shadow_decides_as_auto_does():
    sight = sight_of(Split(prefill=2, decode=6), PROMPTS)
    state = RatioState(favoured=(Role.DECODE, Role.PREFILL), favoured_ticks=4)
    assert decide(state, sight, FLEET, DIRECT, mode=Mode.SHADOW, now_s=9.0) == decide(
        state, sight, FLEET, DIRECT, mode=Mode.AUTO, now_s=9.0
    )


@settings(deadline=None, max_examples=60)
@given(
    prefill=st.integers(0, 8),
    decode=st.integers(0, 8),
    unified=st.integers(0, 8),
    demand=st.sampled_from([PROMPTS, ANSWERS, BALANCED, None]),
    scale=st.floats(0.0, 8.0),
    moving=st.booleans(),
    share=st.floats(0, 1),
    store=st.booleans(),
)
def test_a_move_keeps_the_total_and_the_floors_and_comes_one_at_a_time(
    prefill, decode, unified, demand, scale, moving, share, store
):
    split = Split(prefill=prefill, decode=decode, unified=unified)
    scaled = msgspec.structs.replace(demand, rate_rps=demand.rate_rps * scale) if demand else None
    sight = sight_of(split, scaled, moving=moving, blamed=blamed(prefill=share * 0.5, decode=share * 0.5))
    _, after, made = ticks(sight, 3, limits=STORE if store else DIRECT)
    assert after.total == split.total
    for decision in moves(made):
        least = floors(split.total)
        then = moved(decision.split, decision.move.from_role, decision.move.to_role)
        for role in (Role.PREFILL, Role.DECODE):
            kept = getattr(then, role) >= min(getattr(least, role), getattr(decision.split, role))
            assert kept or decision.why is Why.POOL_EMPTY
        assert any(d.worker_id == decision.move.worker_id for d in sight_of(decision.split, None).donors)
    if moving:
        assert moves(made) == []


def test_a_reversal_costs_a_longer_cooldown_each_time():
    state = RatioState(last_move_s=0.0, last_from=Role.PREFILL, last_to=Role.DECODE, reversals=2, favoured_ticks=9,
                       favoured=(Role.DECODE, Role.PREFILL))  # fmt: skip
    sight = sight_of(Split(prefill=2, decode=6), PROMPTS)
    waiting = decide(state, sight, FLEET, DIRECT, mode=Mode.AUTO, now_s=30.0 * 8 - 1)[1]
    assert waiting.why is Why.COOLING_DOWN
    assert decide(state, sight, FLEET, DIRECT, mode=Mode.AUTO, now_s=30.0 * 8 + 1)[1].why is Why.GAIN


def test_the_expected_hold_is_what_the_changes_so_far_say():
    assert expected_hold_s((), DIRECT, 10.0) == DIRECT.hold_s
    assert expected_hold_s((100.0, 140.0, 180.0, 220.0), DIRECT, 230.0) == pytest.approx(40.0)
    assert expected_hold_s((100.0, 140.0, 180.0), DIRECT, 1000.0) == DIRECT.hold_bounds_s[1]


@pytest.mark.parametrize(
    ("split", "limits", "moves"),
    [
        (Split(prefill=1, decode=1), RatioLimits(), False),  # two workers: whoever leaves, nobody serves
        (Split(decode=1, unified=1), RatioLimits(), False),  # the unified worker is all that serves
        (Split(decode=2), RatioLimits(), True),  # nobody serves as it is
        (Split(decode=1, unified=2), RatioLimits(), True),
        (Split(decode=1, unified=1), RatioLimits.of(HandOff.STORE), True),  # a label: no time without service
    ],
)
def test_no_move_stops_all_service_while_it_lasts(split, limits, moves):
    state, moved = RatioState(), False
    for tick in range(30):
        state, decision = decide(
            state, sight_of(split, PROMPTS), FLEET, limits, mode=Mode.AUTO, now_s=100.0 + tick * limits.period_s
        )
        moved = moved or decision.move is not None
    assert moved is moves
