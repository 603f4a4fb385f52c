import pytest

from contracts.lifecycle import (
    REQUEST_NEXT,
    WORKER_NEXT,
    FinishReason,
    IllegalMove,
    RequestState,
    WorkerState,
    move_request,
    move_worker,
)


def test_every_state_has_a_row():
    assert set(REQUEST_NEXT) == set(RequestState)
    assert set(WORKER_NEXT) == set(WorkerState)


def test_an_ended_request_stays_ended():
    for ended in (RequestState.ABORTED, RequestState.FAILED):
        assert not REQUEST_NEXT[ended]


def test_a_finished_request_may_only_run_again():
    """Its answer may be whole in a worker that its gateway cannot reach."""
    assert REQUEST_NEXT[RequestState.FINISHED] == {RequestState.QUEUED}


def test_every_live_request_can_be_aborted():
    for state in (RequestState.QUEUED, RequestState.PREFILLING, RequestState.DECODING):
        assert move_request(state, RequestState.ABORTED) is RequestState.ABORTED


def test_a_busy_worker_cannot_switch_without_draining():
    with pytest.raises(IllegalMove, match="a ready worker cannot become switching"):
        move_worker(WorkerState.READY, WorkerState.SWITCHING)


def test_every_live_worker_can_stop():
    for state in set(WorkerState) - {WorkerState.STOPPED}:
        assert move_worker(state, WorkerState.STOPPED) is WorkerState.STOPPED


def test_only_stop_and_length_are_whole_answers():
    assert {r for r in FinishReason if r.complete} == {FinishReason.STOP, FinishReason.LENGTH}
