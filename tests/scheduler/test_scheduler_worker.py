"""Local accounting on top of pushed status, and what the gauges show of it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import Rig, all_ends_heard, eventually

from contracts.environment import SettingsError, from_env
from contracts.lifecycle import FinishReason, HandOff, Role, WorkerState
from contracts.v1 import worker_pb2 as pb
from contracts.wire import Registration
from observability.metrics import Instruments
from scheduler.gauges import Gauges
from scheduler.settings import Settings
from scheduler.worker import Standing, Worker

REGISTRATION = Registration(
    worker_id="w",
    epoch=1,
    pid=1,
    address="127.0.0.1:1",
    pool="tiny",
    role=Role.UNIFIED,
    state=WorkerState.READY,
    engine="timed",
    simulated=True,
    model_path="",
    model_revision="r",
    dtype="",
    kv_dtype="",
    page_size=16,
    tp_size=1,
    dp_size=1,
    transfer_backend="",
    bootstrap_host="",
    bootstrap_port=0,
    kv_capacity_tokens=1000,
    max_running=8,
    context_tokens=100,
    hand_offs=(HandOff.DIRECT,),
    catalog_revision="",
    started_unix_ms=0,
)


def worker() -> Worker:
    made = Worker(REGISTRATION)
    made.stand(Standing.UP)
    return made


def status(**fields) -> pb.Status:
    return pb.Status(
        **{
            "worker_epoch": 1,
            "role": pb.ROLE_UNIFIED,
            "state": pb.WORKER_STATE_READY,
            "kv_capacity_tokens": 1000,
            **fields,
        }
    )


def test_a_submit_counts_at_once_and_a_final_frees_at_once():
    made = worker()
    made.charge((b"r", 1, 0), kv_tokens=300, prefill_tokens=100)
    assert (made.num_requests, made.kv_tokens, made.queued_prefill_tokens) == (1, 300, 100)
    made.prefill_computed((b"r", 1, 0))
    assert (made.kv_tokens, made.queued_prefill_tokens) == (300, 0)
    made.report(status(num_running=1, kv_used_tokens=120))
    assert (made.num_requests, made.kv_tokens) == (1, 300)
    assert made.release((b"r", 1, 0))
    assert (made.num_requests, made.kv_tokens, made.queued_prefill_tokens) == (0, 0, 0)
    assert not made.release((b"r", 1, 0))


def test_its_steps_are_those_of_what_decodes_there_half_way_through():
    made = worker()
    made.charge((b"r", 1, 0), kv_tokens=300, prefill_tokens=100, decoding_kv_tokens=200)
    made.charge((b"q", 1, 0), kv_tokens=50, prefill_tokens=50)  # a prompt that is decoded elsewhere
    assert (made.view().batch, made.view().kv_tokens) == ((1, 200), 350)
    made.report(status(num_running=2, kv_used_tokens=280))
    assert made.view().batch == (1, 280)  # it has outgrown its forecast
    made.report(status(num_running=2, kv_used_tokens=900))
    assert made.view().batch == (1, 350)  # more than was promised is believed once two have shown it
    made.report(status(num_running=3, kv_used_tokens=900))
    made.report(status(num_running=3, kv_used_tokens=900))
    assert made.view().batch == (2, 900)
    made.release_all()
    made.report(status())
    assert made.view().batch == (0, 0)


def test_a_status_shows_work_that_is_not_ours():
    made = worker()
    made.charge((b"r", 1, 0), kv_tokens=300, prefill_tokens=100)
    more = status(num_running=3, num_waiting=1, kv_used_tokens=500, prefill_queue_tokens=150)
    made.report(more)
    assert (made.num_requests, made.kv_tokens) == (1, 300)  # it may have been taken before a Final
    made.report(more)
    assert (made.num_requests, made.kv_tokens, made.queued_prefill_tokens) == (4, 500, 150)


def test_a_worker_that_rejected_is_trusted_again_with_its_next_status():
    made = worker()
    made.rejecting = True
    made.touch()
    assert not made.view().ready
    made.report(status())
    assert made.view().ready


steps = st.lists(
    st.one_of(
        st.tuples(st.just("charge"), st.integers(0, 3), st.integers(0, 500)),
        st.tuples(st.just("computed"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("release"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("report"), st.integers(0, 9), st.integers(0, 900)),
        st.tuples(st.just("release_all"), st.just(0), st.just(0)),
    )
)


@given(steps)
def test_the_account_is_never_below_zero_and_ends_with_the_finals(taken):
    made = worker()
    for what, number, amount in taken:
        key = (b"r", 1, number)
        match what:
            case "charge":
                made.charge(key, kv_tokens=amount, prefill_tokens=amount)
            case "computed":
                made.prefill_computed(key)
            case "release":
                made.release(key)
            case "report":
                made.report(status(num_running=number, kv_used_tokens=amount, prefill_queue_tokens=amount))
            case _:
                made.release_all()
        view = made.view()
        assert min(view.num_requests, view.kv_tokens, view.queued_prefill_tokens) >= 0
        assert view.num_requests >= len(made.charges)
    for key in list(made.charges):
        made.release(key)
    made.report(status())
    made.report(status())
    assert (made.num_requests, made.kv_tokens, made.queued_prefill_tokens) == (0, 0, 0)


async def test_the_gauges_show_the_pool(rig: Rig):
    await rig.pair()
    gateway = await rig.gateway()
    pool = await rig.leading(rig.scheduler())
    request = await gateway.submit()
    await eventually(lambda: request.reason() is FinishReason.LENGTH)
    await eventually(lambda: pool.term.num_pending == 1)
    await all_ends_heard(pool)
    instruments = Instruments()
    Gauges([pool]).register(instruments)
    seen = {
        family.name: {tuple(sorted(s.labels.items())): s.value for s in family.samples}
        for family in instruments.registry.collect()
        if family.type == "gauge"
    }
    here = (("pool", "tiny"),)
    assert seen["pdgate_leader"] == {here: 1.0}
    assert seen["pdgate_inbox_pending"] == {here: 1}
    assert seen["pdgate_pd_ratio_actual"] == seen["pdgate_pd_ratio_config"] == {here: 1.0}
    assert seen["pdgate_prefill_pool_queue_depth"] == {here: 0}
    assert seen["pdgate_decode_pool_utilization"] == {here: 0.0}
    assert set(seen["pdgate_workers"].values()) == {1}


def test_settings_name_the_bad_variable():
    good = {"SCHEDULER_REDIS_URL": "redis://x", "SCHEDULER_CATALOG": "models.toml"}
    assert from_env(Settings, "SCHEDULER_", good).dead_after_s == 1.0
    for name, value in (("SCHEDULER_DEAD_AFTER_S", "0"), ("SCHEDULER_LOG_LEVEL", "loud"), ("SCHEDULER_X", "1")):
        with pytest.raises(SettingsError, match=name):
            from_env(Settings, "SCHEDULER_", {**good, name: value})
    assert msgspec.structs.asdict(from_env(Settings, "SCHEDULER_", good))["id"]
