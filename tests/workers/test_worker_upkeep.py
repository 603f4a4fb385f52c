"""What a worker does beside serving: its lease, its records, its journal and its settings."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
from redis.asyncio import Redis

from contracts.environment import SettingsError, from_env
from contracts.keys import attempts, pool_workers, worker_lease
from contracts.lifecycle import Phase, Role, WorkerState
from contracts.resp import RespConnection
from contracts.usage import AttemptRecord
from contracts.wire import FIELD, Registration
from tests.workers.peers import timed_pair, unified_bench
from workers.engines.sglang_options import SglangOptions, arguments, environment
from workers.heartbeat import LEASE_MS, Fenced, Heartbeat
from workers.model_files import model_revision
from workers.records import JOURNAL_FILES, Journal, Recorder
from workers.settings import Settings

PROMPT = list(range(40))
DEADLINE_S = 20.0


def record(**fields) -> AttemptRecord:
    values = {
        "rid": "r", "attempt": 1, "sample": 0, "phase": "decode", "worker_id": "w", "worker_epoch": 1, "pool": "tiny",
        "reason": "stop", "prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 2, "compute_ms": 1.0,
        "ended_unix_ms": 5,
    }  # fmt: skip
    return AttemptRecord(**{**values, **fields})


@asynccontextmanager
async def running(part):
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(part.run())
        try:
            yield
        finally:
            task.cancel()


async def until(condition):
    """Poll a condition of Redis, which has no event for it."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


def registration(state: WorkerState = WorkerState.READY) -> Registration:
    return Registration(
        worker_id="w1", epoch=7, pid=1, address="127.0.0.1:1", pool="tiny", role=Role.DECODE, state=state,
        engine="timed", simulated=True, model_path="tiny", model_revision="x", dtype="none", kv_dtype="none",
        page_size=16, tp_size=1, dp_size=1, transfer_backend="timed", bootstrap_host="", bootstrap_port=0,
        kv_capacity_tokens=10, max_running=4, context_tokens=100, hand_offs=(), catalog_revision="c",
        started_unix_ms=7,
    )  # fmt: skip


# -- lease -------------------------------------------------------------------------------------------------


async def test_the_lease_is_written_renewed_on_a_change_and_removed_at_the_end(redis):
    state = WorkerState.READY
    heartbeat = Heartbeat(redis, lambda: registration(state))
    async with running(heartbeat):
        await until(lambda: redis.exists(worker_lease("tiny", "w1")))
        assert 0 < await redis.pttl(worker_lease("tiny", "w1")) <= LEASE_MS
        assert await redis.zscore(pool_workers("tiny"), "w1") > time.time() * 1000
        state = WorkerState.DRAINING
        heartbeat.renew_soon()

        async def renewed():
            raw = await redis.get(worker_lease("tiny", "w1"))
            return msgspec.msgpack.decode(raw, type=Registration).state is WorkerState.DRAINING

        await until(renewed)
    await heartbeat.remove()
    assert not await redis.exists(worker_lease("tiny", "w1"))
    assert await redis.zcard(pool_workers("tiny")) == 0


async def test_a_worker_outlives_its_redis_and_registers_when_it_is_back(valkey_url):
    """The client is pointed at a port where nothing listens, then at the real server."""
    away = Redis.from_url("redis://127.0.0.1:1/0", socket_timeout=None)
    real = Redis.from_url(valkey_url, socket_timeout=None)
    await real.delete(worker_lease("tiny", "w1"))
    heartbeat = Heartbeat(away, registration)
    async with running(heartbeat):

        async def noticed():
            return heartbeat._away

        await until(noticed)
        heartbeat._redis = real
        heartbeat.renew_soon()
        await until(lambda: real.exists(worker_lease("tiny", "w1")))
    await heartbeat.remove()
    await away.aclose()
    await real.aclose()


# -- records -----------------------------------------------------------------------------------------------


@pytest.fixture
async def connection(redis_url):
    opened = RespConnection(redis_url, timeout_s=1.0)
    yield opened
    opened.close()


async def read_records(redis) -> list[AttemptRecord]:
    entries = await redis.xrange(attempts("tiny"))
    return [msgspec.msgpack.decode(fields[FIELD.encode()], type=AttemptRecord) for _, fields in entries]


