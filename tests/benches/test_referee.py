"""The ratio controller as the mocker's scaling policy: snapshots in, counts out."""

import pytest

from benches.referee.__main__ import GRID, LOADS
from benches.referee.adapter import Engine, RatioScaling
from benches.referee.capped import Capped
from benches.referee.finished import Asked, Underway
from benches.referee.found import Figure, Found, Measured, read
from benches.referee.table import grid_table, release_table
from contracts.lifecycle import Role
from contracts.perf import DEFAULT_LATENCY
from contracts.slo import SloTarget
from tests.processes import REPOSITORY

TARGET = SloTarget(ttft_ms=2000, tpot_ms=20)
ENGINE = Engine(latency=DEFAULT_LATENCY, kv_capacity_tokens=1_000_000, max_running=256, step_tokens=8192)
PROMPT, OUTPUT = 6000, 40
QUIET = {"shape_count": 0, "avg_isl": 0.0, "avg_osl": 0.0, "avg_ttft_ms": 0.0, "avg_itl_ms": 0.0}


def a_pass(worker_id, **of):
    names = ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens", "num_decode_requests")
    more = ("sum_decode_kv_tokens", "num_queued_prefill", "sum_queued_prefill_tokens", "num_queued_decode")
    return {"worker_id": worker_id, "dp_rank": 0, "wall_time": 0.0, **dict.fromkeys((*names, *more), 0), **of}


def snapshot(now_ms, *, prefill=4, decode=4, passes=((), ()), traffic=QUIET, **counts):
    """What the mocker would say."""
    found = {"now_ms": now_ms, "traffic": traffic}
    found["prefill_fpm_snapshots"], found["decode_fpm_snapshots"] = passes
    for role, active in (("prefill", prefill), ("decode", decode)):
        found[f"active_{role}_ids"], found[f"active_{role}_count"] = list(range(active)), active
        for change in ("starting", "draining"):
            found[f"{change}_{role}_count"] = counts.get(f"{change}_{role}", 0)
    return found


def busy_passes(prefill, decode):
    """Prompts that take 0.2 s each, and steps of 8 ms."""
    prompts = [
        a_pass(i, wall_time=0.2, num_prefill_requests=1, sum_prefill_tokens=PROMPT, num_queued_prefill=3)
        for i in range(prefill)
    ]
    steps = [a_pass(i, wall_time=0.008, num_decode_requests=2, sum_decode_kv_tokens=2 * PROMPT) for i in range(decode)]
    return prompts, steps


class Played:
    """A pool that needs more prefill workers than it has: 25 prompts a second are five workers' computing."""

    RATE = 25

    def __init__(self):
        self.requests = [Asked(i, i / self.RATE, PROMPT, OUTPUT) for i in range(400 * self.RATE)]
        self.policy = RatioScaling(self.requests, target=TARGET, engine=ENGINE, switch_s=5.0, tick_ms=40.0)
        self.now_ms, self.ended = self.policy.initial_tick_ms(), 0

    def tick(self, *, prefill=4, decode=4, **counts):
        """Let one request end that arrived 3 s ago, late, and return the decision."""
        due = self.ended < len(self.requests) and self.requests[self.ended].at_s <= self.now_ms / 1000 - 3
        traffic = {
            **QUIET,
            "shape_count": 1,
            "avg_isl": PROMPT,
            "avg_osl": OUTPUT,
            "avg_ttft_ms": 2700.0,
            "avg_itl_ms": 8.0,
        }
        self.ended += due
        decision = self.policy.on_tick(
            snapshot(
                self.now_ms,
                prefill=prefill,
                decode=decode,
                passes=busy_passes(prefill, decode),
                traffic=traffic if due else QUIET,
                **counts,
            )
        )
        assert decision["next_tick_ms"] > self.now_ms
        self.now_ms = decision["next_tick_ms"]
        return decision

    def until_moved(self, within_s=120.0, **counts):
        """Tick until counts change."""
        ends_ms = self.now_ms + 1000 * within_s
        while self.now_ms < ends_ms:
            decision = self.tick(**counts)
            if decision["target_prefill"] is not None or decision["target_decode"] is not None:
                return decision
        raise AssertionError("no move")


def test_a_pool_short_of_prefill_gets_a_worker_of_decode_once_it_has_drained():
    played = Played()
    first = played.until_moved()
    assert (first["target_prefill"], first["target_decode"]) == (None, 3)
    for _ in range(500):  # it drains: nothing may take its place
        waiting = played.tick(decode=3, draining_decode=1)
        assert (waiting["target_prefill"], waiting["target_decode"]) == (None, None)
    then = played.tick(decode=3)
    assert (then["target_prefill"], then["target_decode"]) == (5, None)
    for _ in range(100):  # it starts: one move at a time
        starting = played.tick(decode=3, starting_prefill=1)
        assert (starting["target_prefill"], starting["target_decode"]) == (None, None)
    assert [(move.from_role, move.to_role) for _, move in played.policy.moves] == [(Role.DECODE, Role.PREFILL)]


