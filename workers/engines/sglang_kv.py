"""SGLang's cache events: from its ZeroMQ publisher into the worker's KvTable.

The publisher numbers its messages. After one that was lost nothing here is sure any more: all is forgotten, and what
SGLang tells from then on is taken as far as it begins at a prompt's start. Nothing else is needed: a block that is
there and not told of costs a placement, no answer.
"""

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from contracts.prefix import BLOCK_TOKENS
from workers.engines.page_blocks import PageBlocks
from workers.kv_table import KvTable, Tier

log = structlog.get_logger()

_TIER_OF: Final[dict[str, Tier]] = {"GPU": "device", "CPU_PINNED": "host", "DISK": "store", "EXTERNAL": "store"}
_BIT_OF: Final[dict[Tier, int]] = {"device": 1, "host": 2, "store": 4}
_LONGEST_PATH: Final = 100  # of a Unix socket: the kernel's limit is 107 bytes


def page_fits(page_size: int) -> bool:
    """Return whether whole pages make a block."""
    return BLOCK_TOKENS % page_size == 0


class KvFeed:
    """Reads the events of one engine. `run` until cancelled."""

    def __init__(self, kv: KvTable, folder: Path) -> None:
        self._kv = kv
        path = folder / "kv.sock"
        self.address = f"ipc://{path}" if len(str(path)) <= _LONGEST_PATH else ""
        """Where the engine is to publish; empty = nowhere."""
        self._pages = PageBlocks()
        self._last = -1

    def clear(self) -> None:
        """Forget all: the engine has dropped its cache."""
        self._pages.clear()
        self._kv.clear()

    async def run(self) -> None:
        """Read until cancelled."""
        if not self.address:
            return
        # Here and not at the top: the environment of the other processes has no ZeroMQ.
        import zmq  # noqa: PLC0415
        import zmq.asyncio  # noqa: PLC0415

        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.connect(self.address)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            while True:
                _, number, payload = await socket.recv_multipart()
                self.take(int.from_bytes(number, "big"), payload)
                await asyncio.sleep(0)
        finally:
            socket.close(linger=0)
            context.term()

    def take(self, number: int, payload: bytes) -> None:
        """Take one message: its number and msgpack `[time, events, ...]`."""
        if self._last >= 0 and number != self._last + 1:
            log.warning("kv_events_lost", expected=self._last + 1, got=number)
            self.clear()
        self._last = number
        for event in msgspec.msgpack.decode(payload)[1]:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        tier: Tier = _TIER_OF.get(event.get("medium") or "GPU", "store")
        match event["type"]:
            case "BlockStored":
                start = self._kv.scope(adapter=event.get("lora_name") or "", salt=event.get("cache_salt") or "")
                completed = self._pages.stored(
                    event["block_hashes"],
                    event.get("parent_block_hash"),
                    event["token_ids"],
                    event["block_size"],
                    start,
                    _BIT_OF[tier],
                )
                self._kv.stored(tier, completed)
            case "BlockRemoved":
                self._kv.removed(tier, self._pages.removed(event["block_hashes"], _BIT_OF[tier]))
            case "AllBlocksCleared":
                self.clear()
            case _:
                pass  # a newer engine's event
