"""Room for more load than there is: who moves for it, when, and who never does."""

import msgspec
import pytest

from contracts.lifecycle import HandOff, Role
from contracts.slo import SloTarget
from scheduler.policy.demand import Demand
from scheduler.policy.offers import offers
from scheduler.policy.queueing import Fleet, Split
from scheduler.policy.ratio import Decision, Mode, Why, decide
from scheduler.policy.sight import Donor, RatioLimits, RatioState, Sight
from scheduler.policy.ways import moved
from scheduler.simulator.setup import H100_8B

FLEET = Fleet(latency=H100_8B, target=SloTarget(ttft_ms=2000, tpot_ms=20))
DIRECT, STORE = RatioLimits.of(HandOff.DIRECT), RatioLimits.of(HandOff.STORE)
MIDDLE = Split(prefill=4, decode=4)


def demand_of(*, rate: float, prompt: int = 5000, output: int = 60) -> Demand:
    prompt_ms = H100_8B.prefill.ms(prompt)
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


PROMPT_S = H100_8B.prefill.ms(5000) / 1000
BUSY = demand_of(rate=4 * 0.75 / PROMPT_S)  # three quarters of four prefill workers; decode has almost nothing to do
QUIET = demand_of(rate=4 * 0.4 / PROMPT_S)


def sight_of(split: Split, demand: Demand, **other: object) -> Sight:
    donors = [
        Donor(worker_id=f"{role.value}{number}", role=role, drain_s=1.0)
        for role in Role
        for number in range(getattr(split, role))
    ]
    return Sight(**({"split": split, "moving": False, "donors": donors, "demand": demand} | other))


def course(
    split: Split, demand: Demand, ticks: int, *, limits: RatioLimits = DIRECT, state: RatioState | None = None
) -> tuple[Split, list[Decision]]:
    """Play ticks, each move done by the next one."""
    state, made = state or RatioState(), []
    for tick in range(ticks):
        state, decision = decide(
            state, sight_of(split, demand), FLEET, limits, mode=Mode.AUTO, now_s=500.0 + tick * limits.period_s
        )
        made.append(decision)
        if decision.move is not None:
            split = moved(split, decision.move.from_role, decision.move.to_role)
    return split, made


def test_where_no_split_gains_an_idle_worker_goes_to_the_side_that_more_load_would_break_first():
    table = offers(RatioState(), sight_of(MIDDLE, BUSY), BUSY, FLEET, DIRECT, 500.0)
    assert table.best is None or table.best.gain < 0.001  # all prompts are in time as it is
    assert table.reserve is not None
    assert (table.reserve.from_role, table.reserve.to_role) == (Role.DECODE, Role.PREFILL)
    split, made = course(MIDDLE, BUSY, 40)
    assert split.prefill > MIDDLE.prefill
    assert {decision.why for decision in made if decision.move is not None} == {Why.RESERVE}


@pytest.mark.parametrize("limits", [DIRECT, STORE], ids=["direct", "store"])
@pytest.mark.parametrize("start", [MIDDLE, Split(prefill=2, decode=6)])
def test_moves_for_room_come_to_an_end(limits, start):
    settled, _ = course(start, BUSY, 60 if limits is DIRECT else 140, limits=limits)
    _, made = course(settled, BUSY, 80, limits=limits)
    assert [decision for decision in made if decision.move is not None] == []


def test_the_first_move_for_room_waits_for_a_second_tick_and_later_ones_for_a_minute():
    _, made = course(MIDDLE, BUSY, 20)
    assert [decision.why for decision in made[:2]] == [Why.UNCONFIRMED, Why.RESERVE]
    moved_before = RatioState(last_move_s=0.0, last_from=Role.PREFILL, last_to=Role.UNIFIED)
    _, made = course(MIDDLE, BUSY, 20, state=moved_before)
    assert [decision.why for decision in made].index(Why.RESERVE) == DIRECT.patient_ticks - 1


def test_nobody_moves_for_room_that_is_there():
    split, made = course(MIDDLE, QUIET, 20)
    assert split == MIDDLE
    assert {decision.why for decision in made} <= {Why.BALANCED, Why.GAIN_TOO_SMALL}


def test_no_worker_that_would_be_missed_on_its_way_moves_for_room():
    even = demand_of(rate=4 * 0.75 / PROMPT_S, output=600)  # both sides have work for what they have
    table = offers(RatioState(), sight_of(MIDDLE, even), even, FLEET, DIRECT, 500.0)
    assert table.now.decode_load > 0.7
    assert table.reserve is None


def test_no_engine_restarts_for_room():
    table = offers(RatioState(), sight_of(Split(unified=8), BUSY), BUSY, FLEET, DIRECT, 500.0)
    assert table.reserve is None


def test_demands_that_change_faster_than_workers_move_leave_room_alone():
    past = (demand_of(rate=20.0, prompt=500, output=1800), BUSY)
    seen = sight_of(MIDDLE, BUSY, past=past, alarms_s=(380.0, 440.0, 490.0))
    assert offers(RatioState(), seen, BUSY, FLEET, DIRECT, 500.0).reserve is None


def test_no_room_is_made_at_the_cost_of_a_demand_that_was_seen_lately():
    answers = demand_of(rate=20.0, prompt=500, output=1800)  # wants the decode workers that BUSY leaves idle
    for past, moves in ((answers, False), (QUIET, True)):
        seen = sight_of(MIDDLE, BUSY, past=(past,), alarms_s=(100.0,))
        assert (offers(RatioState(), seen, BUSY, FLEET, DIRECT, 500.0).reserve is not None) is moves


def test_ticks_that_ask_for_room_do_not_confirm_a_gain():
    room = RatioState(favoured=(Role.DECODE, Role.PREFILL), favoured_ticks=30, favoured_for_reserve=True)
    more = msgspec.structs.replace(BUSY, rate_rps=1.5 * BUSY.rate_rps, span_s=2.0)
    _, decision = decide(room, sight_of(MIDDLE, more), FLEET, DIRECT, mode=Mode.AUTO, now_s=500.0)
    assert decision.gain > DIRECT.clear_gain
    assert decision.why is Why.UNCONFIRMED
