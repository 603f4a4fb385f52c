"""Final counts of ended requests, kept until the scheduler says that they are settled."""

from collections.abc import Callable, Iterable

from contracts.v1 import worker_pb2 as pb
from workers.outbox import Key

KEEP_S = 600.0
MAX_KEPT = 50_000


class Finals:
    """What ended here and is not settled: at most `MAX_KEPT`, at most `KEEP_S` each, oldest first out."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._finals: dict[Key, tuple[float, pb.Final]] = {}
        self._keys_of: dict[str, list[Key]] = {}
        self._settled_first: dict[Key, float] = {}  # settled before their gateway's acknowledgement came

    def add(self, key: Key, final: pb.Final) -> None:
        """Keep the final counts of `key`."""
        self._finals[key] = (self._now_s(), final)
        self._keys_of.setdefault(key.attempt.rid, []).append(key)
        if len(self._finals) > MAX_KEPT:
            self._forget(next(iter(self._finals)))

    def find(self, key: Key) -> pb.Final | None:
        """Return what is kept of `key`."""
        kept = self._finals.get(key)
        return kept[1] if kept else None

    def mark_delivered(self, keys: Iterable[Key]) -> list[Key]:
        """Note that the gateway has these ends; return those that ended here within `KEEP_S`, settled ones too."""
        known = [key for key in keys if key in self._finals or self._settled_first.pop(key, None) is not None]
        for key in known:
            if key in self._finals:
                self._finals[key][1].delivered = True
        return known

    def settle(self, rid: str) -> None:
        """Forget a settled request."""
        for key in self._keys_of.pop(rid, ()):
            _, final = self._finals.pop(key)
            if not final.delivered and len(self._settled_first) < MAX_KEPT:
                self._settled_first[key] = self._now_s()

    def expire(self) -> None:
        """Forget what was kept too long."""
        limit = self._now_s() - KEEP_S
        while self._settled_first and next(iter(self._settled_first.values())) < limit:
            del self._settled_first[next(iter(self._settled_first))]
        while self._finals:
            key, (added_s, _) = next(iter(self._finals.items()))
            if added_s > limit:
                return
            self._forget(key)

    def all(self) -> list[pb.Final]:
        """Return everything kept, oldest first."""
        return [final for _, final in self._finals.values()]

    def _forget(self, key: Key) -> None:
        del self._finals[key]
        keys = self._keys_of[key.attempt.rid]
        keys.remove(key)
        if not keys:
            del self._keys_of[key.attempt.rid]
