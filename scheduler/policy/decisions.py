"""The decision log: what a pool's scheduler saw and decided, one JSON object a line. Pure.

A file begins with a `Head` and one `WorkerSeen` per worker, so that each rotated file can be read alone. What follows
is in the order of time. `at_ms` counts from the head's `at_unix_ms`. The log holds no prompt and no answer; tenants,
sessions and prefix blocks are opaque names. `pdgate replay` plays it again under another policy.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from contracts.lifecycle import HandOff, Path, Role, WorkerState
from contracts.perf import LatencyModel
from contracts.slo import SloTarget
from scheduler.policy.blame import Stage
from scheduler.policy.foresight import Belief
from scheduler.policy.headcount import ScalePlan, Step
from scheduler.policy.queueing import Split
from scheduler.policy.ratio import Decision, Mode, Move
from scheduler.policy.sight import RatioState, Sight

VERSION = 1


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head", tag_field="kind"):
    """The pool at the beginning of a file."""

    v: int = VERSION
    at_unix_ms: int
    """The zero of every `at_ms` of the file."""
    model: str
    hand_off: HandOff
    mode: Mode
    latency: LatencyModel
    """Costs of a worker, as the policy believes them."""
    targets: Mapping[str, SloTarget]
    """By tier. A request may bring its own."""
    block_tokens: int = 0
    """Prompt tokens per prefix block; 0 = blocks are not logged."""


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True, tag="worker", tag_field="kind"):
    """A worker has come, gone, or changed its role or state."""

    at_ms: float
    worker_id: str
    epoch: int
    role: Role
    state: WorkerState
    zone: str = ""


class Arrived(msgspec.Struct, frozen=True, kw_only=True, tag="arrived", tag_field="kind"):
    """A request has entered the inbox."""

    at_ms: float
    """When the gateway got it."""
    rid: str
    tier: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    session: str = ""
    blocks: tuple[int, ...] = ()
    target: SloTarget | None = None
    """Its own targets, where they are not the tier's."""


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag="placed", tag_field="kind"):
    """An attempt of a request was given to workers."""

    at_ms: float
    rid: str
    attempt: int
    path: Path
    decode: str
    """Decode or unified worker."""
    prefill: str | None
    reason: str
    waited_ms: float
    cached_tokens: int = 0
    """Prefix hit that was hoped for."""
    predicted_ttft_ms: float | None = None
    predicted_step_ms: float | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused", tag_field="kind"):
    """A request was sent away."""

    at_ms: float
    rid: str
    reason: str
    retry_after_s: float | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="kind"):
    """A request is over."""

    at_ms: float
    rid: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None
    """None = no token was sent."""
    tpot_ms: float | None
    met: bool
    blamed: Stage


class Ticked(msgspec.Struct, frozen=True, kw_only=True, tag="tick", tag_field="kind"):
    """A tick of the ratio controller, whatever it answered."""

    at_ms: float
    split: Split
    why: str
    target: Split
    gain: float
    move: Move | None = None
    rate_rps: float | None = None
    """Of the demand; None = nothing measured."""
    goodput_rps: float | None = None
    """Predicted for the split as it is."""
    waiting_in_time: int = 0
    prefill_gain: float = 1.0
    decode_gain: float = 1.0

    @classmethod
    def of(cls, at_ms: float, decision: Decision, state: RatioState, sight: Sight) -> "Ticked":
        """Return the row of a decision, the state after it and what it was made on."""
        return cls(
            at_ms=at_ms,
            split=decision.split,
            why=decision.why.value,
            target=decision.target,
            gain=decision.gain,
            move=decision.move,
            rate_rps=sight.demand.rate_rps if sight.demand is not None else None,
            goodput_rps=decision.now.goodput_rps if decision.now is not None else None,
            waiting_in_time=sight.waiting_in_time,
            prefill_gain=state.prefill_gain,
            decode_gain=state.decode_gain,
        )


class Scaled(msgspec.Struct, frozen=True, kw_only=True, tag="scale", tag_field="kind"):
    """The autoscaler started or stopped workers, or its reason not to has changed."""

    at_ms: float
    mode: str
    why: str
    split: Split
    """Who serves or is on the way."""
    desired: Split
    steps: tuple[Step, ...] = ()
    in_time: float | None = None
    rate_rps: float | None = None
    ahead_rps: float | None = None
    belief: Belief = Belief()
    attained: float | None = None

    @classmethod
    def of(cls, at_ms: float, plan: ScalePlan, mode: str) -> "Scaled":
        """Return the row of a plan."""
        return cls(
            at_ms=at_ms,
            mode=mode,
            why=plan.why.value,
            split=plan.split,
            desired=plan.desired,
            steps=plan.steps,
            in_time=plan.in_time,
            rate_rps=plan.rate_rps,
            ahead_rps=plan.ahead_rps,
            belief=plan.belief,
            attained=plan.attained,
        )


class RungChanged(msgspec.Struct, frozen=True, kw_only=True, tag="rung", tag_field="kind"):
    """The degrade ladder moved."""

    at_ms: float
    before: str
    after: str
    why: str


Record = Head | WorkerSeen | Arrived | Placed | Refused | Ended | Ticked | RungChanged | Scaled


class LogError(ValueError):
    """A line is not a record; the message has its number."""


def encode(record: Record) -> bytes:
    """Return a record as a line with its end."""
    return msgspec.json.encode(record) + b"\n"


def decode(lines: Iterable[bytes]) -> Iterator[Record]:
    """Yield the records of a file. A last line that was cut short is left out. Raises LogError."""
    decoder = msgspec.json.Decoder(Record)
    failed: tuple[int, Exception] | None = None
    for number, line in enumerate(lines, start=1):
        if failed is not None:
            raise LogError(f"line {failed[0]}: {failed[1]}") from failed[1]
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            if line.endswith(b"\n"):
                raise LogError(f"line {number}: {error}") from error
            failed = number, error  # a writer that died leaves half a line, and nothing after it
