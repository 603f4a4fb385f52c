"""`pdgate up` with a model that scales: from nothing to one worker, to the pair, and back, with timed workers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from pdgate.envfile import read_env
from tests.processes import REPOSITORY, free_port

pytestmark = pytest.mark.e2e
SCALING = """
[models.smollm2-135m-instruct.scaling]
max_workers = 3
idle_s = 15
min_prefill = 1
min_decode = 1
"""
QUESTION = {"model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
DEADLINE_S = 120.0


def until(condition, what: str):
    """Ask again and again until the condition gives something; return that."""
    began_s = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began_s < DEADLINE_S, f"did not happen: {what}"
        time.sleep(0.1)
    return found


class Up:
    """A stack whose one model scales."""

    def __init__(self, folder: Path) -> None:
        self.data, self.port = folder / "data", free_port()
        catalog = folder / "models.toml"
        catalog.write_text((REPOSITORY / "models.toml").read_text() + SCALING)
        self.data.mkdir()
        environ = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
        words = ["up", "--engine", "timed", "--port", str(self.port), "--data", str(self.data), "--no-demo-week"]
        with (self.data / "screen").open("a") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdgate.cli", *words],
                cwd=REPOSITORY,
                env={**environ, "PDGATE_CATALOG": str(catalog)},
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )
        until(lambda: "curl " in (self.data / "screen").read_text(), "ready")
        self.env = read_env(self.data / "env")

    def ask(self, body: dict, **headers: str) -> httpx.Response:
        own = {"Authorization": f"Bearer {self.env['PDGATE_API_KEY']}", **headers}
        return httpx.post(f"{self.env['PDGATE_URL']}/v1/chat/completions", json=body, headers=own, timeout=90)

    def processes(self, package: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[-2:] == ["-m", package] and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def events(self, name: str) -> list[dict]:
        lines = (self.data / "logs" / "scheduler.log").read_text().splitlines()
        return [event for line in lines if line.startswith("{") and (event := json.loads(line))["event"] == name]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


@pytest.fixture
def up(tmp_path: Path):
    stack = Up(tmp_path)
    try:
        yield stack
    finally:
        stack.stop()


def test_from_zero_to_one_to_the_pair_and_back_and_a_dead_scheduler_takes_nobody_with_it(up: Up):
    assert up.processes("workers") == []
    hurried = up.ask(QUESTION, **{"x-pdgate-max-wait": "1s"})
    assert hurried.status_code == 503
    assert int(hurried.headers["retry-after"]) > 1
    first = up.ask(QUESTION)
    assert first.status_code == 200
    assert float(first.headers["x-pdgate-cold-start"]) > 0
    assert first.headers["x-pdgate-path"] == "unified"
    until(lambda: len(up.events("worker_booted")) >= 3, "the pair follows")
    before = {process.pid for process in up.processes("workers")}
    (scheduler,) = up.processes("scheduler")
    scheduler.kill()
    until(lambda: [p for p in up.processes("scheduler") if p.pid != scheduler.pid], "another scheduler")
    until(lambda: up.ask(QUESTION).status_code == 200, "it leads")
    assert {process.pid for process in up.processes("workers")} == before
    until(lambda: up.processes("workers") == [], "all of them go")
    again = up.ask(QUESTION)
    assert again.status_code == 200
    assert float(again.headers["x-pdgate-cold-start"]) < 60  # the next leader knows what a start takes
    children = psutil.Process(up.process.pid).children(recursive=True)
    up.stop()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
