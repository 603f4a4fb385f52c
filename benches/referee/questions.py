"""What is asked of the mocker and what it answers: between `benches.referee` and `player` in the other environment."""

import enum

import msgspec


class Kind(enum.StrEnum):
    """Who decides about workers."""

    STATIC = "static"
    UNIFIED = "unified"
    RATIO = "ratio"
    PLANNER = "planner"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One replay."""

    trace: str
    """A file in the mocker's format."""
    kind: Kind
    ttft_ms: float
    tpot_ms: float
    prefill: int = 0
    """Workers at the beginning, by role."""
    decode: int = 0
    unified: int = 0
    chunk_tokens: int = 8192
    """Prompt tokens that a unified worker takes in one step."""
    start_s: float = 5.0
    """From a worker's coming into a role until it serves."""
    router: str = "kv_router"
    settings: dict[str, str | int | float | bool] = {}
    """Of Dynamo's planner."""


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A decision about workers."""

    at_s: float
    what: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests of one replay."""

    requests: int
    completed: int
    met: int
    """Completed within both targets."""
    late: int
    """Completed with a late first token."""
    slow: int
    """Completed with a mean gap above the target."""
    changes: list[Change] = []
    moved: int = 0
    """Workers started or stopped: a flip is both."""
    wished: int = 0
    """Flips, or changes of a count that a planner asked for."""
    told: tuple[int, int] | None = None
    """Ended requests that the adapter told from their sums, and those that it had to guess."""
    cpu_s: float = 0.0

    @property
    def attainment(self) -> float:
        """Share (0 to 1) of all requests that met both targets."""
        return self.met / self.requests if self.requests else 1.0
