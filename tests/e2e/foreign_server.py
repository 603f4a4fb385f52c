"""A server that somebody else started, and the whole stack with one worker of the http engine before it."""

import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.engines import BOOT_S, catalogue_entry, tiny_model
from tests.processes import Stack, free_port

NAME = "there"
"""What the server calls the model."""


class ForeignServer:
    """A process with an OpenAI-compatible API on a port of its own, which it keeps when it is started again."""

    def __init__(self, folder: Path, command: Callable[[int], list[str]], variables: Mapping[str, str]) -> None:
        """`command`: what starts it on a port."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self._command, self._variables = folder, command, variables
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; its log is the failure's text."""
        with (self._folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self.port), env=self._variables, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + BOOT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail((self._folder / "server.log").read_text()[-3000:])
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Kill it."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait(20)


@asynccontextmanager
async def stack_before(
    server: ForeignServer, folder: Path, redis_url: str, database_url: str, **worker: str
) -> AsyncIterator[Stack]:
    """Run the stack with the server as its only worker. `worker`: more of that worker's environment."""
    catalog_file = folder / "models.toml"
    catalog_file.write_text(catalogue_entry("tiny").replace('tool_parser = "hermes"\n', ""))
    stack = Stack(
        folder=folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        models_dir=tiny_model().parent,
    )
    await stack.seed()
    stack.add_gateway(cpu_profile=True)
    stack.add_scheduler(cpu_profile=True)
    stack.add_billing()
    environ = {"WORKER_HTTP_URL": server.url, "WORKER_HTTP_MODEL": NAME} | worker
    stack.add_worker("http-0", role="unified", engine="http", environ=environ)
    stack.start()
    try:
        await stack.ready(timeout_s=90)
        yield stack
    finally:
        stack.stop()
