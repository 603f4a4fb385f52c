"""`pdgate up` as a user runs it, with the timed engine: start, answer, die, come back, stop."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import pytest

from pdgate.envfile import read_env
from tests.processes import free_port

REPOSITORY = Path(__file__).parents[2]
QUESTION = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


class Up:
    """One `pdgate up` on a data folder of its own."""

    def __init__(self, data: Path, port: int) -> None:
        self.data = data
        self.port = port
        self.process: subprocess.Popen[str] | None = None

    def start(self, *more: str) -> None:
        words = ["up", "--engine", "timed", "--port", str(self.port), "--data", str(self.data)]
        words += ["--no-demo-week", *more]
        environ = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
        with (self.data / "screen").open("a") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdgate.cli", *words],
                cwd=REPOSITORY,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                text=True,
                start_new_session=True,
            )

    def ready(self) -> dict[str, str]:
        wait_until(self._is_ready, self)
        wait_until(lambda: "curl " in self.screen(), self)
        return read_env(self.data / "env")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.screen()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=5).status_code == 200
        return False

    def screen(self) -> str:
        return (self.data / "screen").read_text()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, package: str) -> list[psutil.Process]:
        found = []
        for process in self.descendants():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[-2:] == ["-m", package] and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ask(self, variables: dict[str, str]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {variables['PDGATE_API_KEY']}"}
        return httpx.post(f"{variables['PDGATE_URL']}/v1/chat/completions", json=QUESTION, headers=headers, timeout=30)

    def knows(self, rid: str, variables: dict[str, str]) -> bool:
        headers = {"Authorization": f"Bearer {variables['PDGATE_API_KEY']}"}
        return httpx.get(f"{variables['PDGATE_URL']}/v1/requests/{rid}", headers=headers, timeout=10).status_code == 200


def wait_until(check, up: Up, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        logs = {file.name: file.read_text(errors="replace")[-1500:] for file in (up.data / "logs").glob("*.log")}
        assert time.monotonic() < deadline, (up.screen(), logs)
        time.sleep(0.05)


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def up():
    data = Path(tempfile.mkdtemp(prefix="pdgate-up-"))
    data.chmod(0o755)  # PostgreSQL's own user must get in
    up = Up(data, free_port())
    yield up
    if up.process is not None and up.process.poll() is None:
        up.process.kill()
        up.process.wait()
    shutil.rmtree(data, ignore_errors=True)


def test_a_stack_answers_survives_kill_9_and_finds_its_data_again(up):
    up.start()
    variables = up.ready()
    answer = up.ask(variables)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert variables["PDGATE_API_KEY"] in up.screen()
    assert "SIMULATED TEXT" in up.screen()

    groups = json.loads((up.data / "prometheus" / "targets.json").read_text())
    scraped = {group["labels"]["process"]: httpx.get(f"http://{group['targets'][0]}/metrics").text for group in groups}
    assert set(scraped) == {"gateway", "scheduler", "billing", "prefill-1", "decode-1"}
    assert all("process_cpu_seconds_total" in text for text in scraped.values())

    rid = answer.json()["id"].removeprefix("chatcmpl-")
    wait_until(lambda: up.knows(rid, variables), up)
    everything = up.descendants()
    assert len(everything) >= 7, [process.cmdline() for process in everything]
    up.process.kill()
    up.process.wait()
    wait_until(lambda: all(is_gone(process) for process in everything), up, timeout_s=15)
    assert port_is_free(up.port)

    up.start()
    again = up.ready()
    assert again == variables, "keys and URLs are kept"
    assert up.ask(again).status_code == 200
    assert up.knows(rid, again), "the last run's request is still there"

    everything = up.descendants()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(30) == 0
    assert "Stopped." in up.screen()
    wait_until(lambda: all(is_gone(process) for process in everything), up, timeout_s=10)
    assert port_is_free(up.port)


def test_a_process_that_is_killed_comes_back(up):
    up.start()
    variables = up.ready()
    for victim in ("gateway", "scheduler", "billing", "workers"):
        wait_until(lambda victim=victim: up.find(victim), up)
        process = up.find(victim)[0]
        process.kill()
        wait_until(lambda process=process: is_gone(process), up)
        wait_until(lambda victim=victim, old=process: set(up.find(victim)) - {old}, up)
        wait_until(lambda: not port_is_free(up.port) and up.ask(variables).status_code == 200, up)
    assert up.screen().count("(signal SIGKILL); starting it again") == 4


def test_a_port_that_is_taken_is_one_line_and_exit_code_2(up):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", up.port))
        holder.listen()
        up.start()
        assert up.process.wait(30) == 2
    assert up.screen().startswith(f"pdgate: port {up.port} is taken by process {os.getpid()}")
    assert up.screen().count("\n") == 1


def test_a_stack_without_workers_is_refused(up):
    up.start("--prefill", "0")
    assert up.process.wait(30) == 2
    assert up.screen().startswith("pdgate: nothing could serve")
