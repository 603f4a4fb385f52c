"""One worker as the scheduler knows it: what it registered, what it last said, what it was given since."""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from contracts.lifecycle import IllegalMove, Role, WorkerState
from contracts.v1 import worker_pb2 as pb
from contracts.wire import ROLE_FROM_PB, STATE_FROM_PB, Registration, WorkerRef
from scheduler.policy.cluster import Compatibility, WorkerView

ChargeKey = tuple[bytes, int, int]
"""rid as 16 bytes, attempt, sample."""


class Standing(enum.StrEnum):
    """How far the Control stream of a worker can be trusted."""

    CONNECTING = "connecting"  # no Inventory yet
    UP = "up"
    SUSPECT = "suspect"  # silent or reset: gets nothing new, its work is left alone
    DEAD = "dead"  # its work is lost


STANDING_NEXT: Final[Mapping[Standing, frozenset[Standing]]] = MappingProxyType(
    {
        Standing.CONNECTING: frozenset({Standing.UP, Standing.DEAD}),
        Standing.UP: frozenset({Standing.SUSPECT, Standing.DEAD, Standing.CONNECTING}),
        Standing.SUSPECT: frozenset({Standing.UP, Standing.DEAD, Standing.CONNECTING}),
        Standing.DEAD: frozenset({Standing.UP}),
    }
)
"""Allowed moves. Back to CONNECTING is a new term, which opens every stream afresh."""


class Charge(msgspec.Struct):
    """What one submitted engine request takes from its worker until its Final."""

    kv_tokens: int
    prefill_tokens: int  # not yet computed
    decoding_kv_tokens: int = 0  # held half-way through its answer; 0 = it does not decode here


