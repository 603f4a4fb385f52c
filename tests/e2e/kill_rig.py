"""What tests that kill processes and servers share: servers of their own, and callers that note what they read."""

import asyncio
import json
import signal
import time
from pathlib import Path

import httpx

from pdgate.services import Service, ServiceError, start_postgres, start_valkey
from tests.processes import Stack

CALLERS = 8


class Servers:
    """Valkey and PostgreSQL of this test alone, since they are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, Service] = {}

    def start(self, name: str) -> Service:
        """Start a server; a killed PostgreSQL's last backends may hold its memory for a moment."""
        start = {"valkey": start_valkey, "postgres": start_postgres}[name]
        deadline_s = time.monotonic() + 30
        while True:
            try:
                self.running[name] = start(self.folder / name)
            except ServiceError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)
            else:
                return self.running[name]

    def kill(self, name: str) -> None:
        process = self.running[name].process
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def stop(self) -> None:
        for service in self.running.values():
            service.stop()


class Load:
    """Callers that ask again and again; notes which answers they read to the end."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.finished: dict[str, dict[str, int]] = {}  # rid -> usage
        self.ended_s: dict[str, float] = {}  # rid -> when its last line was read, monotonic
        self.broken: set[str] = set()
        self.stopping = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=2 * CALLERS)
        headers = {"Authorization": f"Bearer {self.stack.api_key}"}
        async with (
            httpx.AsyncClient(base_url=self.stack.url, headers=headers, timeout=60, limits=limits) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(CALLERS):
                tasks.create_task(self._call(http, number))

    async def _call(self, http: httpx.AsyncClient, number: int) -> None:
        count = 0
        while not self.stopping:
            count += 1
            body = {
                "model": "tiny", "max_tokens": 20 + number * 10, "temperature": 0, "stream": True,
                "messages": [{"role": "user", "content": f"Tell story {number} part {count}"}],
                "stream_options": {"include_usage": True},
            }  # fmt: skip
            if not await self._stream(http, body):
                await asyncio.sleep(0.1)  # as clients do: what is down is not asked in a tight loop

    async def _stream(self, http: httpx.AsyncClient, body: dict[str, object]) -> bool:
        rid, usage = "", None
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                rid = answer.headers.get("x-request-id", "")
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]" and usage is not None:
                        self.finished[rid] = usage
                        self.ended_s[rid] = time.monotonic()
                        return True
                    if line.startswith("data: {"):
                        usage = json.loads(line[6:]).get("usage") or usage
        except httpx.TransportError:
            pass
        self.broken.add(rid)
        return False
