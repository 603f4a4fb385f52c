"""Pools part themselves among schedulers; each has one leader, and moves when its share does."""

import time
from collections import Counter
from types import SimpleNamespace

import msgspec
from rig import SLOW_DECODE, TIMING, Rig, eventually
from rig_gateway import POOL

from contracts import keys
from contracts.lifecycle import FinishReason, Role
from scheduler.shares import Shares

QUICK = msgspec.structs.replace(TIMING, hand_back_after_s=0.5)


def seen_by(pool: str, name: str, names: set[str], now_s=lambda: 0.0) -> Shares:
    shares = Shares(None, pool, name, now_s=now_s)
    shares.seen(names)
    return shares


def in_order(names: set[str]) -> list[str]:
    """Return the names as the pool ranks them."""
    return sorted(names, key=lambda name: seen_by(POOL, name, names).rank())


def test_each_pool_has_one_first_and_all_agree_on_the_order():
    names = {f"s{number}" for number in range(5)}
    firsts = Counter()
    for number in range(400):
        ranks = {name: seen_by(f"pool-{number}", name, names).rank() for name in names}
        assert sorted(ranks.values()) == [0, 1, 2, 3, 4]
        firsts[min(ranks, key=ranks.get)] += 1
    assert min(firsts.values()) > 400 / 5 / 2  # about its share


def test_one_that_goes_moves_its_own_pools_only():
    names = {f"s{number}" for number in range(4)}

    def first(pool: str, among: set[str]) -> str:
        return next(name for name in among if seen_by(pool, name, among).rank() == 0)

    for number in range(100):
        before = first(f"pool-{number}", names)
        after = first(f"pool-{number}", names - {"s0"})
        assert before in ("s0", after)


def test_who_held_the_lease_last_does_not_count():
    first, second, third = in_order({"a", "b", "c"})
    assert seen_by(POOL, second, {"a", "b", "c"}).rank(without=first) == 0
    assert seen_by(POOL, third, {"a", "b", "c"}).rank(without=first) == 1


def test_it_is_told_for_how_long_another_has_been_the_first():
    now_s = [100.0]
    first, second = in_order({"a", "b"})
    shares = seen_by(POOL, second, {second}, lambda: now_s[0])
    assert shares.out_of_turn_s == 0
    shares.seen({first, second})
    now_s[0] += 7
    shares.seen({first, second})
    assert shares.out_of_turn_s == 7
    shares.seen({second})
    assert shares.out_of_turn_s == 0


async def test_a_leader_gives_a_pool_up_to_whose_share_it_is_and_nothing_is_lost(rig: Rig):
    worker = await rig.worker(Role.UNIFIED, SLOW_DECODE)
    gateway = await rig.gateway()
    first, second = in_order({"a", "b"})
    early = await rig.leading(rig.scheduler(second, timing=QUICK))
    running = [await gateway.submit(max_tokens=60) for _ in range(4)]
    await eventually(lambda: all(request.tokens for request in running))
    late = rig.scheduler(first, timing=QUICK)
    await eventually(lambda: late.term is not None and late.term.attempts.caught_up)
    assert early.term is None
    assert (await rig.redis.get(keys.leader(POOL))).decode().startswith(f"{first}:")
    fresh = await gateway.submit()
    await eventually(lambda: all(r.reason() is FinishReason.LENGTH for r in (*running, fresh)))
    assert all(len(request.tokens[1, 0]) == 60 for request in running)
    assert len(worker.submitted) == 5  # nothing ran twice
    assert not any(request.lost for request in running)


async def test_a_scheduler_whose_clock_jumps_is_still_there_for_the_others(redis, monkeypatch):
    """Who is there expires by Redis' clock: by one's own, a jump would drop the others, or oneself."""
    here, ahead = Shares(redis, POOL, "here"), Shares(redis, POOL, "ahead")
    await here._beat(keys.schedulers(POOL))
    with monkeypatch.context() as clock:
        clock.setattr("time.time", lambda: 2e9)
        await ahead._beat(keys.schedulers(POOL))
    await here._beat(keys.schedulers(POOL))
    assert here._others == {"ahead"}
    assert ahead._others == {"here"}


async def test_a_scheduler_whose_clock_is_ahead_finds_every_worker_that_has_a_lease(rig: Rig, redis, monkeypatch):
    await rig.worker(Role.UNIFIED)
    real_s = time.time
    monkeypatch.setattr(
        "scheduler.registry.time", SimpleNamespace(time=lambda: real_s() + 120, monotonic=time.monotonic)
    )
    pool = rig.scheduler()
    await eventually(lambda: any(worker.ready for worker in pool.registry.workers()), "the worker is found")