class Worker:
    """Registration, pushed status and local accounting of one life (epoch) of a worker.

    Load = what was submitted and has no Final yet (`charges`), plus what the last two Status both showed
    beyond that (`_foreign_*`, never below zero). A Final counts at once; a Status corrects the rest. One
    Status alone proves nothing: it may have been taken before a Final that overtook it.
    """

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.worker_id = registration.worker_id
        self.epoch = registration.epoch
        self.role = registration.role
        self.state = registration.state
        self.leased = True
        self.standing = Standing.CONNECTING
        self.leaving = False  # its role is about to change: gets nothing new from here on
        self.departing = False  # it is being drained to be stopped, which is no change of roles
        self.inventoried_s = 0.0  # when its last Inventory came, monotonic
        self.rejecting = False  # refused a submit; trusted again with its next Status
        self.transfer_p50_ms = 0.0
        self.charges: dict[ChargeKey, Charge] = {}
        self._charged_kv = 0
        self._charged_prefill = 0
        self._num_decoding = 0
        self._decoding_kv = 0
        self._used_kv = 0  # by the last Status
        self._excess = (0, 0, 0)  # of the last Status: requests, KV tokens, prefill tokens
        self._foreign_requests = 0
        self._foreign_kv = 0
        self._foreign_prefill = 0
        self._kv_capacity = registration.kv_capacity_tokens
        self._pairs_with = compatibility_of(registration)
        self._view: WorkerView | None = None

    @property
    def ref(self) -> WorkerRef:
        """Where this life of the worker is."""
        return WorkerRef(worker_id=self.worker_id, epoch=self.epoch, address=self.registration.address)

    @property
    def ready(self) -> bool:
        """Whether new requests may be placed here."""
        trusted = self.standing is Standing.UP and self.leased and not self.rejecting
        return trusted and not self.leaving and self.state is WorkerState.READY

    @property
    def condition(self) -> WorkerState:
        """Its own state, or what its silence makes of it."""
        if not self.leased:
            return WorkerState.STOPPED
        return self.state if self.standing is Standing.UP else WorkerState.UNHEALTHY

    @property
    def num_requests(self) -> int:
        """Running and waiting engine requests."""
        return len(self.charges) + self._foreign_requests

    @property
    def kv_tokens(self) -> int:
        """KV tokens held or promised."""
        return self._charged_kv + self._foreign_kv

    @property
    def kv_capacity_tokens(self) -> int:
        """KV tokens the worker has room for."""
        return self._kv_capacity

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed."""
        return self._charged_prefill + self._foreign_prefill

    def view(self) -> WorkerView:
        """Return the worker as policy sees it; the same object until something changes."""
        if self._view is None:
            r = self.registration
            num_decoding, decoding_kv = self._num_decoding, self._decoding_kv
            if self.role is not Role.PREFILL:  # what nobody charged is of the kind that the role does
                num_decoding += self._foreign_requests
                # Answers that outgrow their forecast show in what is used.
                decoding_kv = max(decoding_kv + self._foreign_kv, min(self._used_kv, self.kv_tokens))
            self._view = WorkerView(
                worker_id=self.worker_id,
                epoch=self.epoch,
                role=self.role,
                ready=self.ready,
                pairs_with=self._pairs_with,
                hand_offs=frozenset(r.hand_offs),
                max_running=r.max_running,
                context_tokens=r.context_tokens,
                kv_capacity_tokens=self._kv_capacity,
                num_requests=self.num_requests,
                kv_tokens=self.kv_tokens,
                queued_prefill_tokens=self.queued_prefill_tokens,
                num_decoding=num_decoding,
                decoding_kv_tokens=decoding_kv,
                zone=r.zone,
                reachable=self.role is not Role.PREFILL or r.bootstrap_port > 0,
            )
        return self._view

    def stand(self, to: Standing) -> None:
        """Change how far the stream is trusted, along STANDING_NEXT. Raises contracts.lifecycle.IllegalMove."""
        if to is self.standing:
            return
        if to not in STANDING_NEXT[self.standing]:
            raise IllegalMove(f"a worker that is {self.standing} cannot become {to}")
        self.standing = to
        self._view = None

    def touch(self) -> None:
        """Forget the cached view after a change of a public attribute."""
        self._view = None

    def register(self, registration: Registration) -> None:
        """Take a newer lease value of the same life."""
        if self.standing is Standing.CONNECTING:
            self.role, self.state = registration.role, registration.state
        self.registration = registration
        self._pairs_with = compatibility_of(registration)
        self._view = None

    def report(self, status: pb.Status) -> None:
        """Take a pushed status."""
        self.role = ROLE_FROM_PB.get(status.role, self.role)
        self.state = STATE_FROM_PB.get(status.state, WorkerState.UNHEALTHY)
        self.rejecting = False
        self.transfer_p50_ms = status.transfer_p50_ms
        self._kv_capacity = status.kv_capacity_tokens or self._kv_capacity
        excess = (
            max(0, status.num_running + status.num_waiting - len(self.charges)),
            max(0, status.kv_used_tokens - self._charged_kv),
            max(0, status.prefill_queue_tokens - self._charged_prefill),
        )
        self._foreign_requests, self._foreign_kv, self._foreign_prefill = map(min, excess, self._excess)
        self._excess = excess
        self._used_kv = status.kv_used_tokens
        self._view = None

    def charge(self, key: ChargeKey, *, kv_tokens: int, prefill_tokens: int, decoding_kv_tokens: int = 0) -> None:
        """Count an engine request that is about to be submitted.

        Args:
            key: its name.
            kv_tokens: KV memory to keep free for it.
            prefill_tokens: prompt tokens to compute.
            decoding_kv_tokens: what it holds half-way through its answer; 0 = it does not decode here.
        """
        self.release(key)
        self.charges[key] = Charge(kv_tokens, prefill_tokens, decoding_kv_tokens)
        self._charged_kv += kv_tokens
        self._num_decoding += decoding_kv_tokens > 0
        self._decoding_kv += decoding_kv_tokens
        self._charged_prefill += prefill_tokens
        self._view = None

    def prefill_computed(self, key: ChargeKey) -> None:
        """Count the prompt of an engine request as computed."""
        charge = self.charges.get(key)
        if charge is not None:
            self._charged_prefill -= charge.prefill_tokens
            charge.prefill_tokens = 0
            self._view = None

    def release(self, key: ChargeKey) -> bool:
        """Stop counting an engine request; return whether it was counted."""
        charge = self.charges.pop(key, None)
        if charge is None:
            return False
        self._charged_kv -= charge.kv_tokens
        self._charged_prefill -= charge.prefill_tokens
        self._num_decoding -= charge.decoding_kv_tokens > 0
        self._decoding_kv -= charge.decoding_kv_tokens
        self._view = None
        return True

    def release_all(self) -> None:
        """Stop counting everything."""
        self.charges.clear()
        self._charged_kv = self._charged_prefill = self._num_decoding = self._decoding_kv = 0
        self._view = None

    @property
    def num_computing(self) -> int:
        """Submitted engine requests whose prompt is not computed yet."""
        return sum(1 for charge in self.charges.values() if charge.prefill_tokens)


def compatibility_of(r: Registration) -> Compatibility:
    """Return what decides whether a KV cache of this worker fits another."""
    return Compatibility(
        model_revision=r.model_revision,
        kv_dtype=r.kv_dtype,
        page_size=r.page_size,
        transfer_backend=r.transfer_backend,
        engine=r.engine,
        model=r.model_path,
        dtype=r.dtype,
        tp_size=r.tp_size,
        dp_size=r.dp_size,
        hash_format=r.hash_format,
    )
