"""What the referee found: the file of results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

RESULTS = Path(__file__).parents[1] / "results" / "referee.json"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one load under one seed."""

    attainment: float
    """Share (0 to 1) of all requests that met both targets."""
    goodput_rps: float
    """Requests per second that did, over the time in which requests arrive."""
    late: int
    """Requests whose first token came late, or that never ended."""
    slow: int
    """Requests whose mean gap was above the target."""
    moved: int = 0
    """Workers started or stopped; a flip is one of each."""
    decisions: int = 0
    """Flips, or changes of a count that a planner asked for."""
    changes: list[str] = []
    """When, and what."""
    told: float = 1.0
    """Share (0 to 1) of the ended requests that the adapter could tell from their sums."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One load under one seed, in one release of the mocker."""

    release: str
    load: str
    seed: int
    requests: int
    ratio: Figure
    statics: dict[str, Figure]
    """By split."""
    unified: dict[str, Figure]
    """Always-unified, by prompt tokens a step."""
    planners: dict[str, Figure] = {}
    """By setting of the grid; none where the planner does not run."""

    @property
    def best_static(self) -> str:
        """The split that did best in hindsight."""
        return best(self.statics)

    @property
    def best_unified(self) -> str:
        """The step size that did best in hindsight."""
        return best(self.unified)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    workers: int
    ttft_ms: float
    tpot_ms: float
    start_s: float
    """From a worker's coming into a role until it serves."""
    grid: dict[str, dict[str, str | int | float | bool]]
    """Settings of Dynamo's planner by name."""
    rows: list[Measured] = []

    def of_release(self, release: str) -> list[list[Measured]]:
        """Return the rows of a release of ai-dynamo, a list for each load."""
        rows = [row for row in self.rows if row.release == release]
        return [[row for row in rows if row.load == load] for load in dict.fromkeys(row.load for row in rows)]


def best(figures: Mapping[str, Figure]) -> str:
    """Return the name with the highest attainment; of equals the first."""
    return max(figures, key=lambda name: figures[name].attainment)


def best_setting(rows: Sequence[Measured]) -> str:
    """Return the planner's setting that did best over the seeds of a load."""
    return max(rows[0].planners, key=lambda name: fmean(row.planners[name].attainment for row in rows))


def read() -> Found:
    """Return the results that are committed."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Found)