async def test_every_end_is_recorded_with_the_workers_own_counts(redis, connection):
    recorder = Recorder(connection, "tiny", None)
    async with unified_bench(recorder=recorder) as bench:
        done = await bench.submit(PROMPT, max_tokens=5)
        await bench.gateway.answer(done)
        aborted = await bench.submit(PROMPT, max_tokens=1500)
        await bench.gateway.until(lambda: (aborted, 3) in bench.gateway.answers)
        await bench.gateway.abort(aborted)
        answer = await bench.gateway.answer(aborted)
        await recorder.flush()
        epoch = bench.worker.epoch
    first, second = await read_records(redis)
    assert (first.rid, first.reason, first.prompt_tokens, first.completion_tokens) == (done.rid, "length", 40, 5)
    assert (first.phase, first.worker_epoch, first.pool) == ("unified", epoch, "tiny")
    assert (second.reason, second.completion_tokens) == ("aborted", len(answer.ids))
    held_byte_s = 1024 * first.worker_ms / 1000  # of one token: the engine says 1,024 bytes
    assert 40 * held_byte_s <= first.kv_byte_s <= 45 * held_byte_s


async def test_both_sides_of_a_pair_record_their_part(redis, connection):
    recorder = Recorder(connection, "tiny", None)
    async with timed_pair(recorder=recorder) as pair:
        attempt = await pair.submit(PROMPT, max_tokens=7)
        await pair.decode_gateway.answer(attempt, Phase.DECODE)
        await pair.prefill_gateway.answer(attempt, Phase.PREFILL)
        await recorder.flush()
    counts = {r.phase: (r.prompt_tokens, r.completion_tokens) for r in await read_records(redis)}
    assert counts == {"prefill": (40, 0), "decode": (40, 7)}


async def test_records_wait_in_order_while_redis_is_away(redis, connection):
    recorder = Recorder(RespConnection("redis://127.0.0.1:1/0", timeout_s=1.0), "tiny", None)
    for number in range(3):
        recorder.offer(record(sample=number))
    await recorder.flush()
    recorder._connection = connection
    recorder.offer(record(sample=3))
    await recorder.flush()
    assert [r.sample for r in await read_records(redis)] == [0, 1, 2, 3]


async def test_the_journal_holds_what_the_stream_holds(redis, connection, tmp_path):
    recorder = Recorder(connection, "tiny", Journal(tmp_path, "w"))
    recorder.offer(record(completion_tokens=9))
    await recorder.flush()
    recorder.close()
    lines = (tmp_path / "attempts-w.jsonl").read_text().splitlines()
    assert [json.loads(line)["completion_tokens"] for line in lines] == [9]


async def test_a_full_disk_loses_no_record_of_the_journal(redis, connection, tmp_path):
    journal = tmp_path / "attempts-w1.jsonl"
    journal.symlink_to("/dev/full")
    recorder = Recorder(connection, "tiny", Journal(tmp_path, "w1"))
    records = [record(sample=number) for number in range(3)]
    for one in records[:2]:
        recorder.offer(one)
    await recorder.flush()
    assert len(await read_records(redis)) == 2  # Redis has them meanwhile
    journal.unlink()  # there is room again
    recorder.offer(records[2])
    await recorder.flush()
    recorder.close()
    assert [msgspec.json.decode(line, type=AttemptRecord) for line in journal.read_bytes().splitlines()] == records


def test_lines_that_the_disk_takes_in_part_leave_no_part_behind(tmp_path):
    journal = Journal(tmp_path, "w1")
    journal.write(b"x" * 60 + b"\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="large"):
            journal.write(b"y" * 60 + b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "attempts-w1.jsonl").read_bytes() == b"x" * 60 + b"\n"


def test_the_journal_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.records.JOURNAL_BYTES", 100)
    journal = Journal(tmp_path, "w")
    for number in range(20):
        journal.write(b"%03d" % number + b"x" * 60 + b"\n")
    files = sorted(tmp_path.iterdir())
    assert len(files) <= JOURNAL_FILES
    assert b"019" in b"".join(file.read_bytes() for file in files)


# -- settings ----------------------------------------------------------------------------------------------

REQUIRED = {
    "WORKER_ID": "w",
    "WORKER_POOL": "tiny",
    "WORKER_ROLE": "decode",
    "WORKER_ENGINE": "timed",
    "WORKER_REDIS_URL": "redis://x",
    "WORKER_CATALOG": "models.toml",
}


def test_settings_come_from_the_environment():
    settings = from_env(Settings, "WORKER_", {**REQUIRED, "WORKER_STEP_MS": "5", "WORKER_MAX_TOTAL_TOKENS": "999"})
    assert settings.role is Role.DECODE
    assert (settings.latency.decode.fixed_ms, settings.latency.kv_capacity_tokens) == (5.0, 999)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("WORKER_ROLE", "boss"), ("WORKER_STEP_MS", "-1"), ("WORKER_BOOTSTRAP_PORT", "70000"), ("WORKER_COLOUR", "red")],
)
def test_a_bad_setting_is_named(variable, value):
    with pytest.raises(SettingsError, match=variable):
        from_env(Settings, "WORKER_", {**REQUIRED, variable: value})


