"""Steady load: what counts as a step, and how its table shows it."""

from types import SimpleNamespace

from benches.autoscale import SETTLING_S, STEADY_RUNS, STEADY_S, steady_row
from benches.autoscale_report import table_of_steady_load


def course(*events_s, share=0.98):
    events = [(at_s, "forecast", "2P2D0U", "start 1") for at_s in events_s]
    return SimpleNamespace(events=events, hours=20.0, result=SimpleNamespace(attainment_total=share))


def test_steps_count_once_the_pool_has_found_its_size_and_until_load_ends():
    one = course(60.0, SETTLING_S, SETTLING_S + 5)
    row = steady_row("chat", [one, course(STEADY_S, STEADY_S + 5, share=0.96)])
    assert (row["events_while_settling"], row["events"], row["runs"]) == (2, 2, 2)
    assert row["attainment"] == 0.97
    assert row["worker_hours"] == 40.0
    assert "| chat | 4 | 97.0 % | 2 in 2 times 3.5 h, 2 before |" in table_of_steady_load({"steady": {"chat": row}})


def test_each_kind_is_played_under_each_seed():
    assert len({kind for kind, _ in STEADY_RUNS}) == 3
    assert len(STEADY_RUNS) == len(set(STEADY_RUNS)) == 9
