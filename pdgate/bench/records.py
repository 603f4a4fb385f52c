"""What a run leaves behind: one record per request, and what was asked for. The form of the results file."""

from pathlib import Path
from typing import Final

import msgspec

from contracts.slo import SloTarget, Timings, met
from pdgate.bench.endpoint import Dialect
from pdgate.bench.texts import Scale

VERSION: Final = 1


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times are seconds since the start of its step."""

    session: int
    turn: int
    intended_s: float  # when it should have been sent; under a closed loop when it was
    sent_s: float
    end_s: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    first_s: float | None = None  # first content event
    last_s: float | None = None
    events: int = 0  # that carried text
    itl_p99_ms: float | None = None  # of its gaps between events
    prompt_tokens: int | None = None  # by the server's usage; None = not reported
    cached_tokens: int | None = None
    output_tokens: int = 0  # by the server's usage, else its content events
    counted_by_server: bool = False
    cost_nano: int | None = None
    path: str | None = None
    simulated: bool = False
    currency: str = ""
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        """From the intended time to the first content event, so that a late start hides nothing."""
        return None if self.first_s is None or self.error else (self.first_s - self.intended_s) * 1000

    @property
    def decode_ms(self) -> float:
        """From the first content event to the last."""
        return 0.0 if self.first_s is None or self.last_s is None else (self.last_s - self.first_s) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first; None where there is no second one."""
        tokens = self.output_tokens
        return None if self.error or self.first_s is None or tokens < 2 else self.decode_ms / (tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        """From the intended time to the end of the response."""
        return None if self.error else (self.end_s - self.intended_s) * 1000

    def meets(self, target: SloTarget) -> bool:
        """Return whether it was answered whole and met every target."""
        if self.error or self.ttft_ms is None:
            return False
        seen = Timings(
            ttft_ms=self.ttft_ms, decode_ms=self.decode_ms, decode_tokens=self.output_tokens, itl_p99_ms=self.itl_p99_ms
        )
        return met(seen, target)


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """How well the client itself kept up in a step."""

    late_p50_ms: float  # sent after the intended time
    late_p99_ms: float
    lag_p99_ms: float  # of its event loop
    cpu: float  # of one core, 0.0 to 1.0
    limit_ms: float  # what the two P99 may be at most
    invalid_because: str = ""  # empty = valid


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One load of a run and all its requests, in the order of their intended times."""

    name: str
    rate_rps: float | None = None  # open loop
    concurrency: int | None = None  # closed loop
    think_s: float = 0.0
    wall_s: float = 0.0  # until the last answer
    gaps_ms: dict[str, float] = {}  # percentiles over all gaps between content events
    client: Client
    records: list[Record]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A results file."""

    version: int = VERSION
    label: str
    started: str  # ISO 8601, UTC
    url: str
    model: str
    route: str
    load: str  # in words; runs of one load can be compared
    seed: int
    target: SloTarget
    scale: Scale
    dialect: Dialect
    currency: str = ""
    priced_by: str = ""  # "endpoint", "--price" or empty
    steps: list[Step]


class RunError(ValueError):
    """Not a results file; the message says why."""


def read_run(file: Path) -> Run:
    """Return a results file. Raises RunError."""
    try:
        run = msgspec.json.decode(file.read_bytes(), type=Run)
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RunError(f"{file} is no result of `pdgate bench`: {error}") from None
    if run.version != VERSION:
        raise RunError(f"{file} has version {run.version}; this pdgate reads {VERSION}")
    return run


def write_run(file: Path, run: Run) -> None:
    """Write a results file and the folder it is in."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(run))
