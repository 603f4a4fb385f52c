"""A relay in front of a server that can be slowed and cut: one for each process that calls, so each has its link."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

_PIECE_BYTES = 65_536


class Relay:
    """Passes bytes between callers over TCP and a server on a Unix socket. `close` when done."""

    def __init__(self, path: str) -> None:
        """`path`: the server's socket; it may change, which moves new connections (a fail-over)."""
        self.path = path
        self.delay_s = 0.0  # of each piece, each way
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str) -> int:
        """Begin to accept and return the port."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """Let no byte through either way; connections stay, as those over a broken cable."""
        self._passing.clear()

    def heal(self) -> None:
        """Undo a cut. What was connected meanwhile has lost its connection: no cable keeps bytes."""
        self._passing.set()
        self.drop()

    def drop(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()

    def close(self) -> None:
        """Accept nothing more and end what there is."""
        if self._server is not None:
            self._server.close()
        self._passing.set()
        self.drop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        ends: Sequence[asyncio.StreamWriter] = [writer]
        try:
            await self._passing.wait()
            far_reader, far_writer = await asyncio.open_unix_connection(self.path)
            self._writers.add(far_writer)
            ends = (writer, far_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, far_writer))
                tasks.create_task(self._pump(far_reader, writer))
        except OSError:
            pass  # the server is down: the caller finds its connection closed
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                await self._passing.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if writer.is_closing():
                    break  # dropped meanwhile
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()  # this one's end ends the other direction too
