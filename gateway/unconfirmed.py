"""Settlements that Redis acknowledged a moment ago and may yet lose.

Redis answers before its file is written and synced: killed, it loses up to two seconds of what it acknowledged where
its disk is slow, and a replica that takes over what had not reached it. So what was settled is kept for `KEEP_S`, and
settled again when the connection had to be opened anew since.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from gateway.terms import Closed

KEEP_S: Final = 10.0
MAX_KEPT: Final = 20_000
_decoder: Final = msgspec.msgpack.Decoder(Closed)


class Unconfirmed:
    """At most `MAX_KEPT` settlements, encoded: objects would cost the garbage collector more than the encoding."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._kept: deque[tuple[float, bytes]] = deque(maxlen=MAX_KEPT)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, settled: Sequence[Closed]) -> None:
        """Keep what Redis has just acknowledged."""
        now_s = self._now_s()
        self._kept.extend((now_s, msgspec.msgpack.encode(one)) for one in settled)

    def batches(self, size: int) -> Iterator[Sequence[Closed]]:
        """Yield everything that is kept, oldest first."""
        kept = [raw for _, raw in self._kept]
        for start in range(0, len(kept), size):
            yield [_decoder.decode(raw) for raw in kept[start : start + size]]

    def forget_old(self) -> None:
        """Drop what Redis has had for `KEEP_S`. Only after it answered on the connection that settled it."""
        before_s = self._now_s() - KEEP_S
        while self._kept and self._kept[0][0] < before_s:
            self._kept.popleft()
