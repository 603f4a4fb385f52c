"""What the engine's tokens hit of a mixture's experts since schedulers were last told."""

from collections.abc import Sequence

from contracts.v1 import worker_pb2 as pb
from contracts.wire import pack_ids


class ExpertTable:
    """The hits of one worker. Not thread-safe: the engine writes on the loop's thread."""

    def __init__(self) -> None:
        self._num_experts = 0
        self._hits: list[int] = []

    def add(self, num_experts: int, hits: Sequence[int]) -> None:
        """Add token counts by layer and expert, layer after layer."""
        if num_experts != self._num_experts or len(hits) != len(self._hits):
            self._num_experts, self._hits = num_experts, [0] * len(hits)
        self._hits = [old + new for old, new in zip(self._hits, hits, strict=True)]

    def take(self) -> pb.ExpertHits | None:
        """Return what has gathered and begin again; None when there is nothing."""
        hits, self._hits = self._hits, []
        return pb.ExpertHits(experts=self._num_experts, tokens=pack_ids(hits)) if hits else None
