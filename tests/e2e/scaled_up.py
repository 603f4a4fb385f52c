"""`pdgate up` with models that scale."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil

from pdgate.envfile import read_env
from tests.processes import REPOSITORY, free_port

DEADLINE_S = 120.0


def until(condition, what: str, *, within_s: float = DEADLINE_S, pause_s: float = 0.1):
    """Ask again and again until the condition gives something; return that."""
    began_s = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began_s < within_s, f"did not happen: {what}"
        time.sleep(pause_s)
    return found


class Up:
    """A stack whose one model scales."""

    def __init__(
        self, folder: Path, catalog: str, *, engine: str = "timed", environ: Mapping[str, str] | None = None
    ) -> None:
        """`catalog` is the text of the file; `environ` comes on top of this process's own."""
        self.data, self.port = folder / "data", free_port()
        file = folder / "models.toml"
        file.write_text(catalog)
        self.data.mkdir()
        own = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
        words = ["up", "--engine", engine, "--port", str(self.port), "--data", str(self.data), "--no-demo-week"]
        with (self.data / "screen").open("a") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdgate.cli", *words],
                cwd=REPOSITORY,
                env={**own, "PDGATE_CATALOG": str(file), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )
        until(lambda: "curl " in (self.data / "screen").read_text(), "ready")
        self.env = read_env(self.data / "env")

    def ask(self, body: dict, *, timeout_s: float = 90, **headers: str) -> httpx.Response:
        own = {"Authorization": f"Bearer {self.env['PDGATE_API_KEY']}", **headers}
        url = f"{self.env['PDGATE_URL']}/v1/chat/completions"
        return httpx.post(url, json=body, headers=own, timeout=timeout_s)

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
