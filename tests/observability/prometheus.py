"""Prometheus itself for tests: the one on this machine, or Debian's package unpacked beside the engine."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.processes import REPOSITORY, free_port

TOOLS = REPOSITORY / ".pdgate" / "tools"
START_S = 60.0


def prometheus_program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`, fetching the package when it is missing."""
    found = shutil.which(name) or shutil.which(name, path=str(TOOLS / "usr/bin"))
    if found:
        return found
    TOOLS.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "download", "-q", "prometheus"]
    if subprocess.run(download, cwd=TOOLS, check=False).returncode and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-q"], check=True, timeout=120)
        subprocess.run(download, cwd=TOOLS, check=True, timeout=120)
    for package in TOOLS.glob("prometheus_*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(TOOLS)], check=True, timeout=60)
    return str(TOOLS / "usr/bin" / name)


WINDOW = re.compile(r"\[(\d+)([mh])\]")


def _shortened(window: "re.Match[str]", faster: int) -> str:
    return f"[{int(window[1]) * {'m': 60, 'h': 3600}[window[2]] // faster}s]"


class Prometheus:
    """A running server and what it answers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Return the `data` of an API answer."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10)
        answer.raise_for_status()
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        return self.get("query", query=expression)["result"]

    def alerts(self) -> dict[str, str]:
        """Return the state of every active alert by name."""
        return {alert["labels"]["alertname"]: alert["state"] for alert in self.get("alerts")["alerts"]}


@contextlib.contextmanager
def running_prometheus(
    folder: Path, targets: Mapping[str, list[str]], *, interval_s: int = 1, faster: int = 1
) -> Iterator[Prometheus]:
    """Run Prometheus with our rules over `targets` (job -> addresses), all windows of time divided by `faster`."""
    rules = REPOSITORY / "observability" / "rules"
    jobs = "".join(
        f"  - job_name: {job}\n    static_configs: [{{targets: [{', '.join(repr(a) for a in addresses)}]}}]\n"
        for job, addresses in targets.items()
    )
    (folder / "rules").mkdir(parents=True)
    for file in rules.glob("*.yml"):
        text = file.read_text().replace("interval: 15s", f"interval: {interval_s}s")
        (folder / "rules" / file.name).write_text(WINDOW.sub(lambda found: _shortened(found, faster), text))
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {interval_s}s, evaluation_interval: {interval_s}s}}\n"
        f"rule_files: [rules/*.yml]\nscrape_configs:\n{jobs}"
    )
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                prometheus_program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/-/ready", timeout=2).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Prometheus did not start:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(10)
