"""The usage event: what the settle script hands to billing, once per request."""

import enum
from typing import Final

import msgspec

from contracts.dimensions import NO_DIMENSIONS, Dimensions
from contracts.lifecycle import HandOff, Path
from contracts.rating import CacheScope, Price, Tokens
from contracts.slo import Timings
from contracts.units import Nano

EMPTY_ANSWER: Final = "empty"
"""Cause of a finished request that delivered nothing: it costs nothing."""

REPEATED: Final = "repeated"
"""Cause of a request that makes an answer again which was paid, and then lost through a fault of ours."""

UNPAID: Final = frozenset({EMPTY_ANSWER, REPEATED})


class Outcome(enum.StrEnum):
    """How a request ended, for the tenant."""

    FINISHED = "finished"  # stop or length, final batch acknowledged
    CLIENT_LEFT = "client_left"  # pays for work until the worker confirmed the stop
    INTERRUPTED = "interrupted"  # any of our processes failed: costs nothing
    REFUSED = "refused"  # never ran: costs nothing
    LOST = "lost"  # nobody settled in time: costs nothing

    @property
    def billable(self) -> bool:
        """Whether the tenant pays."""
        return self in (Outcome.FINISHED, Outcome.CLIENT_LEFT)


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One settled request. Identity is `rid`; `at` is the time inside it.

    `tokens` are the engine's counts even when the outcome is not billable: then they are our cost.
    """

    v: int = 1
    rid: str
    org: str
    project: str
    key_id: str
    model: str
    pool: str
    tier: str
    outcome: Outcome
    cause: str = ""  # why interrupted or refused, machine readable
    finish_reason: str = ""
    tokens: Tokens
    reasoning_tokens: int = 0
    price: Price
    cost: Nano  # 0 when not billable
    path: Path | None = None
    hand_off: HandOff | None = None
    attempts: int = 1
    batch: bool = False
    stream: bool = False
    prefill_worker: str = ""
    decode_worker: str = ""
    timings: Timings | None = None
    slo_met: bool | None = None
    estimated: bool = False  # counts not confirmed by a worker
    simulated: bool = False  # a timed engine made the text
    settled_by: str = "gateway"  # gateway | scheduler | billing
    dimensions: Dimensions = NO_DIMENSIONS
    cache_scope: CacheScope = CacheScope.OWN  # whose prefixes the cached tokens were found among
    traceparent: str = ""
    trace_parent_id: str = ""

    @property
    def billable(self) -> bool:
        """Whether the tenant pays."""
        return self.outcome.billable and self.cause not in UNPAID


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's own final counts of one engine request: cost row and independent figure."""

    v: int = 1
    rid: str
    attempt: int
    sample: int
    phase: str
    worker_id: str
    worker_epoch: int
    pool: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    compute_ms: float
    ended_unix_ms: int
    worker_ms: float = 0.0  # from accepted to ended: how long it held a place in the batch
    kv_byte_s: float = 0.0  # bytes of KV cache held, integrated over seconds
    payer: str = ""  # JSON of contracts.wire.Owner; in the worker's journal only, to restore usage from


class DeliveredMark(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a worker's journal: the gateway has acknowledged all of one engine request."""

    delivered: str  # rid
    attempt: int
    sample: int
