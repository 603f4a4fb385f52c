"""A change of leaders is no change of load: what an autoscaler's next term knows."""

import math
import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.lifecycle import Role
from contracts.perf import DecodeCost, LatencyModel, PrefillCost, TransferCost
from contracts.slo import SloTarget
from scheduler.policy.arrivals import BIN_S, ArrivalTrend, Counted
from scheduler.policy.demand import DemandSample, OutputMoments
from scheduler.policy.foresight import Foresight
from scheduler.policy.handover import HOLDS_S, Handover
from scheduler.policy.headcount import Bounds, Ground, Member, ScaleState, Start
from scheduler.policy.plateau import Plateau
from scheduler.policy.queueing import Corrections, Fleet, Split
from scheduler.simulator.arrivals import Lengths
from scheduler.simulator.elastic import AutoScaler, Seen
from scheduler.simulator.pilot import FleetSight

PROMPTS = Lengths(median=3000, p90_over_median=2.5, highest=16_000)
ANSWERS = OutputMoments(mean=300.0, mean_square=150_000.0)
FLEET = Fleet(
    latency=LatencyModel(
        prefill=PrefillCost(fixed_ms=20, per_token_ms=0.25, per_token_pair_ms=2e-6),
        decode=DecodeCost(fixed_ms=20, per_request_ms=0.2, per_kv_token_ms=2e-4),
        transfer=TransferCost(fixed_ms=2, bytes_per_ms=2e7, kv_bytes_per_token=327_680),
        kv_capacity_tokens=200_000,
    ),
    target=SloTarget(ttft_ms=4000, tpot_ms=60),
)
SPLIT = Split(prefill=3, decode=2)
RATE_RPS = 2.0
"""Which five workers serve well, and four just not."""


def forecast(kind):
    return ANSWERS


