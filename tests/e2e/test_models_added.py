"""`pdgate models add` on a stack that runs: every process knows it, its workers serve it, and it leaves again."""

import json
import os
import subprocess
import sys

import httpx
import pytest

from pdgate.layout import layout_of
from tests.model_folders import write_model
from tests.pdgate.test_pdgate_stack import Up, up, wait_until  # noqa: F401 - `up` is a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def pdgate(up: Up, *words: str) -> subprocess.CompletedProcess[str]:  # noqa: F811
    environ = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
    return subprocess.run(
        [sys.executable, "-m", "pdgate.cli", *words],
        check=False,
        env={**environ, "PDGATE_DATA": str(up.data)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_model_is_added_served_paused_and_removed_while_the_stack_runs(up: Up, tmp_path):  # noqa: F811
    up.start()
    variables = up.ready()
    folder = write_model(tmp_path / "newcomer", layout_of(up.data).timed_models / "smollm2")
    headers = {"Authorization": f"Bearer {variables['PDGATE_API_KEY']}"}
    question = {"model": "newcomer", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}

    def ask() -> httpx.Response:
        url = f"{variables['PDGATE_URL']}/v1/chat/completions"
        return httpx.post(url, json=question, headers=headers, timeout=30)

    refused = pdgate(up, "models", "add", str(folder))
    assert (refused.returncode, "no_price" in refused.stderr) == (2, True), refused.stderr
    assert "no_weights" in pdgate(up, "models", "add", "nobody/has-this").stderr
    assert "no_memory" in pdgate(up, "models", "add", str(folder), "--profile", "pair").stderr
    assert ask().status_code == 404

    added = pdgate(up, "models", "add", str(folder), "--price", "0.10,0.02,0.40", "--alias", "fresh", "--json")
    assert added.returncode == 0, added.stderr
    assert json.loads(added.stdout)[0]["workers"] == "1 prefill, 1 decode"
    wait_until(lambda: ask().status_code == 200, up)
    answer = ask()
    assert answer.json()["model"] == "newcomer"
    assert answer.headers["x-pdgate-path"] == "pd"
    listed = {row["model"]: row["source"] for row in json.loads(pdgate(up, "models", "list", "--json").stdout)}
    assert listed == {"smollm2-135m-instruct": "file", "newcomer": "added"}
    alive = {row["id"] for row in json.loads(pdgate(up, "workers", "--json").stdout) if row["pool"] == "newcomer"}
    assert alive == {"newcomer-prefill-1", "newcomer-decode-1"}
    assert len(up.find("workers")) == 4
    assert up.knows(answer.json()["pdgate"]["rid"], variables)

    in_use = pdgate(up, "models", "remove", "newcomer")
    assert (in_use.returncode, "it is not paused" in in_use.stderr) == (2, True), in_use.stderr
    assert pdgate(up, "models", "pause", "newcomer", "--drain").returncode == 0
    wait_until(lambda: ask().status_code == 503, up)
    wait_until(lambda: pdgate(up, "models", "remove", "newcomer").returncode == 0, up)
    wait_until(lambda: ask().status_code == 404, up)
    wait_until(lambda: len(up.find("workers")) == 2, up)  # those of the file's model go on
    assert up.ask(variables).status_code == 200
    assert pdgate(up, "models", "remove", "smollm2-135m-instruct").returncode == 2
