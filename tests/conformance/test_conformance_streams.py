"""Two thousand streams at once on one gateway process: all whole, and its memory does not grow with what it sends."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.processes import Stack, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_STREAMS = 2000
NUM_TOKENS = 200
STEP_MS = 400
OPENED_AT_ONCE = 64


@pytest.fixture
def patient_catalog(catalog_file: Path, tmp_path: Path) -> Path:
    """The catalogue with targets that the steps below can meet; the usual ones would make this an overload."""
    text = catalog_file.read_text().replace("ttft_ms = 2000", "ttft_ms = 200000")
    file = tmp_path / "models.toml"
    file.write_text(text.replace("tpot_ms = 100", "tpot_ms = 4000"))
    return file


@pytest.fixture
async def wide_stack(
    redis_url: str, database_url: str, patient_catalog: Path, models_dir: Path
) -> AsyncIterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="pdgate-wide-"))
    stack = Stack(
        folder=folder,
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=patient_catalog,
        models_dir=models_dir,
    )
    await stack.seed(concurrency=2 * NUM_STREAMS)
    stack.add_gateway()
    stack.add_scheduler(cpu_profile=True)
    environ = {"WORKER_MAX_RUNNING": "2048", "WORKER_STEP_MS": str(STEP_MS), "WORKER_STEP_MS_PER_REQUEST": "0"}
    for i in range(2):
        stack.add_worker(f"prefill-{i}", role="prefill", environ={**environ, "WORKER_STEP_MS": "2"})
        stack.add_worker(f"decode-{i}", role="decode", environ=environ)
    stack.start()
    try:
        await stack.ready()
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Reader:
    """Reads one stream, counting only."""

    def __init__(self) -> None:
        self.status = b""
        self.num_events = 0
        self.whole = False

    async def run(self, stack: Stack, request: bytes, opening: asyncio.Semaphore) -> None:
        async with opening:
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway_port)
            writer.write(request)
            self.status = await reader.readline()
        try:
            async for line in reader:
                if line.startswith(b"data: "):
                    self.num_events += 1
                    if line.startswith(b"data: [DONE]"):
                        self.whole = True
                        return
        finally:
            writer.close()


def memory_mb(stack: Stack) -> float:
    return psutil.Process(stack.processes["gateway"].pid).memory_info().rss / 2**20


async def test_two_thousand_streams_are_whole_and_memory_stays_flat(wide_stack: Stack):
    stack = wide_stack
    body = json.dumps(
        {
            "model": "tiny",
            "stream": True,
            "max_tokens": NUM_TOKENS,
            "messages": [{"role": "user", "content": "Hello"}],
        }
    ).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.api_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    idle_mb = memory_mb(stack)
    readers = [Reader() for _ in range(NUM_STREAMS)]
    opening = asyncio.Semaphore(OPENED_AT_ONCE)
    async with asyncio.TaskGroup() as tasks:
        for reader in readers:
            tasks.create_task(reader.run(stack, request, opening))
        await until(lambda: all(reader.num_events for reader in readers), timeout_s=150)
        running = sum(not reader.whole for reader in readers)
        early_mb, early = memory_mb(stack), sum(reader.num_events for reader in readers)
        await until(
            lambda: sum(reader.num_events for reader in readers) > early + 50 * NUM_STREAMS, timeout_s=240, every_s=1
        )
        late_mb = memory_mb(stack)
    words = f"{running} streams at once; RSS {idle_mb:.0f} MB idle, {early_mb:.0f} MB with all of them"
    print(f"{words}, {late_mb:.0f} MB {50 * NUM_STREAMS} chunks later")  # noqa: T201
    assert {reader.status.split()[1] for reader in readers} == {b"200"}
    assert all(reader.whole for reader in readers)
    assert running == NUM_STREAMS
    assert late_mb < early_mb * 1.1
    assert late_mb < 260
