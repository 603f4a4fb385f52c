"""Which stage a missed target is blamed on, and how much each is blamed lately. Pure: time is an argument."""

import enum
from collections import Counter, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from contracts.lifecycle import Role
from contracts.slo import SloTarget

_MIXED_SHARE = 0.25
_BIN_S = 5.0


class Stage(enum.StrEnum):
    """Where a miss comes from. `phase_blamed` of the metrics."""

    NONE = "none"  # both targets met
    STRUCTURAL = "structural"  # an idle machine would miss it too: steers nothing
    GATEWAY = "gateway"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL_COMPUTE = "prefill_compute"  # slower than the model says
    DECODE_MEMORY = "decode_memory"  # waited for KV room: decode's fault, not prefill's
    TRANSFER = "transfer"
    DECODE_LOAD = "decode_load"
    INTERFERENCE = "interference"  # prompts in the decode steps of a unified worker
    LOST = "lost"  # a worker died


SIDE: Final[Mapping[Stage, Role]] = MappingProxyType(
    {
        Stage.PREFILL_QUEUE: Role.PREFILL,
        Stage.PREFILL_COMPUTE: Role.PREFILL,
        Stage.DECODE_MEMORY: Role.DECODE,
        Stage.DECODE_LOAD: Role.DECODE,
        Stage.INTERFERENCE: Role.UNIFIED,
    }
)
"""Which role more workers would have helped. Other stages move no worker."""


class Stamps(msgspec.Struct, frozen=True, kw_only=True):
    """What one finished request went through, ms."""

    target: SloTarget
    ttft_ms: float
    tpot_ms: float
    itl_p99_ms: float | None = None
    """None = not measured: counts as met."""
    decode_ms: float = 0.0
    """First to last token."""
    decode_tokens: int = 0
    gateway_ms: float = 0.0
    prefill_wait_ms: float = 0.0
    """Waiting because prefill workers had other work: in the scheduler and on the worker."""
    decode_wait_ms: float = 0.0
    """Waiting because decode workers had no room: in the scheduler and on the worker."""
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    expected_prefill_ms: float = 0.0
    """By the latency model, alone on a worker."""
    expected_transfer_ms: float = 0.0
    idle_step_ms: float = 0.0
    """A decode step with this request alone."""
    mixed_share: float = 0.0
    """Share (0 to 1) of its decode time that went to other requests' prompts."""
    lost: bool = False


def blame(seen: Stamps) -> Stage:
    """Return the one stage that a request's miss is blamed on.

    A late first token is blamed on the stage that exceeds its part of the budget most; a slow stream
    on decode, or on interference when prompts took more than a quarter of its time.
    """
    ttft_ms, tpot_ms = seen.target.ttft_ms, seen.target.tpot_ms
    if seen.lost:
        return Stage.LOST
    if ttft_ms is not None and seen.ttft_ms > ttft_ms:
        if seen.expected_prefill_ms + seen.expected_transfer_ms + seen.idle_step_ms > ttft_ms:
            return Stage.STRUCTURAL
        return _largest(_excess(seen))
    gap_ms = seen.target.itl_p99_ms
    if tpot_ms is not None and seen.tpot_ms > tpot_ms:
        return Stage.STRUCTURAL if seen.idle_step_ms > tpot_ms else _slow_stream(seen)
    if gap_ms is not None and seen.itl_p99_ms is not None and seen.itl_p99_ms > gap_ms:
        return Stage.STRUCTURAL if seen.idle_step_ms > gap_ms else _slow_stream(seen)
    return _whole(seen)


def _whole(seen: Stamps) -> Stage:
    """Return the stage to blame when the answer as a whole came late: the largest excess, decode's included."""
    e2e_ms = seen.target.e2e_ms
    if e2e_ms is None or seen.ttft_ms + seen.decode_ms <= e2e_ms:
        return Stage.NONE
    steps_ms = seen.idle_step_ms * max(0, seen.decode_tokens - 1)
    if seen.expected_prefill_ms + seen.expected_transfer_ms + seen.idle_step_ms + steps_ms > e2e_ms:
        return Stage.STRUCTURAL
    return _largest({**_excess(seen), _slow_stream(seen): seen.decode_ms - steps_ms})


def _slow_stream(seen: Stamps) -> Stage:
    return Stage.INTERFERENCE if seen.mixed_share > _MIXED_SHARE else Stage.DECODE_LOAD


def _excess(seen: Stamps) -> dict[Stage, float]:
    """Return what each stage before the first token took beyond its part, ms."""
    return {
        Stage.GATEWAY: seen.gateway_ms,
        Stage.PREFILL_QUEUE: seen.prefill_wait_ms,
        Stage.DECODE_MEMORY: seen.decode_wait_ms,
        Stage.PREFILL_COMPUTE: seen.prefill_ms - seen.expected_prefill_ms,
        Stage.TRANSFER: seen.transfer_ms - seen.expected_transfer_ms,
    }


def _largest(excess: Mapping[Stage, float]) -> Stage:
    return max(excess, key=lambda stage: excess[stage])


class Blamed(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of a window of time."""

    feasible: int
    """Finished requests, without the structurally impossible ones."""
    met: int
    refused: int
    by_stage: Mapping[Stage, int]

    @property
    def attainment(self) -> float | None:
        """Share (0 to 1) of feasible requests that met their targets; None without any."""
        return self.met / self.feasible if self.feasible else None

    @property
    def refused_share(self) -> float:
        """Share (0 to 1) of requests that were refused."""
        total = self.feasible + self.refused
        return self.refused / total if total else 0.0

    def share(self, role: Role) -> float:
        """Return the share (0 to 1) of feasible requests whose miss is blamed on a role."""
        blamed = sum(count for stage, count in self.by_stage.items() if SIDE.get(stage) is role)
        return blamed / self.feasible if self.feasible else 0.0


class BlameWindow:
    """Counts outcomes over the last `span_s` seconds."""

    def __init__(self, *, span_s: float = 60.0) -> None:
        self._span_s = span_s
        self._bins: deque[tuple[float, Counter[Stage | None]]] = deque()

    def add(self, now_s: float, stage: Stage) -> None:
        """Count a finished request."""
        self._bin(now_s)[stage] += 1

    def refuse(self, now_s: float) -> None:
        """Count a refused request."""
        self._bin(now_s)[None] += 1

    def blamed(self, now_s: float) -> Blamed:
        """Return the counts of the window."""
        self._forget(now_s)
        total: Counter[Stage | None] = Counter()
        for _, counts in self._bins:
            total.update(counts)
        refused = total.pop(None, 0)
        stages = {stage: count for stage, count in total.items() if stage is not None}
        return Blamed(
            feasible=sum(count for stage, count in stages.items() if stage is not Stage.STRUCTURAL),
            met=stages.get(Stage.NONE, 0),
            refused=refused,
            by_stage=stages,
        )

    def _bin(self, now_s: float) -> Counter[Stage | None]:
        if not self._bins or now_s >= self._bins[-1][0] + _BIN_S:
            self._forget(now_s)
            self._bins.append((now_s, Counter()))
        return self._bins[-1][1]

    def _forget(self, now_s: float) -> None:
        while self._bins and self._bins[0][0] + _BIN_S <= now_s - self._span_s:
            self._bins.popleft()
