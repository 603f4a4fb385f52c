"""What is fixed about a request when it is admitted, when it ends, and when it is closed."""

from collections.abc import Mapping

import msgspec

from contracts.settlement import Unreserved
from contracts.usage import Outcome, UsageEvent
from contracts.wire import Owner


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What was agreed when the request was admitted."""

    rid: str
    owner: Owner
    pool: str
    num_samples: int
    stream: bool
    batch: bool = False
    prompt_tokens: int  # as the gateway counted them
    deadline_unix_ms: int
    arrived_unix_ms: int
    arrived_s: float  # monotonic
    gateway_id: str = ""
    prompt_only: bool = False  # a prompt is computed ahead; no answer is wanted


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """A request with its reservation."""

    max_tokens: int  # per sample, enforced in the engine
    paid_tokens: int  # per sample: what money is reserved for, of all budgets
    headers: Mapping[str, str]
    unreserved: Unreserved | None = None  # set when Redis did not answer: what to charge at the end
    limits_uncached: bool = False  # a limit of uncached prompt tokens holds the whole prompt


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """A request that only has to be settled. Complete: it may go through the journal."""

    event: UsageEvent
    entry_id: str  # of the inbox entry; empty = none was written
    ended_unix_ms: int
    phase_blamed: str = "none"  # for a missed target
    unreserved: Unreserved | None = None  # what to charge where there may be no reservation


class Ending(msgspec.Struct, frozen=True):
    """Why a request ends."""

    outcome: Outcome
    cause: str = ""
