"""`pdgate demo` shows what it says, on a stack of its own, and leaves nothing behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import REPOSITORY


@pytest.mark.e2e
def test_the_demo_loses_a_worker_and_no_text(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
    picture = tmp_path / "demo.svg"
    words = ["demo", "--engine", "timed", "--own", "--svg", str(picture)]
    done = subprocess.run(
        [sys.executable, "-m", "pdgate.cli", *words],
        env={**environ, "PYTHONPATH": str(REPOSITORY), "PDGATE_CATALOG": str(REPOSITORY / "models.toml")},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    screen = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    (killed,) = re.findall(r"\[kill -9 \d+: (decode-\d)\]", screen)
    other = {"decode-1": "decode-2", "decode-2": "decode-1"}[killed]
    assert "finish reason length" in screen
    assert f"ms on {other}" in screen, "the text went on elsewhere"
    cached, prompt = map(int, re.findall(r"(\d+) of its (\d+) tokens were found", screen)[0])
    assert 0 < cached <= prompt
    assert len(re.findall(r"recorded: decode-\d .*reason: operator", screen)) == 2
    assert re.search(r"decode +160 ", screen), "all of the answer is charged, once"
    assert "attempt 2" in screen
    assert "Everything runs again: 1 prefill, 2 decode" in screen
    assert picture.read_text().lstrip().startswith("<svg")
    left = [
        p.info["cmdline"]
        for p in psutil.process_iter(["cmdline"])
        if "pdgate-demo-" in " ".join(p.info["cmdline"] or ())
    ]
    assert left == []
