"""What a connection is, byte by byte: heads and bodies that come in pieces, and answers that break off."""

import asyncio

import pytest
from gateway_rig import HELLO, Rig, eventually
from litestar import Request
from litestar.testing import RequestFactory

from contracts.errors import BadRequest
from contracts.lifecycle import Phase
from gateway import bodies

OK = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
READ_S = 10


async def connected(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", rig.client.base_url.port)


async def answer_to(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read one answer that says its length."""
    async with asyncio.timeout(READ_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split(" ")[1]), headers


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(READ_S):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def test_a_body_that_nobody_reads_is_neither_answered_again_nor_taken_for_a_head(rig: Rig):
    reader, writer = await connected(rig)
    size = 400_000
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer pdg_wrong_wrong_wrong_wrong\r\n"
        b"content-length: %d\r\n\r\n" % size
    )
    assert (await answer_to(reader))[0] == 401
    for _ in range(4):
        writer.write(b"x" * (size // 4))
        await writer.drain()
    writer.write(OK)
    status, headers = await answer_to(reader)
    assert status == 200
    assert headers["date"].endswith("gmt")
    writer.close()


async def test_a_head_that_begins_behind_a_long_body_is_as_good_as_any(rig: Rig):
    reader, writer = await connected(rig)
    body = b" " * 200_000
    writer.write(b"POST /v1/tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body) + OK[:20])
    assert (await answer_to(reader))[0] == 401
    writer.write(OK[20:])
    assert (await answer_to(reader))[0] == 200
    writer.close()


async def test_a_head_without_end_is_cut_off(rig: Rig):
    reader, writer = await connected(rig)
    writer.write(b"GET /livez HTTP/1.1\r\nx-long: ")
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


async def test_a_head_has_a_bounded_number_of_lines(rig: Rig):
    reader, writer = await connected(rig)
    writer.write(OK[:-2] + b"".join(b"x-%d: a\r\n" % number for number in range(200)) + b"\r\n")
    assert (await answer_to(reader))[0] == 400
    assert await closed(reader)
    writer.close()


async def test_answers_on_one_connection_come_in_the_order_of_their_requests(rig: Rig):
    reader, writer = await connected(rig)
    writer.write(OK + OK.replace(b"/livez", b"/nothing") + OK)
    assert [(await answer_to(reader))[0] for _ in range(3)] == [200, 404, 200]
    writer.close()


async def test_a_client_that_closes_its_half_in_mid_answer_has_left(rig: Rig):
    reader, writer = await connected(rig)
    body = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hello"}]}'
    assert HELLO["model"] == "tiny"
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
        % (rig.secret.encode(), len(body), body)
    )
    submit = await rig.scheduler.submit()
    await rig.scheduler.placed(submit, decode=rig.decode, prefill=rig.prefill)
    decode = await rig.decode.open(submit.rid, Phase.DECODE)
    await decode.tokens("a")
    async with asyncio.timeout(READ_S):
        await reader.readuntil(b'"content":"a"')
    writer.write_eof()
    await eventually(lambda: any(one.ending is not None for one in rig.gateway.table) or not len(rig.gateway.table))
    assert await closed(reader) or reader.at_eof()
    writer.close()


async def test_a_head_without_its_body_leaves_the_connection_as_it_was(rig: Rig):
    reader, writer = await connected(rig)
    writer.write(OK.replace(b"GET", b"HEAD"))
    async with asyncio.timeout(READ_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert b"content-length: 15" in head
    writer.write(OK)
    assert (await answer_to(reader))[0] == 200
    writer.close()


async def test_a_key_in_a_trailer_is_no_key(rig: Rig):
    reader, writer = await connected(rig)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"0\r\nauthorization: Bearer %b\r\n\r\n" % rig.secret.encode())
    assert (await answer_to(reader))[0] == 401
    writer.close()


FORM = (
    b"POST /portal/login HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/x-www-form-urlencoded\r\ncontent-length: 9\r\n\r\na"
)


async def test_a_form_that_is_never_whole_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "FORM_S", 0.1)
    reader, writer = await connected(rig)
    writer.write(FORM)
    assert (await answer_to(reader))[0] == 408
    writer.close()


async def test_a_client_that_leaves_in_the_midst_of_a_form_is_no_fault_of_ours():
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(BadRequest):
        await bodies.read_by(Request(RequestFactory().get("/").scope, receive).body(), timeout_s=READ_S)