def test_the_model_revision_changes_with_config_and_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "notes.md").write_text("no part of it")
    first = model_revision(tmp_path)
    (tmp_path / "notes.md").write_text("still no part of it")
    assert model_revision(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert model_revision(tmp_path) != first


def options(**fields) -> SglangOptions:
    values = {
        "role": Role.PREFILL, "model_path": "/m", "bootstrap_host": "10.0.0.1", "bootstrap_port": 0,
        "peer_timeout_s": 60.0, "faults_file": "/f",
    }  # fmt: skip
    return SglangOptions(**{**values, **fields})


def test_nothing_of_the_cpu_profile_reaches_an_accelerator():
    chosen = arguments(options(), accelerator=True, bootstrap_port=9)
    variables = environment(options(), accelerator=True, inherited={"PYTHONPATH": "/p"})
    assert not {"device", "attention_backend", "dtype", "max_total_tokens", "sleep_on_idle"} & set(chosen)
    assert chosen["disaggregation_transfer_backend"] == "mooncake"
    assert not {"PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "PDGATE_SGLANG_FAULTS_FILE"} & set(variables)


def test_the_cpu_profile_keeps_what_it_inherits_and_yields_to_further_options():
    variables = environment(options(), accelerator=False, inherited={"PYTHONPATH": "/p"})
    assert variables["PYTHONPATH"].endswith("/workers/engines/sglang_cpu:/p")
    chosen = arguments(options(further={"page_size": 16, "dtype": "bfloat16"}), accelerator=False, bootstrap_port=9)
    assert (chosen["page_size"], chosen["dtype"], chosen["disaggregation_bootstrap_port"]) == (16, "bfloat16", 9)


# -- the process -------------------------------------------------------------------------------------------


async def test_the_process_registers_serves_and_leaves_on_sigterm(redis, redis_url, catalog_file):
    environ = {
        **os.environ, **REQUIRED, "WORKER_REDIS_URL": redis_url, "WORKER_CATALOG": str(catalog_file),
        "WORKER_ROLE": "prefill",
    }  # fmt: skip
    process = subprocess.Popen(  # noqa: ASYNC220 - starting is quick, and waiting is done in a thread
        [sys.executable, "-m", "workers"], env=environ, stderr=subprocess.PIPE
    )
    try:
        raw = await until(lambda: redis.get(worker_lease("tiny", "w")))
        lease = msgspec.msgpack.decode(raw, type=Registration)
        assert (lease.state, lease.simulated, lease.context_tokens) == (WorkerState.READY, True, 2048)
        assert lease.pid == process.pid
        assert lease.bootstrap_port > 0
        assert int(lease.address.rpartition(":")[2]) > 0
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
        assert not await redis.exists(worker_lease("tiny", "w"))
    finally:
        process.kill()
        process.communicate()


def test_a_pool_that_the_catalogue_does_not_have_stops_the_process_with_one_line(catalog_file):
    environ = {**os.environ, **REQUIRED, "WORKER_POOL": "huge", "WORKER_CATALOG": str(catalog_file)}
    done = subprocess.run(
        [sys.executable, "-m", "workers"], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("WORKER_POOL: ")
    assert done.stderr.count("\n") == 1


async def test_of_two_processes_with_one_id_the_later_keeps_the_lease_and_the_other_stops(redis):
    early = Heartbeat(redis, registration)
    late = Heartbeat(redis, lambda: msgspec.structs.replace(registration(), epoch=8, pid=2))
    await early._write()
    await late._write()
    with pytest.raises(Fenced, match="epoch 8"):
        await early._write()
    await early.remove()  # not its own any more
    assert msgspec.msgpack.decode(await redis.get(worker_lease("tiny", "w1")), type=Registration).epoch == 8


async def test_a_second_process_does_not_start_while_the_first_is_alive_but_takes_over_from_a_dead_one(redis):
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await dead.wait()
    first = msgspec.structs.replace(registration(), node="here", pid=os.getpid())
    second = msgspec.structs.replace(first, epoch=9, pid=1)
    async with running(Heartbeat(redis, lambda: first)):
        await until(lambda: redis.exists(worker_lease("tiny", "w1")))
        with pytest.raises(Fenced, match="in use"):
            await Heartbeat(redis, lambda: second).claim()
    gone = msgspec.structs.replace(first, epoch=8, pid=dead.pid)
    await Heartbeat(redis, lambda: gone)._write()
    await Heartbeat(redis, lambda: second).claim()
