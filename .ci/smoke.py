"""Starts the stack as a user does, asks it one question with the official client, reads the bill, stops it."""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil

ROOT = Path(__file__).resolve().parent.parent
READY_WITHIN_S = {"timed": 120, "sglang": 420}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(engine: str, port: int, data: Path) -> Iterator[dict[str, str]]:
    """Run `make up` while the block runs; give the variables it wrote."""
    arguments = f"--engine {engine} --port {port} --data {data} --no-demo-week"
    make = subprocess.Popen(
        ["make", "-s", "up", f"ARGS={arguments}"], cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + READY_WITHIN_S[engine]
        while not ready(port):
            assert make.poll() is None, f"make up ended with {make.returncode}"
            assert time.monotonic() < deadline, f"not ready within {READY_WITHIN_S[engine]} s"
            time.sleep(0.2)
        lines = (data / "env").read_text().splitlines()
        yield {name: value.strip("'") for name, _, value in (line.partition("=") for line in lines) if value}
    finally:
        asked = time.monotonic()
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGINT)
        make.wait(20)
        print(f"stopped in {time.monotonic() - asked:.1f} s")


def ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def ask(variables: dict[str, str]) -> str:
    """Stream one answer and return its text."""
    client = openai.OpenAI(base_url=variables["PDGATE_URL"] + "/v1", api_key=variables["PDGATE_API_KEY"])
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=32,
        temperature=0,
    )
    chunks = list(stream)
    usage = chunks[-1].usage
    assert usage is not None, chunks[-1]
    assert usage.completion_tokens > 0, usage
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def meters(data: Path) -> dict[str, int]:
    """Return the tokens of each meter of the one request, once `pdgate usage` has it."""
    environ = {**os.environ, "PDGATE_DATA": str(data)}
    command = [ROOT / ".venv/bin/pdgate", "usage", "--since", "1h", "--json"]
    deadline = time.monotonic() + 15
    while True:
        told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout
        requests = json.loads(told)["requests"]
        if requests:
            return {meter["meter"]: meter["tokens"] for meter in requests[0]["meters"]}
        assert time.monotonic() < deadline, f"no usage: {told}"
        time.sleep(0.2)


def survivors(data: Path) -> list[str]:
    """Return the processes that still name the data folder."""
    left = []
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        words = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
        if process.pid != os.getpid() and any(str(data) in word for word in words):
            left.append(f"{process.pid} {' '.join(process.info['cmdline'] or ())}")
    return left


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=tuple(READY_WITHIN_S), required=True)
    engine = parser.parse_args().engine
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pdgate-smoke-") as name:
        data = Path(name)
        data.chmod(0o755)  # PostgreSQL's own user must get in
        started = time.monotonic()
        with running(engine, port, data) as variables:
            print(f"ready after {time.monotonic() - started:.1f} s")
            text = ask(variables)
            print(f"answer: {text!r}")
            assert engine == "timed" or "Paris" in text, text
            billed = meters(data)
            print(f"billed: {billed}")
            assert set(billed) == {"prefill_computed", "prefill_cached", "decode"}, billed
            assert billed["decode"] > 0, billed
        left = survivors(data)
        assert not left, f"still running: {left}"
        assert not ready(port), f"port {port} still answers"
    print(f"smoke with the {engine} engine passed")


if __name__ == "__main__":
    sys.exit(main())
