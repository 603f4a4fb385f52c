"""The simulated engine against its formulas, worked out step by step."""

import pytest

from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from scheduler.simulator.arrivals import Arrival
from scheduler.simulator.clock import Clock
from scheduler.simulator.engine import Engine, EngineTraits
from scheduler.simulator.job import Job

LATENCY = LatencyModel(
    prefill=PrefillCost(fixed_ms=5.0, per_token_ms=0.1),
    decode=DecodeCost(fixed_ms=10.0, per_request_ms=1.0, per_kv_token_ms=0.01),
    transfer=TransferCost(fixed_ms=1.0, bytes_per_ms=1e6, kv_bytes_per_token=1000),
    kv_capacity_tokens=10_000,
)


class Heard:
    """Collects what an engine says; prompts computed here decode here."""

    def __init__(self, join: bool = True) -> None:
        self.ended: list[Job] = []
        self.granted: list[Job] = []
        self.computed: list[Job] = []
        self._join = join

    def room_granted(self, engine: Engine, job: Job) -> None:
        self.granted.append(job)

    def prefill_done(self, engine: Engine, job: Job) -> None:
        self.computed.append(job)
        if self._join:
            engine.join(job)

    def finished(self, engine: Engine, job: Job) -> None:
        self.ended.append(job)


def engine_with(latency: LatencyModel = LATENCY, join: bool = True) -> tuple[Engine, Clock, Heard]:
    clock, heard = Clock(), Heard(join)
    traits = EngineTraits(mixed_step_ms=30.0, mixing_cost=1.0, join_margin_tokens=0)
    return Engine("w0", latency=latency, traits=traits, clock=clock, events=heard), clock, heard


def job_of(prompt: int, output: int, number: int = 1, tier: str = "default") -> Job:
    job = Job(Arrival(at_s=0.0, prompt_tokens=prompt, output_tokens=output, tier=tier), number)
    job.prefill_left = prompt
    return job


def run(clock: Clock) -> None:
    while clock.step(1e12):
        pass


def decode_ms(latency: LatencyModel, prompt: int, steps: int) -> float:
    """The time of a lone request's steps; the first sees prompt + 1 tokens."""
    return sum(latency.decode.step_ms(1, prompt + 1 + step) for step in range(steps))


def test_a_lone_request_takes_its_prompt_and_its_steps():
    engine, clock, heard = engine_with()
    job = job_of(200, 50)
    engine.prefill(job)
    run(clock)
    assert heard.ended == [job]
    assert job.first_token_ms == pytest.approx(5.0 + 0.1 * 200)
    assert job.end_ms - job.first_token_ms == pytest.approx(decode_ms(LATENCY, 200, 49))
    assert job.tpot_ms == pytest.approx(decode_ms(LATENCY, 200, 49) / 49)


def test_a_request_that_joins_during_a_run_of_steps_waits_for_the_step_in_progress():
    engine, clock, heard = engine_with(join=False)
    first, second = job_of(100, 40, 1), job_of(100, 5, 2)
    engine.reserve(first)
    engine.reserve(second)
    engine.join(first)
    middle = decode_ms(LATENCY, 100, 7) + 1.0  # in the eighth step
    clock.at(middle, engine.join, second)
    run(clock)
    assert second.first_token_ms == pytest.approx(decode_ms(LATENCY, 100, 8))
    # From then on both decode: four steps together, the first with 108 + 101 + ... tokens.
    together = sum(LATENCY.decode.step_ms(2, 109 + step + 101 + step) for step in range(4))
    assert second.end_ms - second.first_token_ms == pytest.approx(together)
    assert heard.ended == [second, first]


def test_prompts_of_one_step_share_its_fixed_cost():
    engine, clock, heard = engine_with(join=False)
    jobs = [job_of(100, 2, number) for number in range(3)]
    clock.at(0.0, lambda: [engine.prefill(job) for job in jobs[:1]])
    clock.at(1.0, lambda: [engine.prefill(job) for job in jobs[1:]])
    run(clock)
    assert [job.prefill_end_ms for job in jobs] == pytest.approx([15.0, 40.0, 40.0])
    assert heard.computed == jobs


def test_a_prompt_beside_decodes_is_computed_in_the_time_that_the_step_leaves():
    engine, clock, _ = engine_with()
    first, second = job_of(100, 200, 1), job_of(1000, 2, 2)
    engine.prefill(first)
    clock.at(100.0, engine.prefill, second)
    run(clock)
    # 30 ms steps: about 12 ms of decode and 18 ms of prompt, so 180 tokens a step and six steps.
    assert 5 * 30 < second.prefill_end_ms - second.prefill_start_ms <= 6 * 30 + 5
    assert first.mixed_share > 0


def test_interactive_prompts_go_before_batch_prompts_from_the_next_step_on():
    engine, clock, heard = engine_with(join=False)
    batch = job_of(30_000, 2, 1, tier="batch")
    big = LatencyModel(**{name: getattr(LATENCY, name) for name in ("prefill", "decode", "transfer")},
                       kv_capacity_tokens=100_000)  # fmt: skip
    engine.latency = big
    interactive = job_of(100, 2, 2)
    clock.at(0.0, engine.prefill, batch)
    clock.at(1.0, engine.prefill, interactive)
    run(clock)
    assert heard.computed == [interactive, batch]
    assert interactive.prefill_start_ms == pytest.approx(5.0 + 0.1 * 8192)


def test_memory_is_granted_in_order_and_only_when_there_is_room():
    engine, clock, heard = engine_with()
    jobs = [job_of(6000, 10, 1), job_of(6000, 10, 2), job_of(10, 10, 3)]
    for job in jobs:
        engine.reserve(job)
    assert heard.granted == jobs[:1]
    engine.join(jobs[0])
    run(clock)
    assert heard.granted == jobs
    assert heard.ended == [jobs[0]]


def test_when_memory_runs_out_the_youngest_gives_way_and_still_ends():
    latency = LatencyModel(
        prefill=LATENCY.prefill, decode=LATENCY.decode, transfer=LATENCY.transfer, kv_capacity_tokens=1000
    )
    engine, clock, heard = engine_with(latency, join=False)
    first, second = job_of(450, 300, 1), job_of(450, 300, 2)
    for job in (first, second):
        engine.reserve(job)
        engine.join(job)
    run(clock)
    assert engine.num_retracted == 1
    assert heard.ended == [first, second]
    assert engine.kv_used_tokens == 0


def test_a_killed_engine_forgets_all_and_takes_new_work():
    engine, clock, heard = engine_with()
    engine.prefill(job_of(100, 1000))
    clock.at(500.0, engine.kill)
    run(clock)
    assert heard.ended == []
    assert engine.kv_used_tokens == 0
    after = job_of(100, 3, 2)
    engine.prefill(after)
    run(clock)
    assert heard.ended == [after]


@pytest.mark.parametrize("when_ms", [1.0, 20.0, 300.0])
def test_an_aborted_request_gives_its_memory_back(when_ms):
    engine, clock, heard = engine_with()
    job, other = job_of(100, 100, 1), job_of(50, 100, 2)
    engine.prefill(job)
    engine.prefill(other)
    clock.at(when_ms, engine.abort, job)
    clock.at(when_ms, lambda: setattr(job, "alive", False))
    heard.prefill_done = lambda owner, done: owner.join(done) if done.alive else owner.release(done)  # type: ignore[method-assign]
    run(clock)
    assert heard.ended == [other]
    assert engine.kv_used_tokens == 0
