"""Many models on few machines: room goes to where it is worth more, and no machine is loaded over and over."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.packing import Handover, PackingLimits, Stake, first_taker, handover, worth

LIMITS = PackingLimits()


def stake(pool, **more):
    return Stake(**{"pool": pool, "resident_s": 1000.0, **more})


def test_the_pool_that_is_worth_least_gives():
    stakes = [
        stake("busy", keeps_rps=2.0, spare=1),
        stake("quiet", keeps_rps=0.1, spare=1),
        stake("asking", gains_rps=1.0, wants=1),
    ]
    assert handover(stakes, LIMITS) == Handover(giver="quiet", taker="asking")


@pytest.mark.parametrize(
    "giver",
    [
        {"keeps_rps": 0.6},  # worth too nearly as much
        {"resident_s": 119.0},  # has hardly served
        {"spare": 0},  # at its floor
    ],
)
def test_nobody_gives_what_should_stay(giver):
    stakes = [stake("giver", **{"keeps_rps": 0.1, "spare": 1, **giver}), stake("asking", gains_rps=1.0, wants=1)]
    assert handover(stakes, LIMITS) is None


def test_room_goes_to_who_gains_most_and_to_nobody_who_gains_nothing():
    stakes = [stake("one", gains_rps=0.5, wants=1), stake("two", gains_rps=0.7, wants=1)]
    assert first_taker(stakes).pool == "two"
    assert handover([stake("idle", spare=1), stake("asking", gains_rps=0.0, wants=1)], LIMITS) is None


class Machines:
    """Pools over a few machines, second by second: who waits starts where room is, or where it is given."""

    BOOT_S = 20

    def __init__(self, pools, machines, *, limits=LIMITS):
        self.pools, self.machines, self.limits = pools, machines, limits
        self.since = {pool: [] for pool in pools}  # when each worker began to serve
        self.waiting = Counter()
        self.waited_s = Counter()
        self.seen = {pool: [] for pool in pools}
        self.loads = Counter()
        self.served = Counter()
        self.now_s = 0

    def second(self, arrivals):
        self.now_s += 1
        for pool in arrivals:
            self.waiting[pool] += 1
            self.seen[pool].append(self.now_s)
        for pool in self.pools:
            ready = sum(at_s <= self.now_s for at_s in self.since[pool])
            if ready and self.waiting[pool]:
                self.served[pool] += self.waiting.pop(pool)
        if self.now_s % 5:
            return
        stakes = [self.stake(pool) for pool in self.pools]
        moved = handover(stakes, self.limits)
        if moved is not None:
            self.since[moved.giver].pop()
        taker = first_taker(stakes)
        if taker is not None and sum(map(len, self.since.values())) < self.machines:
            self.since[taker.pool].append(self.now_s + self.BOOT_S)
            self.loads[taker.pool] += 1

    def stake(self, pool):
        recent = sum(at_s > self.now_s - 120 for at_s in self.seen[pool])
        workers = len(self.since[pool])
        keeps, gains = worth(recent / 120, self.waiting[pool], workers, clear_s=60)
        youngest = max(self.since[pool], default=self.now_s)
        return Stake(
            pool=pool,
            keeps_rps=keeps,
            gains_rps=gains,
            wants=int(workers == 0 and self.waiting[pool] > 0),
            spare=sum(at_s <= self.now_s for at_s in self.since[pool]),
            resident_s=max(0, self.now_s - youngest),
        )


@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 2**32 - 1), st.floats(0.005, 0.5))
@settings(max_examples=60, deadline=None)
def test_no_machine_is_loaded_more_often_than_once_per_residence(pools, machines, seed, rate):
    rng, names = random.Random(seed), [f"m{number}" for number in range(pools)]
    there = Machines(names, machines)
    for _ in range(1800):
        there.second([name for name in names if rng.random() < rate])
    most_per_machine = 1 + 1800 // LIMITS.residence_s
    assert sum(there.loads.values()) <= machines * most_per_machine


def test_two_models_that_are_asked_in_turn_share_a_machine_without_thrashing():
    there = Machines(["a", "b"], 1)
    for second in range(3600):
        there.second(["a" if (second // 10) % 2 else "b"] if second % 10 == 0 else [])
    assert sum(there.loads.values()) <= 3600 // (LIMITS.residence_s + Machines.BOOT_S) + 1
    eager = Machines(["a", "b"], 1, limits=PackingLimits(residence_s=0.0, margin=0.0))
    for second in range(3600):
        eager.second(["a" if (second // 10) % 2 else "b"] if second % 10 == 0 else [])
    assert sum(eager.loads.values()) > 3 * sum(there.loads.values())  # what the two limits are for


def test_a_busy_model_keeps_its_machine_and_idle_ones_give_theirs():
    there, rng = Machines(["busy", "idle", "new"], 2), random.Random(1)
    for second in range(1200):
        arrivals = ["busy"] if rng.random() < 0.9 else []
        if second == 5:
            arrivals.append("idle")
        if second >= 600 and rng.random() < 0.2:
            arrivals.append("new")
        there.second(arrivals)
    assert there.loads == {"busy": 1, "idle": 1, "new": 1}
    assert there.served["new"] > 0