class Pool:
    """Five workers under steady load, and the terms of those who lead it."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.now_s = self.next_s = 0.0
        self.steps = []
        self.scaler = self.term()

    def term(self):
        bounds, ground = Bounds(max_workers=20, to_zero=False), Ground(free={"": 20})
        return AutoScaler(FLEET, bounds, boot_s=60.0, ground=ground)

    def run(self, until_s, *, led=True):
        """Go on until then; without a leader those who arrive wait for the next one."""
        waited = []
        while self.now_s < until_s:
            self.now_s += 5.0
            while self.next_s <= self.now_s:
                tokens = PROMPTS.draw(self.rng)
                ms = FLEET.latency.prefill.ms(tokens)
                sample = DemandSample(kind="k", prompt_tokens=tokens, prefill_ms=ms, feasible=ms < 4000)
                waited.append((self.next_s, sample))
                self.next_s += self.rng.expovariate(RATE_RPS)
            if not led:
                continue
            for at_s, sample in waited:
                self.scaler.arrived(at_s, sample)
            waited.clear()
            plan = self.scaler.tick(self.now_s, self.seen())
            self.steps += [(self.now_s, step) for step in plan.steps]
        return waited

    def seen(self):
        roles = [(Role.PREFILL, SPLIT.prefill), (Role.DECODE, SPLIT.decode)]
        members = [Member(worker_id=f"{r}{n}", role=r, ready=True) for r, count in roles for n in range(count)]
        sight = FleetSight(
            split=SPLIT, moving=False, donors=(), waiting_in_time=0, num_waiting=0, waiting_work_ms=0.0, ready=()
        )
        return Seen(members=members, sight=sight, num_running=1, forecast=forecast, pressure=Corrections())

    def change(self, *, gap_s, told):
        """Another leads after a gap; whoever waited arrives at once."""
        kept = self.scaler.handover(self.now_s, forecast)
        waited = self.run(self.now_s + gap_s, led=False)
        self.scaler = self.term()
        self.scaler.state = ScaleState(last_up_s=self.now_s)
        if told:
            raw = msgspec.msgpack.encode(kept)
            self.scaler.restore(msgspec.msgpack.decode(raw, type=Handover), self.now_s, ago_s=gap_s)
        else:
            self.scaler.state = msgspec.structs.replace(self.scaler.state, foresight=kept.foresight)
        for _, sample in waited:
            self.scaler.arrived(self.now_s, sample)


def test_a_change_of_leaders_under_steady_load_starts_and_stops_nobody():
    pool = Pool(seed=5)
    pool.run(300.0)
    for gap_s in (5.0, 20.0, 0.0):
        pool.change(gap_s=gap_s, told=True)
        pool.run(pool.now_s + 60.0)
    assert pool.steps == []


def test_a_term_that_is_told_nothing_takes_those_who_waited_for_it_for_a_higher_load():
    pool = Pool(seed=5)
    pool.run(300.0)
    pool.change(gap_s=10.0, told=False)
    pool.run(pool.now_s + 30.0)
    assert {type(step) for _, step in pool.steps} == {Start}


def test_the_next_term_knows_for_how_long_load_has_been_the_same():
    pool = Pool(seed=5)
    pool.run(120.0)
    plateau = pool.scaler.state.plateau
    pool.change(gap_s=10.0, told=True)
    assert pool.scaler.state.plateau == plateau  # the simulation has one clock
    assert pool.scaler.state.last_up_s == pool.now_s  # who stops somebody has watched them


def test_what_requests_ask_for_holds_until_as_many_were_seen_and_no_longer_than_they_were_looked_at():
    pool = Pool(seed=6)
    pool.run(200.0)
    pool.change(gap_s=5.0, told=True)
    began_s, before = pool.now_s, pool.scaler.handover(pool.now_s, forecast).demand
    pool.run(began_s + 60.0)
    assert pool.scaler.handover(pool.now_s, forecast).demand.prefill_ms == before.prefill_ms
    pool.run(began_s + 200.0)
    later = pool.scaler.handover(pool.now_s, forecast).demand
    assert later.prefill_ms != before.prefill_ms
    assert later.span_s == before.span_s


def test_an_old_handover_teaches_what_was_learned_and_nothing_of_the_load():
    learned = Foresight(ended=100.0, missed=3.0)
    old = Handover(
        foresight=learned,
        arrivals=Counted(bins=(20,) * 180, open=3, open_s=2.0),
        demand=None,
        plateau=Plateau(rate_rps=2.0, error_rps=0.03, since_s=-7200.0),
    )
    scaler = Pool(seed=1).term()
    scaler.restore(old, 50.0, ago_s=HOLDS_S + 1)
    assert scaler.state.foresight == learned
    assert scaler.state.plateau is None
    assert scaler.handover(50.0, forecast).arrivals.bins == ()


# -- the trend ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    bins=st.lists(st.integers(0, 50), max_size=200),
    open_=st.integers(0, 50),
    open_s=st.floats(0, BIN_S, exclude_max=True),
    now_s=st.floats(0, 1e6),
    ago_s=st.floats(0, HOLDS_S),
)
def test_arrivals_are_those_that_were_counted_each_once_and_then_none(bins, open_, open_s, now_s, ago_s):
    trend, told = ArrivalTrend(), Counted(bins=tuple(bins[-180:]), open=open_, open_s=open_s)
    trend.restore(told, now_s, ago_s=ago_s)
    got, passed = trend.counted(now_s), math.floor((open_s + ago_s) / BIN_S + 1e-9)
    assert abs((got.open_s - open_s - ago_s + BIN_S / 2) % BIN_S - BIN_S / 2) < 1e-3
    every = [*told.bins, told.open]
    assert len(got.bins) in {min(180, len(told.bins) + n) for n in (passed - 1, passed, passed + 1)}
    if len(told.bins) + passed < 179:
        assert [*got.bins, got.open][: len(every)] == every
        assert sum(got.bins) + got.open == sum(every)


def test_a_trend_that_goes_on_elsewhere_forecasts_what_it_would_have_here():
    one, rng, at_s = ArrivalTrend(), random.Random(3), 0.0
    while at_s < 2400.0:
        one.observe(at_s)
        at_s += rng.expovariate(2.0)
    other = ArrivalTrend()
    other.restore(one.counted(2400.0), 17.5, ago_s=0.0)
    assert other.forecast(17.5, ahead_s=90.0) == one.forecast(2400.0, ahead_s=90.0)
    for second in range(1, 60):
        one.observe(2400.0 + second)
        other.observe(17.5 + second)
    assert other.forecast(77.5, ahead_s=90.0) == one.forecast(2460.0, ahead_s=90.0)
