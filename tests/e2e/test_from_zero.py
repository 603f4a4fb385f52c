"""`pdgate up` with a model that scales: from nothing to one worker, to the pair, and back, with timed workers."""

from pathlib import Path

import psutil
import pytest
from scaled_up import Up, until

from tests.processes import REPOSITORY

pytestmark = pytest.mark.e2e
SCALING = """
[models.smollm2-135m-instruct.scaling]
max_workers = 3
idle_s = 15
min_prefill = 1
min_decode = 1
"""
QUESTION = {"model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def up(tmp_path: Path):
    stack = Up(tmp_path, (REPOSITORY / "models.toml").read_text() + SCALING)
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
