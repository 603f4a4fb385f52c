"""The stack that `pdgate demo` shows: one that runs here already, or one of its own, gone when the demo ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import httpx

from pdgate.connection import data_folder
from pdgate.envfile import read_env
from pdgate.layout import layout_of
from pdgate.preflight import CannotStart
from pdgate.roster import EngineKind

_READY_S: Final[Mapping[EngineKind, float]] = {EngineKind.TIMED: 90.0, EngineKind.SGLANG: 600.0}
_READING_PACE_MS: Final = "40"
"""A timed decode step: slow enough to read along, and to be killed in mid-sentence."""
_STOP_S: Final = 15.0
_NAMES: Final = ("PDGATE_URL", "PDGATE_API_KEY", "DATABASE_URL", "REDIS_URL")


def running_stack() -> Mapping[str, str] | None:
    """Return the variables of the stack that runs on the data folder in use; None when there is none."""
    known = {**read_env(layout_of(data_folder()).env_file), **{n: os.environ[n] for n in _NAMES if n in os.environ}}
    if not all(known.get(name) for name in _NAMES) or not _ready(known["PDGATE_URL"]):
        return None
    return {**known, "PDGATE_DATA": str(data_folder())}


@contextlib.contextmanager
def own_stack(engine: EngineKind) -> Iterator[Mapping[str, str]]:
    """Run a prefill and two decode workers in a throw-away data folder. Raises CannotStart."""
    with tempfile.TemporaryDirectory(prefix="pdgate-demo-") as name, socket.socket() as probe:
        data = Path(name)
        data.chmod(0o755)  # PostgreSQL's own user must get in
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        words = ["up", "--with-caller", "--engine", engine.value, "--prefill", "1", "--decode", "2"]
        words += ["--port", str(port), "--data", str(data), "--no-demo-week"]
        environ = {name: value for name, value in os.environ.items() if name not in _NAMES}
        environ |= {"WORKER_STEP_MS": _READING_PACE_MS} if engine is EngineKind.TIMED else {}
        with (data / "screen").open("ab") as screen:
            process = subprocess.Popen(
                [sys.executable, "-m", "pdgate.cli", *words], env=environ, stdin=subprocess.DEVNULL, stdout=screen,
                stderr=screen, start_new_session=True,
            )  # fmt: skip
        try:
            _wait(process, f"http://127.0.0.1:{port}", data, _READY_S[engine])
            yield {**read_env(data / "env"), "PDGATE_DATA": name}
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, data: Path, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not _ready(url):
        if process.poll() is not None or time.monotonic() > deadline:
            said = (data / "screen").read_text(errors="replace").strip().splitlines()
            raise CannotStart(f"the demo's stack did not become ready: {said[-1] if said else 'it said nothing'}")
        time.sleep(0.1)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
