"""Old workers are replaced one after the other, and the pool serves all the while."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy_scaling import BOUNDS, FLEET, LIMITS, ROOM, demand, members, seen

from contracts.lifecycle import Role
from scheduler.policy.headcount import Bounds, Ground, Member, ScaleState, Start, Stop, WhyScale, serves, split_of
from scheduler.policy.queueing import Split
from scheduler.policy.scaling import scale

SPLITS = st.builds(
    lambda pairs, more, unified: Split(
        prefill=pairs and pairs + more[0], decode=pairs and pairs + more[1], unified=unified
    ),
    st.integers(0, 3),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.integers(0, 3),
).filter(lambda split: split.total > 0)


class Played:
    """A pool of old workers, and what a tick each five seconds makes of it: what is asked for serves a tick later.

    Who is stopped holds its place for `drain_ticks` more.
    """

    def __init__(self, split, *, room=30, bounds=BOUNDS, drain_ticks=0):
        self.there = members(split.prefill, split.decode, split.unified, old=True)
        self.room, self.bounds = room, bounds
        self.drain_ticks, self.leaving = drain_ticks, []
        self.seen = [list(self.there)]
        self.places = [len(self.there)]
        self.why = []
        self.made = 0
        self.state, self.now_s = ScaleState(), 10_000.0

    def tick(self, **more):
        self.leaving = [ticks - 1 for ticks in self.leaving if ticks > 1]
        free = Ground(free={"": self.room - len(self.there) - len(self.leaving)})
        about = {"ground": free, "num_leaving": len(self.leaving), **more}
        sight = seen(list(self.there), num_running=1, **about)
        self.state, plan = scale(self.state, sight, self.bounds, FLEET, LIMITS, self.now_s)
        self.now_s += LIMITS.period_s
        self.why.append(plan.why)
        self.there = [msgspec.structs.replace(m, ready=True) for m in self.there]
        for step in plan.steps:
            if isinstance(step, Stop):
                self.there = [m for m in self.there if m.worker_id != step.worker_id]
                self.leaving += [self.drain_ticks] if self.drain_ticks else []
            else:
                self.made += 1
                self.there.append(Member(worker_id=f"new-{self.made}", role=step.role, ready=False))
        self.seen.append(list(self.there))
        self.places.append(len(self.there) + len(self.leaving))
        return plan

    def until_done(self):
        for _ in range(60 * (1 + self.drain_ticks)):
            if not any(m.old for m in self.there):
                return
            self.tick()
        raise AssertionError(f"old ones are left: {self.why[-3:]} {self.there}")


def generations(there):
    ready = [m for m in there if m.ready]
    return split_of([m for m in ready if m.old]), split_of([m for m in ready if not m.old])


@given(SPLITS, st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_whatever_the_mix_every_old_one_is_replaced_and_one_generation_serves_at_every_moment(split, drain_ticks):
    played = Played(split, drain_ticks=drain_ticks)
    played.until_done()
    assert split_of(played.there) == split
    for there in played.seen:
        old, new = generations(there)
        assert serves(old) or serves(new)
        assert bool(old.prefill) == bool(old.decode)  # nobody idles for the lack of its other half
        assert split.total <= len(there)
    assert max(played.places) <= split.total + (2 if split.prefill else 1)


@given(SPLITS, st.integers(0, 2), st.integers(0, 2))
@settings(max_examples=200, deadline=None)
def test_with_little_room_one_generation_still_serves_and_who_cannot_be_replaced_stays(split, spare, drain_ticks):
    played = Played(split, room=split.total + spare, drain_ticks=drain_ticks)
    for _ in range(40 * (1 + drain_ticks)):
        played.tick()
    for there in played.seen:
        old, new = generations(there)
        assert serves(old) or serves(new)
    assert max(played.places) <= split.total + spare
    if any(m.old for m in played.there):
        assert split_of(played.there) == split
        assert played.why[-1] is WhyScale.RENEWAL_HELD


def test_two_unified_workers_are_replaced_without_room_for_a_third():
    played = Played(Split(unified=2), room=2)
    played.until_done()
    assert min(len(there) for there in played.seen) == 1


def test_the_only_pair_is_kept_where_there_is_no_room_for_another():
    played = Played(Split(prefill=1, decode=1), room=2)
    plan = played.tick()
    assert plan.why is WhyScale.RENEWAL_HELD
    assert plan.steps == ()


def test_floors_hold_where_old_ones_go_first():
    played = Played(Split(unified=2), room=2, bounds=Bounds(max_workers=2, floor=Split(unified=2)))
    for _ in range(5):
        assert played.tick().why is WhyScale.RENEWAL_HELD


def test_new_workers_that_do_not_stay_up_replace_nobody():
    played = Played(Split(unified=2))
    for _ in range(5):
        plan = played.tick(failing=True)
        assert plan.why is WhyScale.RENEWAL_HELD
        assert plan.steps == ()


def test_an_idle_pool_goes_instead_of_being_renewed():
    sight = seen(members(unified=2, old=True), quiet_s=10_000.0)
    _, plan = scale(ScaleState(), sight, BOUNDS, FLEET, LIMITS, 10_000.0)
    assert plan.why is WhyScale.IDLE
    assert len(plan.steps) == 2


def test_more_workers_for_more_requests_come_first_and_stay_when_all_are_new():
    played = Played(Split(prefill=1, decode=1))
    played.tick()  # a pair beside the old one
    played.tick()
    played.tick()
    held = played.state.renewing
    rate = seen([], 6.0).rate
    plan = played.tick(demand=demand(6.0), rate=rate, ground=ROOM)
    more = [step.role for step in plan.steps if isinstance(step, Start)]
    if held is None:  # the pair was replaced already
        assert plan.steps
        return
    assert {step.why for step in plan.steps} == {WhyScale.FORECAST}
    assert played.state.renewing.total == held.total + len(more)


def test_workers_that_others_started_are_left_alone():
    own = members(unified=1, old=True)
    others = [Member(worker_id="by-hand", role=Role.UNIFIED, ready=True, ours=False)]
    state, steps = ScaleState(last_up_s=10_000.0), []
    there = own + others
    for tick in range(6):
        state, plan = scale(state, seen(there, num_running=1), BOUNDS, FLEET, LIMITS, 10_000.0 + 5 * tick)
        for step in plan.steps:
            steps.append(step)
            if isinstance(step, Stop):
                there = [m for m in there if m.worker_id != step.worker_id]
            else:
                there = [*there, Member(worker_id="new", role=step.role, ready=True)]
    assert [step.worker_id for step in steps if isinstance(step, Stop)] == ["unified-0"]
    assert {m.worker_id for m in there} == {"by-hand", "new"}
