"""The ring of StepBatches for one gateway.

1. Engines append chunks and ends to the *pending* columns; nothing is sent yet.
2. The sender seals the columns into a StepBatch with the next sequence number, at once when it was
   idle, otherwise `coalesce_s` after the previous one (somewhat later without a token), and keeps it in the ring.
3. An acknowledgement trims the ring and says which ends the gateway now has.
4. A gateway that attaches again names the last batch it processed; the ring is sent from there.
5. When ring and pending hold more than `max_chunks`, everything is dropped: the next batch says
   `lost`, and the owner aborts the requests (`on_overflow`).
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from contracts.lifecycle import Phase
from contracts.parsing import Detail, detail_to_pb
from contracts.v1 import worker_pb2 as pb
from contracts.wire import PHASE_TO_PB, VERSION, Attempt, attempt_to_pb, pack_ids

_ENDS_FACTOR = 2.5
"""How much longer ends without any chunk wait after the previous batch, as those of a prefill worker do."""


class Key(NamedTuple):
    """One engine request on this worker."""

    attempt: Attempt
    phase: Phase


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the token path."""

    max_chunks: int = 65_536  # 256 streams in 5 ms steps: 1.3 s without an acknowledgement
    coalesce_s: float = 0.002
    reader_lost_s: float = 5.0


class _Sealed(NamedTuple):
    batch: pb.StepBatch
    num_chunks: int
    ends: tuple[Key, ...]


