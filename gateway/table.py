"""The requests that run in this gateway, by their id."""

from collections.abc import Iterator

from contracts.identity import rid_bytes
from gateway.generation import Generation


class LiveTable:
    """Running requests. Keyed by the id's 16 bytes, the form in which workers name them."""

    def __init__(self) -> None:
        self._by_rid: dict[bytes, Generation] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Generation]:
        return iter(tuple(self._by_rid.values()))

    def add(self, generation: Generation) -> None:
        """Let workers and schedulers find the request. Done before its inbox entry is written."""
        self._by_rid[generation.rid_bytes] = generation

    def remove(self, generation: Generation) -> None:
        """Forget a closed request."""
        self._by_rid.pop(generation.rid_bytes, None)

    def find_bytes(self, rid: bytes) -> Generation | None:
        """Return the request with these 16 bytes."""
        return self._by_rid.get(rid)

    def find(self, rid: str) -> Generation | None:
        """Return the request with this id in its 36-character form."""
        return self._by_rid.get(rid_bytes(rid))
