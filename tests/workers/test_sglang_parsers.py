"""SGLang's parsers through our AnswerParser: chunk borders change nothing, wherever they are."""

import json
import os
import subprocess

import pytest

from pdgate.libibverbs import library_environment
from tests.processes import REPOSITORY, engine_python
from workers.engines.sglang_options import CPU_FOLDER

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

PARIS = ["weather", {"city": "Paris"}]
EXPECTED = {  # (content, reasoning, calls)
    "hermes": ("Ich schaue nach: €漢字🙂.", "", [["weather", {"city": "Köln 🙂", "days": 2}]]),
    "hermes, two": ("", "", [PARIS, ["now", {}]]),
    "qwen25, two": ("Two.", "", [PARIS, ["weather", {"city": "Rome"}]]),
    "llama3": ("", "", [PARIS]),
    "mistral": ("", "", [PARIS]),
    "reasoning, then a call": ("", "Où est-ce? €\nOk.", [["now", {}]]),
    "reasoning, then text": ("Yes: 1 < 2 <b>.", "1 < 2, </thin no", []),
    "no call": ("a < b <tool_ca is no call: 漢字", "", []),
}


def test_an_answer_cut_at_any_point_is_read_the_same():
    environment = {
        **os.environ,
        **library_environment(REPOSITORY / "missing"),
        "PYTHONPATH": f"{REPOSITORY}:{CPU_FOLDER}",
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [engine_python(), "-m", "tests.workers.parser_splits"],
        capture_output=True,
        cwd=REPOSITORY,
        env=environment,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results) == set(EXPECTED)
    for name, readings in results.items():
        assert len(readings) == 1, (name, readings)
        [reading] = readings
        calls = [[function, arguments] for _, function, arguments in reading["calls"]]
        assert (reading["text"], reading["reasoning"], calls) == EXPECTED[name]
        assert len({call_id for call_id, _, _ in reading["calls"]}) == len(calls)
