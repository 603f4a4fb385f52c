"""What policy sees: requests, workers and limits as values. Built by adapters, never changed."""

import msgspec

from contracts.lifecycle import HandOff, Role


class Compatibility(msgspec.Struct, frozen=True):
    """What two workers must share so that a KV cache made by one can be read by the other."""

    model_revision: str
    kv_dtype: str
    page_size: int
    transfer_backend: str
    engine: str = ""
    model: str = ""
    dtype: str = ""
    tp_size: int = 1
    dp_size: int = 1
    hash_format: str = ""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker at one instant: the last pushed status plus what was submitted since."""

    worker_id: str
    epoch: int
    role: Role
    ready: bool  # leased, connected, not suspect, not draining
    pairs_with: Compatibility
    hand_offs: frozenset[HandOff]
    max_running: int
    context_tokens: int
    kv_capacity_tokens: int
    num_requests: int = 0  # running and waiting
    kv_tokens: int = 0  # held, or promised to what was submitted
    queued_prefill_tokens: int = 0  # prompt tokens accepted and not yet computed
    zone: str = ""
    reachable: bool = True  # a prefill worker tells where its KV cache is fetched from
    num_decoding: int | None = None  # requests that decode here or will; None = all of them
    decoding_kv_tokens: int | None = None  # what those hold half-way through their answers; None = all that is held

    @property
    def batch(self) -> tuple[int, int]:
        """Requests and KV tokens of its decode steps, on average until those requests end.

        Memory is promised for the end of an answer, steps take as long as what is there: half of the answer on average.
        """
        requests, tokens = self.num_decoding, self.decoding_kv_tokens
        return (self.num_requests if requests is None else requests, self.kv_tokens if tokens is None else tokens)

    @property
    def load_tokens(self) -> int:
        """Tokens of running and waiting work: what "least loaded" compares."""
        return self.kv_tokens + self.queued_prefill_tokens


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one pool by role, whether ready or not."""

    prefill: tuple[WorkerView, ...] = ()
    decode: tuple[WorkerView, ...] = ()
    unified: tuple[WorkerView, ...] = ()
    barred: frozenset[tuple[str, str]] = frozenset()  # prefill and decode ids that fit and must not be paired now
    over_budget: frozenset[tuple[str, str]] = frozenset()  # those of them whose link fails or is slow

    @classmethod
    def of(
        cls,
        workers: tuple[WorkerView, ...],
        *,
        barred: frozenset[tuple[str, str]] = frozenset(),
        over_budget: frozenset[tuple[str, str]] = frozenset(),
    ) -> "ClusterView":
        """Return the view of these workers, each under its own role."""
        return cls(
            barred=barred,
            over_budget=over_budget,
            prefill=tuple(w for w in workers if w.role is Role.PREFILL),
            decode=tuple(w for w in workers if w.role is Role.DECODE),
            unified=tuple(w for w in workers if w.role is Role.UNIFIED),
        )

    @property
    def only_unified(self) -> "ClusterView":
        """The same without its pairs."""
        return ClusterView(unified=self.unified)

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """All workers."""
        return self.prefill + self.decode + self.unified


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """What placement needs to know of a request."""

    prompt_tokens: int
    max_tokens: int
    num_samples: int = 1
    hand_off: HandOff = HandOff.DIRECT
    excluded: frozenset[str] = frozenset()  # workers where an attempt of it failed
    warm_replica: int = 0  # k >= 1: only its prompt is wanted, on the k-th worker of those that hold most of it

    @property
    def context_tokens(self) -> int:
        """Tokens one sample may reach."""
        return self.prompt_tokens + self.max_tokens


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of placement and admission."""

    unified_up_to_tokens: int = 128
    """Prompts up to this length prefer a unified worker with room over a pair."""
    expected_output_tokens: int = 256
    """KV promised to a request beyond its prompt, if its own maximum is not lower."""
    max_queued_requests: int = 4096
    """Requests that may wait in the scheduler; more are refused."""
    max_attempts: int = 3
    """Attempts per request, the first included."""
    no_worker_grace_s: float = 5.0
    """How long a request waits for a worker to appear when there is none at all."""
    retry_after_s: float = 2.0
    """Hint in refusals for lack of capacity; more when what waits takes longer."""
    longest_retry_after_s: float = 60.0

    def promised_tokens(self, prompt_tokens: int, max_tokens: int, num_samples: int) -> int:
        """Return the KV tokens a decode or unified worker must have free for a request."""
        return num_samples * (prompt_tokens + min(max_tokens, self.expected_output_tokens))
