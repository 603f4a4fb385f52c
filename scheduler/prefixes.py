"""Which worker holds which prompt blocks: what workers say (KvEvents), and until then what is expected.

A message that does not follow the last one means that one was lost: all that is known of the worker goes, and it is
asked to say everything again.
"""

from collections.abc import Sequence

from contracts.prefix import BLOCK_TOKENS, HASH_FORMAT, unpack_blocks
from contracts.v1 import worker_pb2 as pb
from scheduler.policy.prefix import PrefixIndex
from scheduler.worker import Worker


class Prefixes:
    """The prefix index of one pool, kept true to its workers' lives. Bounded by the index itself."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = index or PrefixIndex()
        self._lives: dict[str, int] = {}  # worker -> the epoch that the index knows
        self._seqs: dict[str, int] = {}
        self._held: dict[str, int] = {}  # blocks, as the worker's own events say

    def expected(self, worker_id: str, epoch: int, blocks: Sequence[int]) -> None:
        """Take that a worker was given a prompt: it will hold these blocks."""
        self._live(worker_id, epoch)
        self.index.stored(worker_id, blocks)

    def held_tokens(self, worker_id: str) -> int:
        """Return how many prompt tokens a worker says it caches."""
        return self._held.get(worker_id, 0) * BLOCK_TOKENS

    def heard(self, worker: Worker, events: pb.KvEvents) -> bool:
        """Take a worker's events; return False when one before them was lost and a resync is needed."""
        worker_id = worker.worker_id
        self._live(worker_id, worker.epoch)
        if worker.registration.hash_format != HASH_FORMAT:
            return True  # it names blocks otherwise; what is expected of it stays
        last = self._seqs.get(worker_id, 0)
        if events.cleared:
            self.index.cleared(worker_id)
            self._held[worker_id] = 0
        elif events.seq != last + 1:
            self.index.cleared(worker_id)
            self._seqs.pop(worker_id, None)
            self._held.pop(worker_id, None)
            return False
        self._seqs[worker_id] = events.seq
        stored, removed = unpack_blocks(events.stored), unpack_blocks(events.removed)
        self.index.stored(worker_id, stored)
        self.index.removed(worker_id, removed)
        self._held[worker_id] = max(0, self._held.get(worker_id, 0) + len(stored) - len(removed))
        return True

    def gone(self, worker_id: str) -> None:
        """Take that a worker died, left or changed its role: its cache is gone with it."""
        self.index.cleared(worker_id)
        self._lives.pop(worker_id, None)
        self._seqs.pop(worker_id, None)
        self._held.pop(worker_id, None)

    def _live(self, worker_id: str, epoch: int) -> None:
        if self._lives.get(worker_id) != epoch:
            self.gone(worker_id)
            self._lives[worker_id] = epoch
