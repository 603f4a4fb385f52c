"""The HTTP server by itself, byte by byte, in front of an application of a few lines."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gateway_rig import eventually
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.connections import Connection
from gateway.http_server import HttpServer
from tests.processes import free_port

READ_S = 10
LARGE = 24 * 2**20  # more than the kernel takes for a connection
GET = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
BYE = b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Application:
    """Echoes bodies; `/stream` goes on until the client leaves; `/large` is more than the kernel takes."""

    def __init__(self) -> None:
        self.num_begun = self.num_left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_begun += 1
        match scope["path"]:
            case "/stream":
                await self._stream(receive, send)
            case "/flood":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for _ in range(10_000):
                    await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
                    await asyncio.sleep(0)
            case "/large":
                await _answer(send, b"x" * LARGE)
            case "/refused":
                await _answer(send, b"no", status=401)
            case _:
                body = b""
                while (message := await receive()).get("more_body") or message["body"]:
                    body += message["body"]
                    if not message["more_body"]:
                        break
                headers = sorted(name.decode("latin-1") for name, _ in scope["headers"])
                await _answer(send, json.dumps({"body": body.decode("latin-1"), "headers": headers}).encode())

    async def _stream(self, receive: Any, send: Any) -> None:
        async def leaves() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(leaves())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not leaving.done():
                await send({"type": "http.response.body", "body": b"piece", "more_body": True})
                await asyncio.sleep(0.01)
        self.num_left += 1


async def _answer(send: Any, body: bytes, *, status: int = 200) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Served(asyncio.Protocol):
    """A server that runs, and its application."""

    def __init__(self, app: Application, server: HttpServer, port: int) -> None:
        self.app, self.server, self.port = app, server, port

    async def connect(self, host: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(READ_S):
            return await asyncio.open_connection(host, self.port, limit=2 * LARGE)

    async def told(self, *parts: bytes) -> bytes:
        """Send bytes on a connection of their own, and return what comes until it is closed."""
        reader, writer = await self.connect()
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(READ_S):
                return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def serving(host: str = "127.0.0.1", *, port: int = 0, **changes: Any) -> AsyncIterator[Served]:
    app, port = Application(), port or free_port()
    server = HttpServer(app, (host, port), **{"head_timeout_s": 30.0, **changes})
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.serve())
        served = Served(app, server, port)
        await eventually(lambda: _accepts(port))
        try:
            yield served
        finally:
            running.cancel()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def echoed(answer: bytes) -> list[Any]:
    """Return the bodies of all answers in what came."""
    return [json.loads(part.split(b"\r\n\r\n", 1)[1]) for part in answer.split(b"HTTP/1.1 200 ")[1:]]


UPGRADE = b"host: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"


@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_a_client_that_offers_another_protocol_is_heard_in_this_one(served: Served, cut: int):
    """Java's client offers h2c with every request."""
    length = b"POST /echo HTTP/1.1\r\n" + UPGRADE + b"content-length: 7\r\n\r\n"
    chunks = b"POST /echo HTTP/1.1\r\n" + UPGRADE + b"transfer-encoding: chunked\r\n\r\n"
    answer = await served.told(
        length + b"meaning"[:cut],
        b"meaning"[cut:] + chunks + b"3\r\nabc"[: cut + 1],
        b"3\r\nabc"[cut + 1 :] + b"\r\n0\r\n\r\n",
        b"GET /echo HTTP/1.1\r\n" + UPGRADE + b"\r\n" + BYE,
    )
    assert [one["body"] for one in echoed(answer)] == ["meaning", "abc", "", ""]


async def test_a_trailer_is_no_header(served: Served):
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await served.told(
        head + b"1\r\na\r\n0\r\nauthorization: Bearer x\r\nx-forwarded-for: 10.0.0.1\r\n\r\n" + BYE
    )
    assert [one["body"] for one in echoed(answer)] == ["a", ""]
    assert echoed(answer)[0]["headers"] == ["host", "transfer-encoding"]


