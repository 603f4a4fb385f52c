"""A worker's prefix cache: whole blocks, least recently used out first."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from scheduler.simulator.arrivals import BLOCK_TOKENS


class CacheListener(Protocol):
    """Hears what a cache holds, as the KV events of an engine tell it."""

    def stored(self, worker_id: str, blocks: Sequence[int]) -> None:
        """Take blocks that are cached from now on."""

    def removed(self, worker_id: str, blocks: Sequence[int]) -> None:
        """Take blocks that are no longer cached."""

    def cleared(self, worker_id: str) -> None:
        """Take that nothing is cached any longer."""


class BlockCache:
    """Blocks that one worker, or one store, could serve without computing them."""

    def __init__(self, owner: str, listener: CacheListener | None = None) -> None:
        self._owner = owner
        self._listener = listener
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return len(self._blocks) * BLOCK_TOKENS

    def match(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are held, and mark them as used."""
        held = 0
        for block in blocks:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            held += 1
        return held

    def store(self, blocks: Sequence[int], room_tokens: int) -> None:
        """Hold these blocks, then keep to `room_tokens`."""
        new = [block for block in blocks if block not in self._blocks]
        for block in reversed(blocks):  # the beginning of a prompt is the last to go
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        if new and self._listener is not None:
            self._listener.stored(self._owner, new)
        self.shrink(room_tokens)

    def shrink(self, room_tokens: int) -> None:
        """Drop blocks until at most `room_tokens` are held."""
        surplus = len(self._blocks) - max(0, room_tokens) // BLOCK_TOKENS
        if surplus <= 0:
            return
        gone = [self._blocks.popitem(last=False)[0] for _ in range(surplus)]
        if self._listener is not None:
            self._listener.removed(self._owner, gone)

    def clear(self) -> None:
        """Drop everything."""
        self._blocks.clear()
        if self._listener is not None:
            self._listener.cleared(self._owner)
