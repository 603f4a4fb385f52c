"""Bounds on what clients may cost: slow readers, slow writers, compressed and deep bodies, long prompts."""

import asyncio
import contextlib
import json
import os
import socket
import threading
from pathlib import Path

import pytest
from gateway_rig import HELLO, Rig, eventually, running_rig

from contracts.catalog import Catalog
from contracts.errors import NoCapacity
from contracts.lifecycle import FinishReason, Phase
from contracts.usage import Outcome
from gateway.prompt import PromptWorkshop
from gateway.writer import EventWriter


class Stuck:
    """A server that never has room."""

    def __init__(self) -> None:
        self.num_sends = 0

    async def __call__(self, _: object) -> None:
        self.num_sends += 1
        await asyncio.Event().wait()


async def test_a_reader_that_takes_nothing_is_cut_when_too_much_waits_for_it():
    writer, server = EventWriter(asyncio.get_running_loop(), max_waiting_bytes=1000), Stuck()
    async with asyncio.TaskGroup() as tasks:
        writer.release_head()
        await writer.head()
        pumping = tasks.create_task(writer.pump(server))
        await asyncio.sleep(0)
        longest = 0
        for _ in range(5000):
            writer.pending.append(b"x" * 10)
            writer.flush()
            longest = max(longest, len(writer.pending))
            await asyncio.sleep(0)
        assert await pumping is False
    assert server.num_sends == 1
    assert longest * 10 <= 1000 + 10
    assert writer.pending == []


async def test_a_reader_that_takes_nothing_is_cut_after_its_time():
    writer = EventWriter(asyncio.get_running_loop(), send_s=0.01)
    writer.release_head()
    await writer.head()
    writer.pending.append(b"x")
    assert await writer.pump(Stuck()) is False


async def test_a_client_that_stops_reading_its_stream_is_cut_and_its_work_stopped(rig: Rig):
    port = rig.client.base_url.port
    body = json.dumps({**HELLO, "stream": True, "max_tokens": 2000}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rig.secret}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, head.encode() + body)
        submit = await rig.scheduler.submit()
        await rig.scheduler.placed(submit, decode=rig.decode)
        handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
        piece = "x" * 65_536
        for _ in range(400):  # 26 MB: more than sockets and server hold
            await handle.tokens(piece)
            if rig.decode.aborts:
                break
            await asyncio.sleep(0.005)
        await eventually(lambda: rig.decode.aborts)
    await handle.finish(FinishReason.ABORTED, prompt=3, completion=1)
    assert (await rig.usage(submit.rid)).outcome is Outcome.CLIENT_LEFT


async def test_a_body_that_does_not_come_to_its_end_is_answered_408(
    redis_url: str, database_url: str, catalog_file: Path, catalog: Catalog, models_dir: Path, tmp_path: Path
):
    async with running_rig(
        redis_url=redis_url,
        database_url=database_url,
        catalog_file=catalog_file,
        catalog=catalog,
        models_dir=models_dir,
        journal_dir=tmp_path / "journal",
        body_timeout_s=0.2,
    ) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.client.base_url.port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rig.secret}\r\n"
            "content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        writer.write(head.encode())
        async with asyncio.timeout(10):
            status = await reader.readline()
        writer.close()
    assert b" 408 " in status


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd"])
async def test_compressed_bodies_are_refused_unread(rig: Rig, encoding: str):
    answer = await rig.client.post("/v1/chat/completions", content=b"\x1f\x8b", headers={"content-encoding": encoding})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")


async def test_a_deep_body_is_a_400_on_every_path(rig: Rig):
    fields = {
        "/v1/chat/completions": "messages",
        "/v1/completions": "prompt",
        "/v1/responses": "input",
        "/v1/messages": "messages",
    }
    for path, field in fields.items():
        for depth in (200, 900, 100_000):
            deep = "[" * depth + "]" * depth
            schema = f'{{"a":{deep}}}'
            function = f'"name":"f","parameters":{schema}'
            tool = f'{{"type":"function",{function},"function":{{{function}}}}}'
            bodies = [f'{{"model":"tiny","max_tokens":1,"{field}":{deep}}}']
            if field != "prompt":
                bodies.append(f'{{"model":"tiny","max_tokens":1,"{field}":"Hi","tools":[{tool}]}}')
            for body in bodies:
                answer = await rig.client.post(path, content=body.encode())
                assert answer.status_code == 400, (path, depth, answer.status_code, answer.text[:300])


async def test_a_long_prompt_waits_for_a_thread_while_short_requests_and_streams_go_on(rig: Rig):
    gate = threading.Event()
    try:
        for _ in range(rig.gateway.settings.tokenizer_threads):
            rig.gateway.workshop._threads.submit(gate.wait)
        long_one = {"model": "tiny", "prompt": "word " * 1000}
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(rig.client.post("/v1/tokenize", json=long_one))
            streaming = tasks.create_task(rig.client.post("/v1/chat/completions", json={**HELLO, "stream": True}))
            submit = await rig.scheduler.submit()
            await rig.scheduler.placed(submit, decode=rig.decode)
            handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
            for _ in range(20):
                await handle.tokens("x")
            await handle.finish(FinishReason.STOP, prompt=3, completion=20)
            answer = await streaming
            assert answer.text.count('"content":"x"') == 20
            assert not waiting.done()
            gate.set()
            assert (await waiting).json()["count"] > 900
    finally:
        gate.set()


async def test_more_long_prompts_than_may_wait_are_refused():
    gate = threading.Event()
    workshop = PromptWorkshop(threads=1, max_waiting=2)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(workshop._run(gate.wait, size=10**6))
            await asyncio.sleep(0)
            with pytest.raises(NoCapacity):
                await workshop._run(gate.wait, size=10**6)
            gate.set()
        assert await workshop._run(lambda: 7, size=10**6) == 7
    finally:
        gate.set()
        workshop.close()


def accepted_by(port: int) -> socket.socket:
    """Return the server's end of the one connection to `port`, found among this process's own files."""
    for open_file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found = socket.socket(fileno=os.dup(int(open_file.name)))
            with contextlib.suppress(OSError):
                if found.family == socket.AF_INET and found.getsockname()[1] == port and found.getpeername():
                    return found
            found.close()
    raise AssertionError(f"nobody is connected to {port}")


async def test_the_first_event_of_a_stream_waits_for_no_acknowledgement_of_the_head(rig: Rig):
    """Head and first token are two small segments: with Nagle's algorithm the second would wait for the first's ACK."""
    port = rig.client.base_url.port
    body = json.dumps({**HELLO, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rig.secret}\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    submit = await rig.scheduler.submit()
    with accepted_by(port) as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    await rig.scheduler.placed(submit, decode=rig.decode)
    head = await reader.readuntil(b"\r\n\r\n")  # before any token
    assert head.startswith(b"HTTP/1.1 200")
    handle = await rig.decode.open(submit.rid, Phase.UNIFIED)
    await handle.tokens("x")
    assert b'"content":"x"' in await reader.readuntil(b"\n\n")
    await handle.finish(FinishReason.STOP, prompt=8, completion=1)
    await reader.readuntil(b"[DONE]")
    writer.close()
