"""What prompt blocks this worker holds, by tier, and the messages that tell schedulers about it.

The engine writes changes as they happen; `take` turns what has gathered into KvEvents, ten times a second. A scheduler
that missed one, or has just connected, gets everything again (`say_again`), as numbers that go on for everybody.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Final, Literal

from contracts.prefix import pack_blocks, scope
from contracts.v1 import worker_pb2 as pb

Tier = Literal["device", "host", "store"]
TIERS: Final[Mapping[Tier, "pb.Tier"]] = MappingProxyType(
    {"device": pb.TIER_DEVICE, "host": pb.TIER_HOST, "store": pb.TIER_STORE}
)
MAX_BLOCKS: Final = 1_000_000
"""Per tier: 64 million tokens. What comes beyond is not told."""
MESSAGE_BLOCKS: Final = 16_384


class KvTable:
    """The blocks of one worker. Not thread-safe: the engine writes on the loop's thread."""

    def __init__(self, model_revision: str) -> None:
        self._revision = model_revision
        self._held: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
        self._stored: dict[Tier, dict[int, None]] = {tier: {} for tier in TIERS}  # not told yet, in order
        self._removed: dict[Tier, dict[int, None]] = {tier: {} for tier in TIERS}
        self._cleared = True  # the first message says so
        self.seq = 0  # of the last message

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())

    def scope(self, *, adapter: str, salt: str) -> int:
        """Return what the names of a prompt's blocks begin with."""
        return scope(model_revision=self._revision, adapter=adapter, salt=salt)

    def stored(self, tier: Tier, names: Iterable[int]) -> None:
        """Note blocks that are there from now on."""
        held = self._held[tier]
        for name in names:
            if name not in held and len(held) < MAX_BLOCKS:
                held.add(name)
                if name in self._removed[tier]:
                    del self._removed[tier][name]  # not told that it was gone
                else:
                    self._stored[tier][name] = None

    def removed(self, tier: Tier, names: Iterable[int]) -> None:
        """Note blocks that are gone."""
        held = self._held[tier]
        for name in names:
            if name in held:
                held.discard(name)
                if name in self._stored[tier]:
                    del self._stored[tier][name]
                else:
                    self._removed[tier][name] = None

    def clear(self) -> None:
        """Note that all blocks are gone."""
        for tier in TIERS:
            self._held[tier].clear()
        self.say_again()

    def say_again(self) -> None:
        """Let the next messages tell everything, beginning with `cleared`."""
        self._cleared = True
        for tier in TIERS:
            self._stored[tier] = dict.fromkeys(self._held[tier])
            self._removed[tier].clear()

    def take(self) -> Iterator[pb.KvEvents]:
        """Yield the messages for what has changed since the last call."""
        if self._cleared:
            self._cleared = False
            yield self._message(pb.KvEvents(cleared=True))
        for tier, number in TIERS.items():
            while self._stored[tier] or self._removed[tier]:
                stored = _pop(self._stored[tier])
                removed = _pop(self._removed[tier])
                yield self._message(pb.KvEvents(tier=number, stored=pack_blocks(stored), removed=pack_blocks(removed)))

    def _message(self, events: pb.KvEvents) -> pb.KvEvents:
        self.seq += 1
        events.seq = self.seq
        return events


def _pop(names: dict[int, None]) -> list[int]:
    taken = list(islice(names, MESSAGE_BLOCKS))
    for name in taken:
        del names[name]
    return taken
