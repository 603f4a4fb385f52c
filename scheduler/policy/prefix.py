"""Which worker holds which prefix blocks: a bounded index fed by the engines' KV events."""

from collections.abc import Mapping, Sequence

_COMPACT_AFTER = 64  # bits of workers that are gone, until one pass removes them all


class PrefixIndex:
    """Block hash -> bit mask of workers.

    A hash names a block and all before it, and already carries tenant salt, model and adapter
    (PROTOCOL, prefixes), so a lookup is one dictionary read per block. The oldest entries leave when
    `max_blocks` is reached. A worker's bit dies with it: `match` never reports it again, and dead bits are
    swept out together, so that one worker's end costs nothing at that moment.
    """

    def __init__(self, *, max_blocks: int = 2_000_000) -> None:
        self._max_blocks = max_blocks
        self._masks: dict[int, int] = {}  # in the order of storing: the first is the oldest
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._free: list[int] = []
        self._live = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._masks)

    def stored(self, worker_id: str, blocks: Sequence[int]) -> None:
        """Take that a worker caches these blocks."""
        bit = self._bits.get(worker_id)
        if bit is None:
            bit = self._new_bit(worker_id)
        masks = self._masks
        for block in blocks:
            masks[block] = masks.pop(block, 0) | bit
        while len(masks) > self._max_blocks:
            del masks[next(iter(masks))]

    def removed(self, worker_id: str, blocks: Sequence[int]) -> None:
        """Take that a worker has dropped these blocks."""
        bit = self._bits.get(worker_id, 0)
        masks = self._masks
        for block in blocks:
            mask = masks.get(block, 0)
            if mask & bit:
                if mask == bit:
                    del masks[block]
                else:
                    masks[block] = mask & ~bit

    def cleared(self, worker_id: str) -> None:
        """Take that a worker caches nothing: it restarted, switched role, left, or lost an event."""
        bit = self._bits.pop(worker_id, 0)
        if not bit:
            return
        del self._names[bit]
        self._live &= ~bit
        self._dead |= bit
        if self._dead.bit_count() >= _COMPACT_AFTER:
            self._sweep()

    def match(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """Return how many leading blocks each worker holds; workers without any are absent."""
        held: dict[str, int] = {}
        masks, live = self._masks, self._live
        for index, block in enumerate(blocks):
            still = masks.get(block, 0) & live
            if still != live:
                if index:
                    self._note(held, live & ~still, index)
                if not still:
                    return held
                live = still
        if blocks and live:
            self._note(held, live, len(blocks))
        return held

    def _note(self, held: dict[str, int], mask: int, blocks: int) -> None:
        while mask:
            bit = mask & -mask
            held[self._names[bit]] = blocks
            mask ^= bit

    def _new_bit(self, worker_id: str) -> int:
        used = len(self._bits) + self._dead.bit_count()
        bit = self._free.pop() if self._free else 1 << used
        self._bits[worker_id] = bit
        self._names[bit] = worker_id
        self._live |= bit
        return bit

    def _sweep(self) -> None:
        dead = self._dead
        kept = {block: mask & ~dead for block, mask in self._masks.items() if mask & ~dead}
        self._masks = kept
        while dead:
            bit = dead & -dead
            self._free.append(bit)
            dead ^= bit
        self._dead = 0
