"""Where decode workers reach a prefill worker's bootstrap server: at another port in each of its lives.

SGLang's decode side keeps, by host and port of that server, where the prefill side listens and that it has told it
about its own memory. Both are void when the prefill worker has been something else in between. Yet the server itself
outlives changes of role and goes on answering, so nobody finds out: every hand-off of the pair waits until its
deadline. So peers get a door of this life, in front of the server. When it closes, what they keep of the former one
goes after a few heartbeats.
"""

import asyncio
import contextlib
import socket
from typing import Final

CONNECT_S: Final = 5.0
IDLE_S: Final = 60.0
"""SGLang's heartbeats come every 5 s."""
_CHUNK: Final = 65_536
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - an address to listen on is none to call


class BootstrapDoor:
    """One at a time; `open` closes the one before."""

    def __init__(self, host: str, port: int, *, server: tuple[str, int]) -> None:
        """`port`: of every second life, and the next one of the others; 0 = free ones. `server`: what is behind."""
        self._host = host
        self._ports = (port, port + 1) if port else (0, 0)
        self._behind = (_WILDCARDS.get(server[0], server[0]), server[1])
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        """Of the door that is open; 0 = none is."""

    async def open(self) -> None:
        """Open the door of another life. Raises OSError when its port is taken."""
        self.close()
        host = self._host if self._host in ("127.0.0.1", "::1", "localhost") else None  # None = every interface
        self._listener = await asyncio.start_server(self._pass, host, self._ports[0])
        self._ports = self._ports[::-1]
        self.port = int(self._listener.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Close it, and what goes through it."""
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers:
            writer.close()
        self._listener, self.port = None, 0

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            async with asyncio.timeout(CONNECT_S):
                inner_reader, inner_writer = await asyncio.open_connection(*self._behind)
            self._writers.add(inner_writer)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_copy(reader, inner_writer))
                    tasks.create_task(_copy(inner_reader, writer))
            finally:
                self._writers.discard(inner_writer)
                inner_writer.close()
        except (OSError, TimeoutError):
            pass  # the peer finds its connection closed, and asks again
        finally:
            self._writers.discard(writer)
            writer.close()


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until either side ends, or nothing comes for `IDLE_S`."""
    with contextlib.suppress(OSError, TimeoutError):
        while True:
            async with asyncio.timeout(IDLE_S):
                chunk = await reader.read(_CHUNK)
            if not chunk or writer.is_closing():  # uvloop raises no OSError for what is written after a close
                break
            writer.write(chunk)
            async with asyncio.timeout(IDLE_S):
                await writer.drain()
    writer.close()