class Outbox:
    """Pending chunks and unacknowledged batches of one gateway. One sender at a time."""

    def __init__(
        self,
        gateway_id: str,
        worker_epoch: int,
        limits: Limits,
        *,
        on_overflow: Callable[["Outbox"], None],
        first_seq: int = 1,
    ) -> None:
        """Make an empty ring; `first_seq` above 1 = an earlier ring for this gateway was dropped."""
        self.gateway_id = gateway_id
        self.num_batches = 0
        self._epoch = worker_epoch
        self._limits = limits
        self._on_overflow = on_overflow
        self._dirty = False
        self._wake = asyncio.Event()
        self._now_s = asyncio.get_running_loop().time
        self._ring: deque[_Sealed] = deque()
        self._next_seq = first_seq
        self._next_to_send = first_seq
        self._held_chunks = 0
        self._lost = first_seq > 1
        self._reader = 0  # number of the attached sender, 0 = none
        self._num_readers = 0
        self._reader_left_s = self._now_s()
        self._sealed_s = 0.0
        self._clear_pending()

    # -- engines write ---------------------------------------------------------------------------

    def open(self, handle: int, key: Key, placed: bytes = b"") -> None:
        """Announce a handle, and its placement, with the next batch; alone it is no reason to send one."""
        name = attempt_to_pb(key.attempt)
        self._opened.append(pb.Opened(handle=handle, id=name, phase=PHASE_TO_PB[key.phase], placed=placed))

    def chunk(self, handle: int, text: str, token_ids: Sequence[int], detail: Detail | None = None) -> None:
        """Append one chunk. The hot path: once per token."""
        if detail is not None:
            self._details.append(detail_to_pb(len(self._handles), detail))
        self._handles.append(handle)
        self._texts.append(text)
        self._lengths.append(len(token_ids))
        self._ids.extend(token_ids)
        self._held_chunks += 1
        if self._held_chunks > self._limits.max_chunks:
            self._overflow()
        elif not self._dirty:
            self._dirty = True
            self._wake.set()

    def finish(self, finished: pb.Finished, key: Key) -> None:
        """Append the end of a request."""
        self._finished.append(finished)
        self._ends.append(key)
        self._held_chunks += 1
        self._dirty = True
        self._wake.set()

    # -- the gateway reads -------------------------------------------------------------------------

    @property
    def unread_s(self) -> float:
        """Seconds since the last reader left; 0 while one is attached."""
        return 0.0 if self._reader else self._now_s() - self._reader_left_s

    @property
    def next_seq(self) -> int:
        """Sequence number of the next batch to be sealed."""
        return self._next_seq

    def attach(self, last_seq: int) -> int:
        """Make the caller the only sender, starting after batch `last_seq`, and return its number.

        The caller acknowledges `last_seq` first. If what follows it is not in the ring any more, the
        gateway has a gap: then all is dropped and the next batch says `lost`.
        """
        oldest = self._ring[0].batch.seq if self._ring else self._next_seq
        gap_told = self._ring[0].batch.lost if self._ring else self._lost
        if last_seq >= self._next_seq or (last_seq + 1 != oldest and not gap_told):
            self._next_seq = max(self._next_seq, last_seq + 1)
            self._overflow()
        self._next_to_send = self._ring[0].batch.seq if self._ring else self._next_seq
        self._num_readers += 1
        self._reader = self._num_readers
        self._wake.set()
        return self._reader

    def detach(self, reader: int) -> None:
        """Leave the ring to the next sender. A sender that was replaced changes nothing."""
        if reader == self._reader:
            self._reader = 0
            self._reader_left_s = self._now_s()
            self._wake.set()

    async def next_batch(self, reader: int) -> pb.StepBatch | None:
        """Wait for the next batch to send; None when another sender has taken over."""
        while self._reader == reader:
            if self._next_to_send < self._next_seq:
                sealed = self._ring[self._next_to_send - self._ring[0].batch.seq]
                self._next_to_send += 1
                return sealed.batch
            if self._dirty:
                apart_s = self._limits.coalesce_s * (1.0 if self._handles else _ENDS_FACTOR)
                wait_s = self._sealed_s + apart_s - self._now_s()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if self._dirty:
                    self._seal()
                continue
            self._wake.clear()
            await self._wake.wait()
        return None

    def ack(self, seq: int) -> list[Key]:
        """Trim the ring up to `seq` and return the requests whose end the gateway has."""
        delivered: list[Key] = []
        while self._ring and self._ring[0].batch.seq <= seq:
            sealed = self._ring.popleft()
            self._held_chunks -= sealed.num_chunks
            delivered.extend(sealed.ends)
        return delivered

    @property
    def drained(self) -> bool:
        """Whether everything was sealed and handed to the transport."""
        return not self._dirty and self._next_to_send == self._next_seq

    @property
    def confirmed(self) -> bool:
        """Whether the gateway has acknowledged every end; chunks alone it acknowledges in its own time."""
        return not self._dirty and not any(sealed.ends for sealed in self._ring)

    def dismiss(self) -> None:
        """End the attached sender for good: this ring is over."""
        self._reader = 0
        self._wake.set()

    # -- inside ----------------------------------------------------------------------------------------

    def _seal(self) -> None:
        batch = pb.StepBatch(
            seq=self._next_seq,
            worker_epoch=self._epoch,
            opened=self._opened,
            handle=self._handles,
            text=self._texts,
            num_tokens=self._lengths,
            token_ids=pack_ids(self._ids),
            finished=self._finished,
            v=VERSION,
            lost=self._lost,
            details=self._details,
        )
        self._ring.append(_Sealed(batch, len(self._handles) + len(self._finished), tuple(self._ends)))
        self._next_seq += 1
        self.num_batches += 1
        self._lost = False
        self._sealed_s = self._now_s()
        self._clear_pending()

    def _clear_pending(self) -> None:
        self._opened: list[pb.Opened] = []
        self._handles: list[int] = []
        self._texts: list[str] = []
        self._lengths: list[int] = []
        self._ids = array("I")
        self._finished: list[pb.Finished] = []
        self._details: list[pb.Detail] = []
        self._ends: list[Key] = []
        self._dirty = False

    def _overflow(self) -> None:
        self._ring.clear()
        self._next_to_send = self._next_seq
        self._held_chunks = 0
        self._clear_pending()
        self._lost = True
        self._dirty = True
        self._wake.set()
        self._on_overflow(self)