@pytest.mark.parametrize("begin", [b"0\r\nx-trailer: ", b"1;x=", b"1\r\na\r\n0\r\nx: "])
async def test_what_a_body_holds_besides_itself_has_a_bound(served: Served, begin: bytes):
    reader, writer = await served.connect()
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + begin)
    sent = 0
    try:
        async with asyncio.timeout(READ_S):
            while sent < 100_000_000 and not reader.at_eof():
                writer.write(b"a" * 65_536)
                await writer.drain()
                sent += 65_536
    except ConnectionError:
        pass
    writer.close()
    assert sent < 50_000_000, "what the kernel holds, and no more"


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(served: Served):
    reader, writer = await served.connect()
    writer.write(b"GET /stream HTTP/1.0\r\n\r\n")
    async with asyncio.timeout(READ_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert await reader.readexactly(15) == b"piecepiecepiece"
    writer.close()
    await eventually(lambda: served.app.num_left == 1)


async def test_a_client_that_leaves_is_told_to_the_request_that_runs_though_another_waits(served: Served):
    reader, writer = await served.connect()
    writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
    async with asyncio.timeout(READ_S):
        await reader.readuntil(b"piece")
    linger = struct.pack("ii", 1, 0)  # leave with a reset
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    await eventually(lambda: served.app.num_left == 1)
    assert served.app.num_begun == 1


async def test_what_cannot_be_read_is_answered_in_its_turn_or_not_at_all(served: Served):
    answer = await served.told(GET + b"\x00\x01 no request\r\n\r\n")
    assert statuses(answer) == [200]
    reader, writer = await served.connect()
    writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n\x00\x01 no request\r\n\r\n")
    async with asyncio.timeout(READ_S):
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(60) == b"5\r\npiece\r\n" * 6
    writer.close()
    await eventually(lambda: served.app.num_left == 1)


async def test_a_body_that_cannot_be_read_is_answered_once(served: Served):
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert statuses(await served.told(head + b"1\r\na\r\n", b"no size\r\n")) == [400]
    assert statuses(await served.told(GET, head + b"1\r\na\r\n", b"no size\r\n" + GET)) in ([200], [200, 400])
    assert statuses(await served.told(GET + head + b"1\r\na\r\n" + b"no size\r\n" + GET)) == [200]


async def test_a_packet_of_requests_is_not_all_begun(served: Served):
    answer = await served.told(GET * 1000)
    assert set(statuses(answer)) == {200}
    assert len(statuses(answer)) == served.app.num_begun < 50


@pytest.mark.parametrize("version", [b"0.9", b"1.2", b"2.0"])
async def test_another_version_is_refused(served: Served, version: bytes):
    assert statuses(await served.told(b"GET /echo HTTP/" + version + b"\r\nhost: x\r\n\r\n")) == [400]
    assert served.app.num_begun == 0


async def test_a_client_that_was_not_told_to_send_its_body_loses_the_connection(served: Served):
    """It may now send the body or the next request: reading on, one would be taken for the other."""
    head = b"POST /refused HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(GET)
    answer = await served.told(head)
    assert statuses(answer) == [401]
    assert b"connection: close" in answer
    told = await served.told(head.replace(b"/refused", b"/echo") + GET + BYE)
    assert statuses(told) == [100, 200, 200]
    assert told.count(b"connection: close") == 1


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_who_is_refused_in_the_midst_of_a_long_body_is_told_so(served: Served, version: bytes):
    reader, writer = await served.connect()
    size = 4 * 2**20
    writer.write(b"POST /refused HTTP/" + version + b"\r\nhost: x\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\nx" % size)
    await eventually(lambda: served.app.num_begun == 1)
    for _ in range(4):
        writer.write(b"x" * (size // 4))
        await writer.drain()
    async with asyncio.timeout(READ_S):
        answer = await reader.read()
    assert statuses(answer) == [401]
    assert answer.count(b"connection: close") == 1
    writer.close()
    assert served.app.num_begun == 1


async def test_a_slow_reader_gets_all_of_a_long_answer():
    async with serving(head_timeout_s=0.2) as served:
        reader, writer = await served.connect()
        writer.transport.pause_reading()
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await eventually(lambda: served.app.num_begun == 1)
        await asyncio.sleep(1.0)  # a slow client: five times what a head may take
        writer.transport.resume_reading()
        async with asyncio.timeout(READ_S):
            assert len((await reader.read()).split(b"\r\n\r\n", 1)[1]) == LARGE
        writer.close()


@pytest.mark.parametrize("path", [b"/large", b"/flood"])
async def test_a_client_that_takes_nothing_is_cut_off_in_time(path: bytes):
    async with serving(stuck_s=0.2) as served:
        _, writer = await served.connect()
        writer.transport.pause_reading()
        writer.write((b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n") * 2)
        await eventually(lambda: served.app.num_begun and not served.server.num_connections)
        writer.close()


async def test_there_is_a_most_of_connections_and_who_comes_next_is_told():
    async with serving(max_connections=2) as served:
        first = [await served.connect() for _ in range(2)]
        await eventually(lambda: served.server.num_connections == 2)
        refused = await served.told(GET)
        assert statuses(refused) == [503]
        assert b"retry-after: 1\r\n" in refused
        assert json.loads(refused.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "no_capacity"
        assert statuses(await served.told(BYE.replace(b"/echo", b"/livez"))) == [200]
        for reader, writer in first:
            writer.write(BYE)
            async with asyncio.timeout(READ_S):
                assert statuses(await reader.read()) == [200]
            writer.close()
        await eventually(lambda: not served.server.num_connections)
        assert statuses(await served.told(BYE)) == [200]


async def test_the_port_of_one_that_drains_is_its_successors(served: Served):
    idle, stream = await served.connect(), await served.connect()
    stream[1].write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(READ_S):
        await stream[0].readuntil(b"piece")
        served.server.stop()
        assert await idle[0].read() == b"", "who waits for nothing is let go"
    async with serving(port=served.port) as successor:
        assert [statuses(await successor.told(BYE)) for _ in range(20)] == [[200]] * 20
        assert (served.app.num_begun, successor.app.num_begun) == (1, 20)
        async with asyncio.timeout(READ_S):
            await stream[0].readuntil(b"piece")
    for _, writer in (idle, stream):
        writer.close()
    await eventually(lambda: served.app.num_left == 1)


async def test_all_addresses_are_those_of_both_kinds():
    async with serving("::") as served:
        for host in ("127.0.0.1", "::1"):
            _, writer = await served.connect(host)
            writer.close()


def test_what_is_changed_of_uvicorn_is_there():
    """uvicorn calls these of itself. An upgrade that renames one would leave ours uncalled."""
    ours = {
        "connection_made", "connection_lost", "data_received", "on_message_begin", "on_header", "on_headers_complete",
        "on_body", "on_message_complete", "on_response_complete", "_start_asgi_task",
    }  # fmt: skip
    own = {"is_overdue", "_feed", "_stay_with_http", "_break_off", "_say_too_large"}
    assert {name for name, value in vars(Connection).items() if callable(value)} - own - {"__init__"} == ours
    assert ours | {"send_400_response", "shutdown", "_unset_keepalive_if_required"} <= set(vars(HttpToolsProtocol))
    assert not own & set(vars(HttpToolsProtocol))
    used = {"waiting_for_100_continue", "keep_alive", "chunked_encoding", "expected_content_length", "message_event"}
    used |= {"response_started", "response_complete", "disconnected", "more_body", "scope"}
    assert used <= set(RequestResponseCycle.__init__.__code__.co_names)
