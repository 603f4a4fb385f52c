"""`pdgate up` with the real SGLang and a model that scales: from nothing to one worker, to the pair, and back."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scaled_up import Up, until

from tests.engines import BOOT_S, model_lines, tiny_model
from tests.processes import engine_python

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(880)]
IDLE_S = 45
SCALING = f"""
[models.tiny.scaling]
max_workers = 3
idle_s = {IDLE_S}
min_prefill = 1
min_decode = 1
"""
LONG = "The quick brown fox jumps over the lazy dog. " * 60
CROWD = 12


def question(text: str, number: int = 0) -> dict:
    return {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": f"{number} {text}"}]}


@pytest.fixture
def up(tmp_path: Path):
    environ = {
        "PDGATE_ENGINE_DIR": str(Path(engine_python()).parents[1]),
        "PDGATE_MODELS_DIR": str(tiny_model().parent),
    }
    stack = Up(tmp_path, model_lines("tiny") + SCALING, engine="sglang", environ=environ)
    try:
        yield stack
    finally:
        stack.stop()


def test_real_workers_come_from_zero_to_one_to_the_pair_and_go_again(up: Up):
    assert up.processes("workers") == []
    first = up.ask(question("Hello"), timeout_s=BOOT_S)
    assert first.status_code == 200, first.text
    assert float(first.headers["x-pdgate-cold-start"]) > 0
    assert first.headers["x-pdgate-path"] == "unified"
    (boot,) = up.events("worker_booted")[:1]
    assert boot["load_s"] > boot["place_s"] >= 0
    assert boot["warm_s"] >= 0
    steps = {(step["role"], step["why"]) for step in up.events("scale_step") if step["step"] == "start"}
    assert ("unified", "cold_start") in steps

    def answered_by_the_pair() -> bool:
        """Ask with a crowd, which keeps the pool awake and is more than the one worker wants to have."""
        with ThreadPoolExecutor(CROWD) as pool:
            answers = list(pool.map(lambda n: up.ask(question(LONG, n), timeout_s=BOOT_S), range(CROWD)))
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        return any(answer.headers["x-pdgate-path"] == "pd" for answer in answers)

    until(answered_by_the_pair, "the pair serves", within_s=BOOT_S, pause_s=2.0)
    steps = {(step["role"], step["why"]) for step in up.events("scale_step") if step["step"] == "start"}
    assert steps == {("unified", "cold_start"), ("prefill", "floor"), ("decode", "floor")}
    assert len(up.events("worker_booted")) == 3
    until(lambda: up.processes("workers") == [], "all of them go", within_s=IDLE_S + 90)
    stops = [step for step in up.events("scale_step") if step["step"] == "stop"]
    assert {step["why"] for step in stops} == {"idle"}
    assert {step["role"] for step in stops} == {"unified", "prefill", "decode"}
