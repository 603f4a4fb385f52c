"""The command line: help everywhere, data as JSON, faults in one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from redis import Redis
from typer.testing import CliRunner

from contracts import keys
from contracts.lifecycle import HandOff, Role, WorkerState
from contracts.wire import Registration, encode
from pdgate.cli import app

REPOSITORY = Path(__file__).parents[2]


def every_command(command, path=()):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from every_command(child, (*path, name))


COMMANDS = list(every_command(typer.main.get_command(app)))


@pytest.fixture
def run(database_url, redis_url, catalog_file, monkeypatch, tmp_path):
    """Run one command against the test's own databases and return what it printed."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PDGATE_CATALOG", str(catalog_file))
    monkeypatch.setenv("PDGATE_DATA", str(tmp_path))

    def run_one(*words):
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return run_one


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(path):
    result = CliRunner().invoke(app, [*path, "--help"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_the_commands_users_lean_on_are_there():
    outside_names = {"doctor", "keys", "models", "orgs", "prices", "reconcile", "up", "usage", "workers"}
    assert outside_names <= {path[0] for path in COMMANDS if path}


def test_an_organisation_gets_keys_that_can_be_revoked(run, redis_url):
    org = json.loads(run("orgs", "create", "Acme", "--json"))[0]
    assert "Acme" in run("orgs", "list")
    made = json.loads(run("keys", "create", "--org", "Acme", "--concurrent", "3", "--json"))
    assert re.fullmatch(r"pdg_\w{43}", made["key"])
    listed = json.loads(run("keys", "list", "--org", org["id"], "--json"))
    assert [(row["id"], row["state"]) for row in listed] == [(made["id"], "active")]
    assert made["key"] not in json.dumps(listed), "a secret is shown once"
    shard = Redis.from_url(redis_url, decode_responses=True)
    assert shard.hget(keys.key_states(org["id"]), made["id"]) == "active:1"
    run("keys", "revoke", made["id"], "--org", "Acme")
    assert shard.hget(keys.key_states(org["id"]), made["id"]) == "revoked:2"
    assert json.loads(run("keys", "list", "--org", "Acme", "--json"))[0]["state"] == "revoked"
    shard.close()


def test_models_are_listed_with_prices_and_targets(run):
    (row,) = json.loads(run("models", "list", "--json"))
    assert (row["model"], row["pool"], row["decode"], row["hand_off"]) == ("tiny", "tiny", "0.40", "direct")
    assert row["tiers"] == ["default: TTFT 2000 ms, TPOT 100 ms"]
    assert "1 model(s)" in run("models", "check")


def test_live_workers_are_listed(run, redis_url):
    assert json.loads(run("workers", "--json")) == []
    lease = Registration(
        worker_id="decode-1", epoch=7, pid=42, address="127.0.0.1:5000", pool="tiny", role=Role.DECODE,
        state=WorkerState.READY, engine="timed", simulated=True, model_path="tiny", model_revision="r", dtype="float32",
        kv_dtype="float32", page_size=1, tp_size=1, dp_size=1, transfer_backend="none",
        bootstrap_host="", bootstrap_port=0,
        kv_capacity_tokens=1, max_running=1, context_tokens=1, hand_offs=(HandOff.DIRECT,), catalog_revision="c",
        started_unix_ms=0,
    )  # fmt: skip
    client = Redis.from_url(redis_url)
    client.zadd(keys.pool_workers("tiny"), {"decode-1": 2**53, "gone": 2**53})
    client.set(keys.worker_lease("tiny", "decode-1"), encode(lease), px=60_000)
    client.close()
    (row,) = json.loads(run("workers", "--json"))
    expected = {
        "id": "decode-1",
        "role": "decode",
        "state": "ready",
        "epoch": 7,
        "pid": 42,
        "address": "127.0.0.1:5000",
    }
    assert {name: row[name] for name in expected} == expected


@pytest.mark.usefixtures("run")
def test_the_doctor_finds_this_machine_fit():
    printed = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False).output
    found = {row["check"]: row["ok"] for row in json.loads(printed)}
    assert found["Valkey"]
    assert found["PostgreSQL"]
    assert found["catalogue"]


def fault(*words, environ=None):
    """Run the real command; return its exit code and what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "pdgate.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **(environ or {})},
        check=False,
    )
    return done.returncode, done.stderr


def test_without_a_stack_the_line_says_how_to_start_one(tmp_path):
    code, told = fault("orgs", "list", environ={"PDGATE_DATA": str(tmp_path)})
    assert code == 2
    assert re.fullmatch(r"pdgate: DATABASE_URL is not set .* start a stack with `pdgate up`\n", told)


def test_a_stack_that_is_down_is_said_in_one_line(tmp_path):
    url = f"postgresql://pdgate@/pdgate?host={tmp_path}"
    code, told = fault("orgs", "list", environ={"DATABASE_URL": url})
    assert code == 2
    assert re.fullmatch(r"pdgate: the stack does not answer .*\n", told)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("models = 3", "models"),
        ("[models.x]\ntokenizer = 't'\ncontext_tokens = 99", "price"),
        ("[models.x", "table declaration"),
        ("[models]\n", "there are no models"),
    ],
)
def test_a_bad_catalogue_is_one_line_that_names_the_place(tmp_path, text, word):
    file = tmp_path / "models.toml"
    file.write_text(text)
    code, told = fault("models", "check", "--file", str(file))
    assert code == 2
    assert told.count("\n") == 1
    assert str(file) in told
    assert word in told


def test_tables_show_unknown_values_as_a_dash(capsys):
    from pdgate.output import show

    class Row(msgspec.Struct):
        name: str
        expires: str | None

    show([Row(name="a", expires=None)], as_json=False)
    assert re.search(r"a\s+-", capsys.readouterr().out)


def test_keys_can_be_scoped_rotated_and_imported(run, tmp_path):
    run("orgs", "create", "Imports")
    scoped = ["--model", "tiny", "--network", "10.0.0.0/8", "--sees-workers"]
    made = json.loads(run("keys", "create", "--org", "Imports", *scoped, "--json"))
    rotated = json.loads(run("keys", "rotate", made["id"], "--org", "Imports", "--overlap-hours", "1", "--json"))
    assert (rotated["id"], rotated["key"] == made["key"]) == (made["id"], False)
    plain, hashed = "sk-from-elsewhere-0001", "ab" * 32
    lines = [{"key": plain, "limits": {"requests_per_minute": 5}}, {"sha256": hashed, "name": "batch"}]
    file = tmp_path / "keys.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    taken = json.loads(run("keys", "import", str(file), "--org", "Imports", "--json"))
    assert [(row["name"], row["prefix"], row["rotate"]) for row in taken] == [
        ("imported", "sk-f…", True),
        ("batch", "", True),
    ]
    assert plain not in run("keys", "list", "--org", "Imports", "--json")


def test_an_import_says_which_line_is_wrong(run, tmp_path, monkeypatch, capsys):
    run("orgs", "create", "Wrong lines")
    file = tmp_path / "keys.jsonl"
    file.write_text('{"key": "sk-good-one-000000"}\n{"sha256": "abc"}\n')
    result = CliRunner().invoke(app, ["keys", "import", str(file), "--org", "Wrong lines"])
    assert "line 2" in str(result.exception)
    assert json.loads(run("keys", "list", "--org", "Wrong lines", "--json")) == []


def test_an_organisation_and_a_model_can_be_held_and_resumed(run):
    org = json.loads(run("orgs", "create", "Held", "--json"))[0]["id"]
    held = json.loads(run("orgs", "suspend", "Held", "--drain", "--reason", "unpaid", "--json"))
    assert [(row["kind"], row["id"], row["mode"], row["drain"]) for row in held] == [("org", org, "suspended", True)]
    run("orgs", "read-only", "Held")
    run("models", "suspend", "tiny")
    listed = json.loads(run("orgs", "held", "--json"))
    assert {(row["kind"], row["mode"]) for row in listed} == {("org", "read_only"), ("model", "suspended")}
    run("orgs", "resume", "Held")
    run("models", "resume", "tiny")
    assert json.loads(run("orgs", "held", "--json")) == []


def test_a_project_gets_limits_and_scopes(run):
    run("orgs", "create", "Projects")
    made = json.loads(run("keys", "create", "--org", "Projects", "--json"))
    words = ["--limits", '{"tokens_per_minute": 9}', "--scopes", '{"strictest_ttft_ms": 100}', "--json"]
    (row,) = json.loads(run("orgs", "set-project", "Projects", made["project"], *words))
    assert (row["limits"], row["scopes"], row["keys"]) == ({"tokens_per_minute": 9}, {"strictest_ttft_ms": 100}, 1)
    result = CliRunner().invoke(app, ["orgs", "set-project", "Projects", "proj_none"])
    assert "no project" in str(result.exception)
    (row,) = json.loads(run("keys", "set", made["id"], "--org", "Projects", *words))
    assert (row["id"], row["scopes"]) == (made["id"], {"strictest_ttft_ms": 100})
    (row,) = json.loads(run("orgs", "set-limits", "Projects", "--limits", '{"concurrent_requests": 2}', "--json"))
    assert (row["limits"], row["keys"]) == ({"concurrent_requests": 2}, 1)
    result = CliRunner().invoke(app, ["orgs", "set-limits", "Projects", "--limits", '{"concurent_requests": 2}'])
    assert "concurent_requests" in str(result.exception)
