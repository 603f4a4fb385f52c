"""A local fleet and its scheduler are different processes: one asks, the other answers, over a Unix socket.

One call is one connection: a message each way, msgpack behind its length. The socket lies in a folder of mode 0700,
so whoever can reach it could start processes as this user anyway.

* `serve_fleet` answers beside the fleet that owns the processes.
* `AgentFleet` is the scheduler's adapter `local`.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from scheduler.fleet.protocol import (
    Capacity,
    Fleet,
    FleetError,
    FleetUnreachable,
    Instance,
    NoRoom,
    Price,
    WorkerSpec,
)

log = structlog.get_logger()

CALL_S: Final = 5.0
_MAX_BYTES: Final = 16 * 2**20
_LENGTH = struct.Struct("!I")

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True, tag=True):
    """Fleet.start."""

    spec: WorkerSpec


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Fleet.stop."""

    worker_id: str
    grace_s: float


class List(msgspec.Struct, frozen=True, tag=True):
    """Fleet.list."""

    pool: str


class AskCapacity(msgspec.Struct, frozen=True, tag=True):
    """Fleet.capacity."""

    pool: str


class AskPrice(msgspec.Struct, frozen=True, tag=True):
    """Fleet.price."""

    pool: str


class Logs(msgspec.Struct, frozen=True, tag=True):
    """Fleet.logs."""

    worker_id: str
    max_bytes: int


Call = Start | Stop | List | AskCapacity | AskPrice | Logs


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call that raised."""

    failed: str
    no_room: bool = False
    unreachable: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call that did not."""

    value: msgspec.Raw


_decode_call = msgspec.msgpack.Decoder(Call).decode


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    value: msgspec.Raw = msgspec.Raw()
    failed: str | None = None
    no_room: bool = False
    unreachable: bool = False


_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


class AgentFleet:
    """The fleet behind a socket."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def start(self, spec: WorkerSpec) -> Instance:
        """See Fleet."""
        return await self._call(Start(spec), Instance)

    async def stop(self, worker_id: str, *, grace_s: float) -> None:
        """See Fleet."""
        await self._call(Stop(worker_id, grace_s), type(None))

    async def list(self, pool: str) -> Sequence[Instance]:
        """See Fleet."""
        return await self._call(List(pool), tuple[Instance, ...])

    async def capacity(self, pool: str) -> Capacity:
        """See Fleet."""
        return await self._call(AskCapacity(pool), Capacity)

    async def price(self, pool: str) -> Price:
        """See Fleet."""
        return await self._call(AskPrice(pool), Price)

    async def logs(self, worker_id: str, *, max_bytes: int) -> str:
        """See Fleet."""
        return await self._call(Logs(worker_id, max_bytes), str)

    async def _call(self, call: Call, answer: type[T]) -> T:
        try:
            async with asyncio.timeout(CALL_S):
                reader, writer = await asyncio.open_unix_connection(str(self._socket))
                try:
                    writer.write(_framed(msgspec.msgpack.encode(call)))
                    await writer.drain()
                    raw = await _read(reader)
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError) as error:
            raise FleetUnreachable(f"the fleet at {self._socket} does not answer: {error or 'timeout'}") from None
        try:
            got = _decode_answer(raw)
            if got.failed is not None:
                kind = NoRoom if got.no_room else FleetUnreachable if got.unreachable else FleetError
                raise kind(got.failed)
            return msgspec.msgpack.decode(got.value, type=answer)
        except msgspec.MsgspecError as error:
            raise FleetUnreachable(f"the fleet at {self._socket} speaks another version: {error}") from None


@asynccontextmanager
async def serve_fleet(fleet: Fleet, socket: Path) -> AsyncIterator[None]:
    """Answer at `socket` until the context is left. The folder is made, or closed to others."""
    _make_way(socket)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            try:
                async with asyncio.timeout(CALL_S):
                    writer.write(_framed(msgspec.msgpack.encode(await _answered(fleet, await _read(reader)))))
                    await writer.drain()
            finally:
                writer.close()

    server = await asyncio.start_unix_server(answer, str(socket))
    try:
        yield
    finally:
        server.close()
        _make_way(socket)


def _make_way(socket: Path) -> None:
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.parent.chmod(0o700)
    socket.unlink(missing_ok=True)


async def _answered(fleet: Fleet, raw: bytes) -> Done | Failed:
    try:
        return Done(value=msgspec.Raw(msgspec.msgpack.encode(await _asked(fleet, _decode_call(raw)))))
    except FleetError as error:
        return Failed(
            failed=str(error),
            no_room=isinstance(error, NoRoom),
            unreachable=isinstance(error, FleetUnreachable),
        )
    except msgspec.MsgspecError as error:
        return Failed(failed=f"no call: {error}")


async def _asked(fleet: Fleet, call: Call) -> object:
    match call:
        case Start():
            return await fleet.start(call.spec)
        case Stop():
            await fleet.stop(call.worker_id, grace_s=call.grace_s)
            return None
        case List():
            return await fleet.list(call.pool)
        case AskCapacity():
            return await fleet.capacity(call.pool)
        case AskPrice():
            return await fleet.price(call.pool)
        case Logs():
            return await fleet.logs(call.worker_id, max_bytes=min(call.max_bytes, _MAX_BYTES // 2))


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return one message. Raises EOFError, also for one that is too long."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _MAX_BYTES:
        raise EOFError(f"a message of {length} bytes")
    return await reader.readexactly(length)
