"""The stack's files: variables, models, catalogue, what the screen says."""

import asyncio
import json
import os
import socket
import stat

import psutil
import pytest
from tokenizers import Tokenizer

from pdgate.commands import Commands
from pdgate.engine import engine_ready
from pdgate.envfile import read_env, write_env
from pdgate.greeting import greeting
from pdgate.layout import layout_of
from pdgate.models import ensure_model, timed_models
from pdgate.preflight import GB, CannotStart, check_disk, check_port
from pdgate.roster import EngineKind, Options
from pdgate.scraping import Scraping
from pdgate.screen import Progress
from tests.processes import until


def has_ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_env_file_is_private_and_keeps_odd_characters(tmp_path):
    file = tmp_path / "env"
    values = {"PDGATE_API_KEY": "pdg_abc", "DATABASE_URL": "postgresql://pdgate@/pdgate?host=/a b/c"}
    write_env(file, values)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_env(file) == values
    assert read_env(tmp_path / "missing") == {}


def test_the_downloads_are_shared_by_all_data_folders_and_can_be_moved(tmp_path):
    default = layout_of(tmp_path / "a", {})
    assert layout_of(tmp_path / "b", {}).engine == default.engine
    assert default.models.parent == default.engine.parent
    moved = layout_of(tmp_path / "a", {"PDGATE_ENGINE_DIR": str(tmp_path / "e")})
    assert (moved.engine, moved.models) == (tmp_path / "e", tmp_path / "models")
    assert moved.env_file == tmp_path / "a" / "env"


def test_the_timed_tokenizer_is_the_same_in_every_run_and_round_trips(tmp_path):
    first = timed_models(tmp_path / "1", {"smollm2"}) / "smollm2"
    second = timed_models(tmp_path / "2", {"smollm2", "other"}) / "other"
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_file(str(first / "tokenizer.json"))
    text = "What is the capital of France? Größe 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|im_end|>") is not None
    assert list((tmp_path / "1").iterdir()) == [first], "no temporary folder may stay"


def test_an_interrupted_preparation_is_repeated(tmp_path):
    whole = timed_models(tmp_path, {"smollm2"}) / "smollm2"
    (whole / "tokenizer_config.json").unlink()
    timed_models(tmp_path, {"smollm2"})
    assert (whole / "tokenizer_config.json").exists()


async def test_a_model_that_is_nowhere_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(CannotStart, match="put its folder there"):
        await ensure_model("mystery", tmp_path, tmp_path / "engine", Commands(lambda _: None))


async def test_a_command_that_fails_says_its_last_error(tmp_path):
    shown = []
    commands = Commands(shown.append)
    with pytest.raises(CannotStart, match="ERROR: No matching distribution"):
        await commands.run(
            ("sh", "-c", "echo working; echo 'ERROR: No matching distribution found'; exit 1"),
            look=lambda: Progress(step="one"),
        )
    assert shown[0].step == "one"


async def test_a_cancelled_command_is_killed_with_its_children(tmp_path):
    commands = Commands(lambda _: None)
    heard = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            commands.run(
                ("sh", "-c", "sleep 600 & echo $!; wait"), look=lambda: Progress(step="x"), hear=heard.put_nowait
            )
        )
        async with asyncio.timeout(20):
            pid = int(await heard.get())
        running.cancel()
    await until(lambda: has_ended(pid))


def test_no_room_is_one_line_that_says_what_to_do(tmp_path):
    with pytest.raises(CannotStart, match=r"needs 999999999.0 GB free .* free some, or choose another place"):
        check_disk(tmp_path / "not" / "yet", 999_999_999 * GB, "the engine")


def test_a_port_that_is_taken_names_its_holder():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(CannotStart, match=rf"port {port} is taken by process {os.getpid()} .*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_progress_shows_step_megabytes_and_time_left():
    now = Progress(step="engine 2/4: fetching torch", done_bytes=500_000_000, total_bytes=2_000_000_000, elapsed_s=10)
    assert str(now) == "engine 2/4: fetching torch, 500 of about 2000 MB, ETA 30 s"
    assert str(Progress(step="workers are starting", elapsed_s=65)) == "workers are starting, 1 min 05 s"


def test_the_greeting_ends_with_a_curl_and_marks_simulated_text(tmp_path):
    options = Options(engine=EngineKind.TIMED, port=9999)
    lines = greeting(
        options, layout_of(tmp_path, {}), model="tiny", key="pdg_k", sign_in="once", after_s=3.2,
        prometheus=(tmp_path / "prometheus.yml", 5),
    )  # fmt: skip
    text = "\n".join(lines)
    assert f"Metrics of 5 processes, with alerts: prometheus --config.file={tmp_path}/prometheus.yml" in text
    assert "http://127.0.0.1:9999/portal/invite/once" in text
    assert "SIMULATED TEXT" in text
    assert "curl http://127.0.0.1:9999/v1/chat/completions" in text
    assert "Bearer pdg_k" in text


def test_an_engine_made_by_hand_is_used_and_one_that_was_interrupted_is_not(tmp_path):
    engine = tmp_path / "engine"
    assert not engine_ready(engine)
    (engine / "bin").mkdir(parents=True)
    (engine / "bin" / "python").touch()
    assert engine_ready(engine), "no marker: not ours to judge"
    (engine / ".building").touch()
    assert not engine_ready(engine)
    (engine / ".building").unlink()
    (engine / ".complete").write_text("made from other lists")
    assert not engine_ready(engine)


def test_every_process_has_a_metrics_port_of_its_own_and_the_next_start_keeps_it(tmp_path):
    first = Scraping(tmp_path / "p")
    ports = {name: first.listen(name, "pdgate-worker") for name in ("a", "b", "c")}
    first.found("gateway", "pdgate-gateway", "127.0.0.1:8080")
    first.write(tmp_path / "rules")
    assert len(set(ports.values())) == 3
    groups = json.loads(first.targets.read_text())
    assert {group["labels"]["process"]: group["targets"] for group in groups} == {
        **{name: [address] for name, address in ports.items()},
        "gateway": ["127.0.0.1:8080"],
    }
    assert str(first.targets) in first.config.read_text()
    host, _, port = ports["a"].rpartition(":")
    with socket.socket() as other:
        other.bind((host, int(port)))
        other.listen()
        again = Scraping(tmp_path / "p")
        kept = {name: again.listen(name, "pdgate-worker") for name in ("a", "b", "c")}
    assert kept["a"] not in ports.values()
    assert {name: kept[name] for name in "bc"} == {name: ports[name] for name in "bc"}
