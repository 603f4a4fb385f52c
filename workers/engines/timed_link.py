"""The timed engine's KV hand-off: fixed frames over TCP between decode and prefill workers.

The decode side keeps one connection per prefill worker and asks by bootstrap room: WAITING while it
has no KV room, READY when it has, RELEASED when it gave up. The prefill side answers COMPUTED when
the prompt is done, then KV with the prompt's digest, or FAILED.
"""

import asyncio
import enum
import struct
from collections.abc import Callable
from typing import NamedTuple, cast

_LAYOUT = struct.Struct("<BQ16s")
_NOTHING = bytes(16)
Address = tuple[str, int]


class Kind(enum.IntEnum):
    """What a frame says."""

    WAITING = 1
    READY = 2
    RELEASED = 3
    COMPUTED = 4
    KV = 5
    FAILED = 6


_KINDS = frozenset(int(kind) for kind in Kind)


class Frame(NamedTuple):
    """One message about one bootstrap room."""

    kind: Kind
    room: int
    kv: bytes = _NOTHING


class Wire(asyncio.Protocol):
    """One connection. Frames sent before it stands wait."""

    def __init__(self, on_frame: Callable[["Wire", Frame], None], on_lost: Callable[["Wire"], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._unsent = bytearray()
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what has waited."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        if self._unsent:
            self._transport.write(bytes(self._unsent))
            self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        """Split into frames; a malformed one ends the connection."""
        self._unread += data
        while len(self._unread) >= _LAYOUT.size:
            kind, room, kv = _LAYOUT.unpack_from(self._unread)
            del self._unread[: _LAYOUT.size]
            if kind not in _KINDS:
                self.close()
                return
            self._on_frame(self, Frame(Kind(kind), room, kv))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner."""
        del exc
        self._on_lost(self)

    def send(self, frame: Frame) -> None:
        """Send a frame, or keep it until the connection stands."""
        raw = _LAYOUT.pack(*frame)
        if self._transport is None:
            self._unsent += raw
        else:
            self._transport.write(raw)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


class Links:
    """The decode side's connections, one per prefill worker, made when first needed."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        on_frame: Callable[[Wire, Frame], None],
        on_down: Callable[[Address], None],
    ) -> None:
        self._tasks = tasks
        self._on_frame = on_frame
        self._on_down = on_down
        self._wires: dict[Address, Wire] = {}

    def send(self, address: Address, frame: Frame) -> None:
        """Send a frame to the prefill worker at `address`; `on_down` tells when that is impossible."""
        wire = self._wires.get(address)
        if wire is None:
            wire = self._wires[address] = Wire(self._on_frame, lambda _: self._down(address))
            self._tasks.create_task(self._connect(address, wire))
        wire.send(frame)

    def close(self) -> None:
        """Close all connections."""
        for wire in self._wires.values():
            wire.close()

    async def _connect(self, address: Address, wire: Wire) -> None:
        try:
            async with asyncio.timeout(2.0):
                await asyncio.get_running_loop().create_connection(lambda: wire, *address)
        except OSError:
            self._down(address)

    def _down(self, address: Address) -> None:
        self._wires.pop(address, None)
        self._on_down(address)
