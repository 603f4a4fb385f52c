"""States of requests and workers, as tables. The diagrams in docs/architecture.md come from here."""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class Role(enum.StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class Phase(enum.StrEnum):
    """Which part of a request one engine request is."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class HandOff(enum.StrEnum):
    """How the KV cache gets from prefill to decode."""

    DIRECT = "direct"
    STORE = "store"


class StoreKind(enum.StrEnum):
    """Where KV pages go under the hand-off by a store."""

    FILE = "file"  # a folder on one machine
    MOONCAKE = "mooncake"  # the memory of all workers, Mooncake Store


class Path(enum.StrEnum):
    """Which way a request went. `x-pdgate-path`."""

    PD = "pd"
    UNIFIED = "unified"
    FALLBACK = "fallback"
    LOCAL = "local"


class FinishReason(enum.StrEnum):
    """Why one engine request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"
    DEADLINE = "deadline"
    READER_LOST = "reader_lost"
    HAND_OFF = "hand_off"

    @property
    def complete(self) -> bool:
        """Whether the answer is whole, so that the tenant pays for it once it is delivered."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class RequestState(enum.StrEnum):
    """States of one request as the scheduler sees it."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class WorkerState(enum.StrEnum):
    """States of one worker process."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SWITCHING = "switching"
    SLEEPING = "sleeping"
    UNHEALTHY = "unhealthy"
    STOPPED = "stopped"


_R = RequestState
REQUEST_NEXT: Final[Mapping[RequestState, frozenset[RequestState]]] = MappingProxyType(
    {
        _R.QUEUED: frozenset({_R.PREFILLING, _R.ABORTED, _R.FAILED}),
        _R.PREFILLING: frozenset({_R.QUEUED, _R.DECODING, _R.FINISHED, _R.ABORTED, _R.FAILED}),
        _R.DECODING: frozenset({_R.QUEUED, _R.FINISHED, _R.ABORTED, _R.FAILED}),
        _R.FINISHED: frozenset({_R.QUEUED}),
        _R.ABORTED: frozenset(),
        _R.FAILED: frozenset(),
    }
)
"""Allowed moves. Back to QUEUED is another attempt on other workers, even from FINISHED: the answer is whole in a
worker that its gateway cannot reach any more."""

_W = WorkerState
WORKER_NEXT: Final[Mapping[WorkerState, frozenset[WorkerState]]] = MappingProxyType(
    {
        _W.STARTING: frozenset({_W.READY, _W.UNHEALTHY, _W.STOPPED}),
        _W.READY: frozenset({_W.DRAINING, _W.UNHEALTHY, _W.STOPPED}),
        _W.DRAINING: frozenset({_W.READY, _W.SWITCHING, _W.SLEEPING, _W.UNHEALTHY, _W.STOPPED}),
        _W.SWITCHING: frozenset({_W.READY, _W.DRAINING, _W.UNHEALTHY, _W.STOPPED}),
        _W.SLEEPING: frozenset({_W.READY, _W.UNHEALTHY, _W.STOPPED}),
        _W.UNHEALTHY: frozenset({_W.READY, _W.STARTING, _W.STOPPED}),
        _W.STOPPED: frozenset(),
    }
)
"""Allowed moves. DRAINING back to READY is a cancelled drain or flip; SWITCHING back to DRAINING, an engine that still
had work left when it was asked; SLEEPING is without weights on its device."""


class IllegalMove(ValueError):
    """A state change that the tables do not have: a fault in our own code."""


def move_request(now: RequestState, to: RequestState) -> RequestState:
    """Return `to`, or raise IllegalMove when a request in `now` may not go there."""
    if to not in REQUEST_NEXT[now]:
        raise IllegalMove(f"a {now} request cannot become {to}")
    return to


def move_worker(now: WorkerState, to: WorkerState) -> WorkerState:
    """Return `to`, or raise IllegalMove when a worker in `now` may not go there."""
    if to not in WORKER_NEXT[now]:
        raise IllegalMove(f"a {now} worker cannot become {to}")
    return to
