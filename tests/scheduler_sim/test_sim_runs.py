"""Whole simulated runs: what must hold whatever the policy."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.lifecycle import HandOff, Role, WorkerState
from contracts.slo import SloTarget
from scheduler.policy.blame import Stage
from scheduler.policy.demand import Forecast
from scheduler.policy.queueing import Split
from scheduler.policy.ratio import Move
from scheduler.simulator.arrivals import Lengths, Workload, poisson
from scheduler.simulator.pilot import FleetSight, StaticPilot
from scheduler.simulator.play import Policy, play
from scheduler.simulator.setup import Failure, Placer, Setup
from scheduler.simulator.simulation import Simulation

TARGET = SloTarget(ttft_ms=2000, tpot_ms=20)
LOAD = Workload(
    prompt=Lengths(median=1500, p90_over_median=2.5),
    output=Lengths(median=120, p90_over_median=2.0, highest=2000),
    rate_rps=12.0,
)


PAIRS = Split(prefill=2, decode=2)


def setup_of(split: Split = PAIRS, **other: object) -> Setup:
    return msgspec.structs.replace(Setup(split=split, target=TARGET), **other)


class ScriptedPilot(StaticPilot):
    """Makes given moves at given seconds."""

    period_s = 1.0

    def __init__(self, *script: tuple[float, Move]) -> None:
        self._script = list(script)
        self.stages: list[Stage | None] = []

    def ended(self, now_s: float, request: int, stage: Stage | None, output_tokens: int | None) -> None:
        self.stages.append(stage)

    def tick(self, now_s: float, sight: FleetSight, forecast: Forecast) -> Move | None:
        if self._script and now_s >= self._script[0][0]:
            return self._script.pop(0)[1]
        return None


def move(worker_id: str, from_role: Role, to_role: Role) -> Move:
    return Move(worker_id=worker_id, from_role=from_role, to_role=to_role)


@settings(max_examples=15, deadline=None)
@given(
    split=st.sampled_from([Split(prefill=1, decode=1), Split(unified=2), Split(prefill=2, decode=1, unified=1)]),
    hand_off=st.sampled_from(list(HandOff)),
    placer=st.sampled_from(list(Placer)),
    rate=st.sampled_from([2.0, 15.0, 60.0]),
    seed=st.integers(0, 5),
)
def test_every_request_ends_once_and_leaves_nothing_behind(split, hand_off, placer, rate, seed):
    load = msgspec.structs.replace(LOAD, rate_rps=rate)
    arrivals = list(poisson(load, duration_s=15, seed=seed))
    result, simulation = play(arrivals, setup_of(split, hand_off=hand_off, placer=placer, seed=seed), Policy.STATIC)
    assert result.requests == len(arrivals) == len(simulation.jobs)
    assert all(job.done or job.refused for job in simulation.jobs.values())
    assert sum(result.missed_by_stage.values()) == result.feasible - round(result.attainment_total * result.feasible)
    for worker in simulation.workers.values():
        assert not worker.jobs
        assert worker.queued_prefill_tokens == 0
        assert worker.engine.kv_used_tokens == 0
        assert worker.view().kv_tokens == 0


def test_an_unloaded_pair_serves_at_the_speed_of_its_parts():
    load = msgspec.structs.replace(LOAD, rate_rps=0.2, prompt=Lengths(median=1000), output=Lengths(median=50))
    setup = setup_of(Split(prefill=1, decode=1))
    result, simulation = play(list(poisson(load, duration_s=60, seed=1)), setup, Policy.STATIC)
    latency = setup.latency
    expected_ms = setup.network_ms + latency.prefill.ms(1000) + latency.transfer.ms(1000)
    assert result.ttft_ms.p50 == pytest.approx(expected_ms, abs=0.02)
    assert result.tpot_ms.p50 == pytest.approx(latency.decode.step_ms(1, 1025), abs=0.02)
    assert result.attainment == 1.0
    assert {job.stage for job in simulation.jobs.values()} == {Stage.NONE}


def test_the_same_seed_gives_the_same_run():
    arrivals = list(poisson(LOAD, duration_s=20, seed=2))
    setup = setup_of(Split(prefill=2, decode=1, unified=1))
    assert play(arrivals, setup, Policy.AUTO)[0] == play(arrivals, setup, Policy.AUTO)[0]


def test_a_flip_under_direct_waits_for_the_drain_switches_and_forgets_the_cache():
    load = msgspec.structs.replace(LOAD, shared_prefixes=1, prefix_tokens=1024)
    pilot = ScriptedPilot((5.0, move("w0", Role.PREFILL, Role.DECODE)))
    simulation = Simulation(setup_of(), pilot)
    states = []
    original = simulation.workers["w0"].become
    simulation.workers["w0"].become = lambda state: (states.append((simulation.clock.now_ms, state)), original(state))  # type: ignore[method-assign]
    simulation.run(poisson(load, duration_s=30, seed=1))
    (at_drain, drained), (at_switch, switched), (at_ready, ready) = states
    assert (drained, switched, ready) == (WorkerState.DRAINING, WorkerState.SWITCHING, WorkerState.READY)
    assert at_switch >= at_drain
    assert at_ready - at_switch == pytest.approx(simulation.setup.switch_s * 1000)
    assert str(simulation.split()) == "1P3D0U"
    assert len(simulation.workers["w0"].cache) == 0
    assert all(job.done for job in simulation.jobs.values())


def test_a_drain_that_takes_too_long_is_given_up():
    load = msgspec.structs.replace(LOAD, output=Lengths(median=3000), rate_rps=3.0)
    pilot = ScriptedPilot((5.0, move("w2", Role.DECODE, Role.PREFILL)))
    simulation = Simulation(setup_of(drain_cap_s=3.0), pilot)
    simulation.run(poisson(load, duration_s=30, seed=1))
    assert simulation.cancelled_moves == 1
    assert str(simulation.split()) == "2P2D0U"
    assert all(job.done for job in simulation.jobs.values())


def test_a_label_under_store_changes_at_once_and_running_work_goes_on():
    pilot = ScriptedPilot((5.0, move("w2", Role.DECODE, Role.PREFILL)))
    simulation = Simulation(setup_of(hand_off=HandOff.STORE), pilot)
    simulation.run(poisson(LOAD, duration_s=30, seed=1))
    assert str(simulation.split()) == "3P1D0U"
    assert all(job.done for job in simulation.jobs.values())
    assert {worker.state for worker in simulation.workers.values()} == {WorkerState.READY}


@pytest.mark.parametrize("worker_id", ["w0", "w2"])
@pytest.mark.parametrize("hand_off", list(HandOff))
def test_a_dead_worker_costs_what_streamed_from_it_and_no_more(worker_id, hand_off):
    failure = Failure(at_s=10.0, worker_id=worker_id, down_s=5.0)
    pilot = ScriptedPilot()
    simulation = Simulation(setup_of(hand_off=hand_off, failures=(failure,)), pilot)
    simulation.run(poisson(msgspec.structs.replace(LOAD, rate_rps=28.0), duration_s=30, seed=1))
    jobs = simulation.jobs.values()
    lost = [job for job in jobs if job.stage is Stage.LOST]
    assert all(job.done for job in jobs if job.stage is not Stage.LOST)
    assert all(job.first_token_ms >= 0 for job in lost)
    assert (len(lost) > 0) == (worker_id == "w2")
    assert any(job.attempt == 2 and job.done for job in jobs)
    assert len(pilot.stages) == len(simulation.jobs)
    assert all(not worker.jobs and worker.engine.kv_used_tokens == 0 for worker in simulation.workers.values())


def test_prefixes_seen_before_are_not_computed_again():
    load = msgspec.structs.replace(LOAD, shared_prefixes=1, prefix_tokens=4096, prompt=Lengths(median=100))
    arrivals = list(poisson(load, duration_s=20, seed=1))
    cached, _ = play(arrivals, setup_of(), Policy.STATIC)
    plain, _ = play([msgspec.structs.replace(a, blocks=()) for a in arrivals], setup_of(), Policy.STATIC)
    assert cached.ttft_ms.p50 < plain.ttft_ms.p50 / 3


def test_waiting_for_decode_memory_is_blamed_on_decode_and_for_prompts_on_prefill():
    long_answers = msgspec.structs.replace(LOAD, rate_rps=25.0, output=Lengths(median=2000), prompt=Lengths(median=300))
    decode_bound, _ = play(list(poisson(long_answers, duration_s=60, seed=1)), setup_of(), Policy.STATIC)
    long_prompts = msgspec.structs.replace(LOAD, rate_rps=15.0, prompt=Lengths(median=8000), output=Lengths(median=10))
    prefill_bound, _ = play(list(poisson(long_prompts, duration_s=60, seed=1)), setup_of(), Policy.STATIC)
    assert max(decode_bound.missed_by_stage, key=lambda s: decode_bound.missed_by_stage[s]) == "decode_memory"
    assert max(prefill_bound.missed_by_stage, key=lambda s: prefill_bound.missed_by_stage[s]) == "prefill_queue"


def test_the_ratio_controller_leaves_a_wrong_first_split():
    load = msgspec.structs.replace(LOAD, prompt=Lengths(median=6000, p90_over_median=2.0), rate_rps=14.0)
    arrivals = list(poisson(load, duration_s=180, seed=1))
    wrong = setup_of(Split(prefill=2, decode=6))
    stuck, _ = play(arrivals, wrong, Policy.STATIC)
    moved, simulation = play(arrivals, wrong, Policy.AUTO)
    assert stuck.attainment_total < 0.7
    assert moved.attainment_total > stuck.attainment_total + 0.15
    assert simulation.split().prefill >= 4
    assert all(
        later - earlier >= 5.0 for (earlier, _), (later, _) in zip(simulation.moves, simulation.moves[1:], strict=False)
    )