def test_the_policy_sees_what_has_arrived_and_ended_and_nothing_of_the_future():
    played = Played()
    for _ in range(500):
        played.tick()
    now_s = (played.now_ms - 40) / 1000
    demand = played.policy.sight(snapshot(played.now_ms - 40), now_s).demand
    assert demand.rate_rps == pytest.approx(Played.RATE, rel=0.1)
    assert demand.prefill_ms == pytest.approx(200, rel=0.2)  # learned from passes, not given
    assert len(played.policy.underway) == sum(r.at_s <= now_s for r in played.requests) - played.ended
    assert played.policy.underway.num_guessed == 0


def test_which_requests_ended_is_told_from_their_sums():
    underway = Underway()
    requests = [Asked(i, float(i), prompt, output) for i, (prompt, output) in enumerate(
        ((100, 7), (230, 40), (100, 7), (517, 3), (900, 60))
    )]  # fmt: skip
    for request in requests:
        underway.arrived(request)
    assert {r.number for r in underway.ended(2, 230 + 517, 40 + 3, 10.0)} == {1, 3}
    assert [r.number for r in underway.ended(2, 200, 14, 10.0)] == [0, 2]
    assert (underway.num_told, underway.num_guessed) == (4, 0)
    assert [r.number for r in underway.ended(1, 5, 5, 20.0)] == [4]
    assert (underway.num_told, underway.num_guessed) == (4, 1)


class Wishes:
    """A planner that wants what it is told to want."""

    def __init__(self, *wishes):
        self.wishes = list(wishes)

    def initial_tick_ms(self):
        return 5000.0

    def on_tick(self, snapshot):
        prefill, decode = self.wishes.pop(0)
        return {"target_prefill": prefill, "target_decode": decode, "next_tick_ms": snapshot["now_ms"] + 5000}


def targets(decision):
    return decision["target_prefill"], decision["target_decode"]


def test_a_capped_planner_gets_more_of_one_kind_only_when_the_other_has_drained():
    capped = Capped(Wishes((6, 2), (None, None), (None, None)), 8)
    assert targets(capped.on_tick(snapshot(5000))) == (None, 2)
    assert targets(capped.on_tick(snapshot(10000, decode=2, draining_decode=1))) == (5, None)
    assert targets(capped.on_tick(snapshot(15000, prefill=5, decode=2))) == (6, None)
    assert capped.num_moved == 2 + 1 + 1
    assert capped.num_wished == 2
    assert capped.most_workers == 8


def test_a_wish_that_could_not_be_granted_gives_way_to_a_newer_one():
    capped = Capped(Wishes((6, None), (4, None), (None, None)), 8)
    assert targets(capped.on_tick(snapshot(5000))) == (None, None)
    assert targets(capped.on_tick(snapshot(10000))) == (None, None)
    assert targets(capped.on_tick(snapshot(15000, decode=2))) == (None, None)
    assert capped.num_moved == 0


def test_the_page_has_the_tables_of_the_results():
    found, page = read(), (REPOSITORY / "docs" / "scheduler.md").read_text()
    for release in ("1.4.2", "1.6.1"):
        assert release_table(found, release) in page, "run `make docs`"
    assert grid_table(found) in page, "run `make docs`"


def test_every_load_was_played_by_the_whole_grid_with_no_more_than_the_workers_there_are():
    rows = [rows for rows in read().of_release("1.4.2") for rows in rows]
    assert {row.load for row in rows} == set(LOADS)
    for row in rows:
        assert list(row.planners) == list(GRID)
        assert all(0 <= figure.attainment <= 1 for figure in (row.ratio, *row.statics.values(), *row.planners.values()))
        assert row.ratio.moved == 2 * row.ratio.decisions == 2 * len(row.ratio.changes)


def test_the_verdicts_are_those_of_the_figures():
    def measured(load, ours, theirs, moves):
        ratio = Figure(attainment=ours, goodput_rps=1.0, late=0, slow=0, moved=moves[0])
        planner = Figure(attainment=theirs, goodput_rps=1.0, late=0, slow=0, moved=moves[1])
        worse = Figure(attainment=theirs - 0.1, goodput_rps=1.0, late=0, slow=0, moved=100)
        return Measured(
            release="1", load=load, seed=1, requests=10, ratio=ratio, statics={"4P4D": ratio}, unified={"8192": ratio},
            planners={"bad": worse, "good": planner},
        )  # fmt: skip

    rows = [measured("a", 0.95, 0.80, (2, 40)), measured("b", 0.90, 0.92, (4, 30))]
    found = Found(workers=8, ttft_ms=2000, tpot_ms=20, start_s=5, grid={"bad": {}, "good": {}}, rows=rows)
    table = release_table(found, "1")
    assert "missed; at worst -2.0 points, on b." in table
    assert "met; at best +15.0 points, on a." in table
    assert "missed on b; 6 workers started or stopped against 70 over all loads, 0 flips" in table
    assert "best on average (good), ours is between -2.0 points and +15.0 points." in table
    assert "| a | 1 | **95.0 %** |" in table
    assert "80.0 % good" in table
