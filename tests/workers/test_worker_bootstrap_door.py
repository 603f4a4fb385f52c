"""Where decode workers reach a prefill worker's bootstrap server: another place in each of its lives."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.processes import free_port
from workers.engines.bootstrap_door import BootstrapDoor

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, int]]:
    """A server that says everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    listener = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield "0.0.0.0", listener.sockets[0].getsockname()[1]  # as SGLang may say it
    listener.close()


async def said_back(ends: Ends, words: bytes) -> bytes:
    ends[1].write(words)
    async with asyncio.timeout(10):
        return await ends[0].read(1000)


async def test_what_goes_through_comes_back_and_another_life_closes_the_door_before(server: tuple[str, int]):
    door = BootstrapDoor("127.0.0.1", 0, server=server)
    await door.open()
    first = door.port
    old = await asyncio.open_connection("127.0.0.1", first)
    assert await said_back(old, b"one") == b"one"
    assert await said_back(old, b"two") == b"two"
    await door.open()
    assert door.port != first
    async with asyncio.timeout(10):
        assert await old[0].read() == b""  # so a peer's heartbeats find out
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", first)
    new = await asyncio.open_connection("127.0.0.1", door.port)
    assert await said_back(new, b"three") == b"three"
    door.close()
    assert door.port == 0
    for _, writer in (old, new):
        writer.close()


async def test_a_named_port_and_the_next_one_take_turns(server: tuple[str, int]):
    port = free_port()
    door = BootstrapDoor("127.0.0.1", port, server=server)
    seen = []
    for _ in range(3):
        await door.open()
        seen.append(door.port)
    door.close()
    assert seen == [port, port + 1, port]


async def test_without_a_server_behind_it_a_peer_finds_its_connection_closed():
    door = BootstrapDoor("127.0.0.1", 0, server=("127.0.0.1", free_port()))
    await door.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    door.close()
