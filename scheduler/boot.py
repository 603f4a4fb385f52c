"""How a worker came to serve: started, or woken."""

from collections.abc import Sequence

import msgspec


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker started or woke, Unix ms."""

    worker_id: str
    asked_unix_ms: float
    running_unix_ms: float
    registered_unix_ms: float
    ready_unix_ms: float
    woken: bool = False
    """It slept: there is nothing to place and to load, and the times between are those of the asking."""

    @property
    def parts(self) -> Sequence[tuple[str, float, float]]:
        """Its parts, name, beginning and end: place, load, warm; or wake."""
        if self.woken:
            return (("wake", self.asked_unix_ms, self.ready_unix_ms),)
        return (
            ("place", self.asked_unix_ms, self.running_unix_ms),
            ("load", self.running_unix_ms, self.registered_unix_ms),
            ("warm", self.registered_unix_ms, self.ready_unix_ms),
        )

    @property
    def whole_s(self) -> float:
        """From the asking until it serves."""
        return max(0.0, self.ready_unix_ms - self.asked_unix_ms) / 1000
