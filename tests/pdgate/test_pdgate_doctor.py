"""`pdgate doctor` finds good set-ups good, and says what is wrong with deliberately bad ones."""

import asyncio
import json
import subprocess
import time
from pathlib import Path

import asyncpg
import msgspec
import pytest
from typer.testing import CliRunner

from contracts import keys
from contracts.catalog import read_catalog
from contracts.lifecycle import HandOff, Role, WorkerState
from contracts.perf import DEFAULT_LATENCY
from contracts.resp import redis_client
from contracts.series import Point, add_command
from contracts.wire import Registration, encode
from pdgate.cli import app
from pdgate.services import valkey_binary
from tests.processes import until

OLD = "0002"


@pytest.fixture
def bad_valkey(service_folder: Path):
    """A server that keeps nothing on disk and throws away what it has no room for."""
    path = service_folder / "bad.sock"
    argv = [str(valkey_binary()), "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    argv += ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]
    process = subprocess.Popen(argv, cwd=service_folder, stdout=subprocess.DEVNULL)
    asyncio.run(until(path.exists, 10))
    yield f"unix://{path}"
    process.terminate()
    process.wait(10)


@pytest.fixture
def doctor(database_url, redis_url, catalog_file, monkeypatch, tmp_path):
    """Run the doctor on the test's databases; returns checks (or lines) by name, and the exit code."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PDGATE_CATALOG", str(catalog_file))
    monkeypatch.setenv("PDGATE_DATA", str(tmp_path))

    def run(*words):
        done = CliRunner().invoke(app, ["doctor", "--json", *words], catch_exceptions=False)
        rows = json.loads(done.output)
        return {row.get("check") or row["rule"]: row for row in rows}, done.exit_code

    return run


def worker(name, role, catalog_file, **fields) -> Registration:
    return Registration(
        **{
            "worker_id": name, "epoch": 1, "pid": 1, "address": "127.0.0.1:1", "pool": "tiny", "role": role,
            "state": WorkerState.READY, "engine": "timed", "simulated": True, "model_path": "tiny",
            "model_revision": "r", "dtype": "float32", "kv_dtype": "float32", "page_size": 1, "tp_size": 1,
            "dp_size": 1, "transfer_backend": "none", "bootstrap_host": "127.0.0.1", "bootstrap_port": 1,
            "kv_capacity_tokens": 1, "max_running": 1, "context_tokens": 1, "hand_offs": (HandOff.DIRECT,),
            "catalog_revision": read_catalog(catalog_file).revision, "started_unix_ms": 0,
            "latency": DEFAULT_LATENCY, **fields,
        }
    )  # fmt: skip


def register(redis_url, *workers: Registration, point: Point | None = None) -> None:
    async def write() -> None:
        async with redis_client(redis_url) as redis:
            for one in workers:
                await redis.zadd(keys.pool_workers("tiny"), {one.worker_id: 2**53})
                await redis.set(keys.worker_lease("tiny", one.worker_id), encode(one))
            await redis.set(keys.leader("tiny"), "s:1")
            if point is not None:
                await redis.execute_command(*add_command("tiny", point))

    asyncio.run(write())


def point(**fields) -> Point:
    return Point(
        **{
            "at_unix_ms": int(time.time() * 1000), "prefill": 1, "decode": 1, "unified": 0, "target": "", "why": "",
            "mode": "auto", "rung": "normal", "met": 0, "missed": 0, "structural": 0, "refused": 0, "by_stage": {},
            "num_waiting": 0, "oldest_wait_s": 0, "queued_prefill_tokens": 0, "decode_use": 0, "num_running": 0,
            "pairs": {"open": 1}, "idle_step_ms": 6.8, "idle_first_ms": 14.6, **fields,
        }
    )  # fmt: skip


def test_a_good_set_up_is_found_good(doctor, redis_url, catalog_file):
    pair = worker("p", Role.PREFILL, catalog_file), worker("d", Role.DECODE, catalog_file)
    register(redis_url, *pair, point=point())
    checks, _ = doctor()
    wrong = {name: row for name, row in checks.items() if not row["ok"]}
    assert set(wrong) <= {"PostgreSQL durability"}, "the tests' own PostgreSQL runs without fsync"
    for name in ("Redis append-only file", "Redis eviction", "Redis clock", "PostgreSQL migrations", "pairs of tiny"):
        assert checks[name]["ok"]
    assert "1 of 1 fit; probes: 1 open" in checks["pairs of tiny"]["found"]
    assert "first token 14.6 ms, step 6.8 ms" in checks["targets of tiny, tier default"]["found"]


def test_a_valkey_that_forgets_is_told_what_to_set(doctor, bad_valkey, monkeypatch):
    monkeypatch.setenv("REDIS_URL", bad_valkey)
    checks, code = doctor()
    assert code == 1
    assert "appendonly yes" in checks["Redis append-only file"]["change"]
    assert checks["Redis eviction"]["found"].startswith("maxmemory-policy allkeys-lru")
    assert "noeviction" in checks["Redis eviction"]["change"]
    lines, code = doctor("--tuning")
    assert code == 1
    assert not lines["usage survives a restart of Redis"]["ok"]
    assert not lines["Redis throws nothing away"]["ok"]


def test_a_database_behind_or_ahead_of_this_version_is_told_so(doctor, database_url):
    async def set_to(revision: str) -> str:
        connection = await asyncpg.connect(database_url)
        try:
            before = await connection.fetchval("SELECT version_num FROM alembic_version")
            await connection.execute("UPDATE alembic_version SET version_num = $1", revision)
            return before
        finally:
            await connection.close()

    head = asyncio.run(set_to(OLD))
    try:
        behind, code = doctor()
        asyncio.run(set_to("9999"))
        ahead, _ = doctor()
    finally:
        asyncio.run(set_to(head))
    assert code == 1
    assert f"at {OLD}" in behind["PostgreSQL migrations"]["found"]
    assert "pdgate init" in behind["PostgreSQL migrations"]["change"]
    assert "newer pdgate" in ahead["PostgreSQL migrations"]["change"]


def test_workers_that_do_not_fit_are_named(doctor, redis_url, catalog_file):
    register(
        redis_url,
        worker("p", Role.PREFILL, catalog_file),
        worker("old", Role.DECODE, catalog_file, catalog_revision="other", model_revision="other", page_size=16),
    )
    checks, code = doctor()
    assert code == 1
    assert "restart old" in checks["versions of tiny"]["change"]
    assert "old has tiny@other" in checks["versions of tiny"]["change"]
    assert checks["pairs of tiny"]["change"] == "p and old differ in revision"
    lines, _ = doctor("--tuning")
    assert not lines["all workers are of one kind, and every pair is proven"]["ok"]
    assert not lines["every pool survives the loss of a worker"]["ok"]


def test_a_link_that_lets_nothing_through_is_found(doctor, redis_url, catalog_file):
    pair = worker("p", Role.PREFILL, catalog_file), worker("d", Role.DECODE, catalog_file)
    register(redis_url, *pair, point=point(pairs={"failed": 1}))
    checks, _ = doctor()
    assert "does not get through" in checks["pairs of tiny"]["change"]


def test_a_pool_of_decode_workers_only_cannot_serve(doctor, redis_url, catalog_file):
    register(redis_url, worker("d", Role.DECODE, catalog_file))
    assert "nothing can be served" in doctor()[0]["workers of tiny"]["change"]


def impossible(catalog_file: Path, tmp_path: Path) -> Path:
    file = tmp_path / "impossible.toml"
    file.write_text(catalog_file.read_text().replace("tpot_ms = 100", "tpot_ms = 5").replace("2000", "10"))
    return file


def test_a_target_below_what_an_idle_worker_takes_is_impossible(doctor, redis_url, catalog_file, tmp_path, monkeypatch):
    """By hand, from contracts.perf.DEFAULT_LATENCY: a step 6.7 + 0.07 = 6.8 ms; first token 7.5 + 0.4 + 6.8 = 14.7."""
    file = impossible(catalog_file, tmp_path)
    monkeypatch.setenv("PDGATE_CATALOG", str(file))
    register(redis_url, worker("p", Role.PREFILL, file), worker("d", Role.DECODE, file))
    checks, code = doctor()
    assert code == 1
    change = checks["targets of tiny, tier default"]["change"]
    assert "TPOT 5 ms is below what one decode step takes on an idle worker, 6.8 ms" in change
    assert "TTFT 10 ms is below what a first token takes on an idle worker, 14.7 ms" in change
    assert not doctor("--tuning")[0]["targets can be met"]["ok"]


def test_a_target_below_the_gpus_weight_read_time_is_impossible(doctor, catalog_file, tmp_path, monkeypatch):
    """By hand: 70.55e9 weights of 2 bytes on 4 H100 of 3.35 TB/s each: 141.1e9 / 4 / 3.35e12 s = 10.5 ms."""
    monkeypatch.setenv("PDGATE_CATALOG", str(impossible(catalog_file, tmp_path)))
    checks, _ = doctor("--gpus", "4xH100", "--model", "llama-3-70b")
    row = checks["targets of tiny, tier default"]
    assert "4xH100's weight-read time, 10.5 ms" in row["change"].replace("H100-SXM", "H100")
    assert not row["ok"]


def test_a_server_that_is_not_there_is_one_finding(doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("REDIS_URL", f"unix://{tmp_path}/nothing.sock")
    checks, code = doctor()
    assert code == 1
    assert "REDIS_URL" in checks["Redis"]["change"]


def test_the_tuning_list_has_five_musts_and_seven_shoulds(doctor, redis_url, catalog_file, tmp_path):
    (tmp_path / "decisions").mkdir()
    (tmp_path / "decisions" / "tiny.jsonl").write_text("")
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    register(
        redis_url,
        *(worker(f"w{number}", role, catalog_file) for number, role in enumerate(roles)),
        point=msgspec.structs.replace(point(), pairs={"open": 4}),
    )
    lines, code = doctor("--tuning")
    assert [row["weight"] for row in lines.values()] == ["must"] * 5 + ["should"] * 7
    assert code == 0
    assert {name for name, row in lines.items() if not row["ok"]} == {"two gateways"}
    assert lines["two gateways"]["change"]
