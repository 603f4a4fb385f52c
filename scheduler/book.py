"""The requests of one term: everything the leader knows of them, from inbox entry to settlement."""

import enum
from collections.abc import Iterator, Sequence

import msgspec

from contracts.identity import rid_bytes
from contracts.lifecycle import FinishReason, HandOff, Path, Phase, RequestState, Role, move_request
from contracts.v1 import worker_pb2 as pb
from contracts.wire import FINISH_FROM_PB, Counts, Placed, Stages, Submit, WorkerRef, counts_from_pb, stages_from_pb
from scheduler.policy.cluster import RequestView
from scheduler.policy.fairness import Ticket
from scheduler.policy.placement import Reason
from scheduler.policy.sizing import Sized
from scheduler.worker import ChargeKey, Worker


class PartState(enum.StrEnum):
    """How far one engine request got, as its worker reported it."""

    HELD = "held"  # hand-off by the store: sent when the prompt is computed
    SENT = "sent"
    ACCEPTED = "accepted"
    COMPUTED = "computed"  # prefill: the prompt is done, the KV cache may still be on its way
    FINAL = "final"
    LOST = "lost"  # its worker died, or never got it


class Part:
    """One engine request: one sample of one attempt in one phase on one worker."""

    __slots__ = ("counts", "delivered", "error", "phase", "reason", "sample", "sent_s", "stages", "state", "worker")

    def __init__(self, worker: Worker, phase: Phase, sample: int, state: PartState = PartState.SENT) -> None:
        self.worker = worker
        self.phase = phase
        self.sample = sample
        self.state = state
        self.sent_s = 0.0  # when it was submitted, monotonic
        self.reason: FinishReason | None = None
        self.counts: Counts | None = None
        self.stages = Stages()
        self.delivered = False
        self.error = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will be heard of it."""
        return self.state in (PartState.FINAL, PartState.LOST)

    def finish(self, final: pb.Final) -> None:
        """Take the worker's last word."""
        self.state = PartState.FINAL
        self.reason = FINISH_FROM_PB.get(final.reason, FinishReason.ERROR)
        self.counts = counts_from_pb(final.counts)
        self.stages = stages_from_pb(final.stages)
        self.delivered = self.delivered or final.delivered
        self.error = final.error


class Request:
    """One inbox entry and where it stands. Only the dispatcher changes it."""

    __slots__ = (
        "arrived_ms",
        "asked_gateway",
        "attempt",
        "blocked_by",
        "blocked_ms",
        "blocks",
        "charged",
        "claimed",
        "decode_ref",
        "delivered",
        "delivered_chars",
        "done",
        "ended_s",
        "entry_id",
        "excluded",
        "first_prompt",
        "hand_off",
        "hand_off_due_s",
        "hand_off_now",
        "hand_off_retries",
        "hoped_cached_tokens",
        "not_before_s",
        "num_yields",
        "parts",
        "path",
        "placed_ms",
        "placing",
        "predicted_step_ms",
        "predicted_ttft_ms",
        "prefill_ref",
        "prompt_tokens",
        "pushed_ms",
        "queued_ms",
        "queued_s",
        "reason",
        "rid_bytes",
        "rooms",
        "seq",
        "sized",
        "state",
        "stop_requested",
        "submit",
        "tier",
        "workers",
        "yielding",
    )

    def __init__(self, submit: Submit, entry_id: bytes, *, seq: int, now_s: float) -> None:
        self.submit = submit
        self.entry_id = entry_id
        self.seq = seq
        self.rid_bytes = rid_bytes(submit.rid)
        self.prompt_tokens = len(submit.prompt) // 4
        self.tier = submit.owner.tier
        self.hand_off = HandOff.DIRECT  # of the pool
        self.sized: Sized | None = None  # what was forecast when it arrived
        self.blocks: tuple[int, ...] = ()  # names of its prompt's full blocks
        self.hoped_cached_tokens = 0  # prefix hit that its placement counts on
        self.charged = False  # its tenant was charged its forecast cost
        self.arrived_ms = self.pushed_ms = now_s * 1000  # at the gateway; into the queue. Monotonic
        self.placed_ms = self.predicted_ttft_ms = self.predicted_step_ms = 0.0  # of the current attempt
        self.blocked_ms: dict[Role, float] = {}  # waiting in the queue, by the role that had no room
        self.state = RequestState.QUEUED
        self.queued_s = now_s
        self.queued_ms = 0.0  # from its inbox entry to its first placement
        self.not_before_s = 0.0
        self.attempt = 0  # the highest attempt written to the in-flight record
        self.placing = False  # chosen workers are being written to the in-flight record
        self.parts: dict[tuple[Phase, int], Part] = {}  # of the current attempt
        self.path: Path | None = None
        self.reason: Reason | None = None
        self.decode_ref: WorkerRef | None = None
        self.prefill_ref: WorkerRef | None = None
        self.rooms: tuple[int, ...] = ()
        self.excluded = set(submit.unreachable)
        self.delivered: tuple[bytes, ...] | None = ()  # per sample, by lost attempts; None = only the gateway knows
        self.delivered_chars: tuple[int, ...] = ()
        self.done: frozenset[int] = frozenset()  # samples that lost attempts finished
        self.first_prompt: Counts | None = None  # of the first attempt that computed its prompt
        self.blocked_by: Reason | None = None
        self.claimed = False  # taken over from another leader
        self.asked_gateway = False  # AttemptLost(retrying=False) sent for the current attempt
        self.stop_requested = False  # no further attempt, whatever happens
        self.hand_off_due_s: float | None = None
        self.hand_off_now: HandOff | None = None  # of the current attempt; None on a unified worker
        self.hand_off_retries = 0
        self.ended_s: float | None = None  # since when only the settlement is missing
        self.yielding = False  # a batch line that was sent away, until it is queued again
        self.num_yields = 0
        self.workers: list[Worker] = []  # that hold anything of any attempt

    @property
    def rid(self) -> str:
        """The request's id."""
        return self.submit.rid

    @property
    def written_unix_ms(self) -> int:
        """When its inbox entry was written, by Redis' clock."""
        return int(self.entry_id.partition(b"-")[0])

    @property
    def notice(self) -> Placed:
        """What its gateway is told of the current attempt, which is placed."""
        assert self.path is not None
        assert self.decode_ref is not None
        return Placed(
            rid=self.rid,
            attempt=self.attempt,
            path=self.path,
            hand_off=self.hand_off_now,
            decode=self.decode_ref,
            prefill=self.prefill_ref,
            reason=self.reason or "",
            queued_ms=None if self.claimed else self.queued_ms,
        )

    @property
    def ticket(self) -> Ticket:
        """Its place in the order. A request that was charged before, runs again at no cost to its tenant."""
        assert self.sized is not None
        return msgspec.structs.replace(self.sized.ticket, cost=0.0) if self.charged else self.sized.ticket

    @property
    def work_ms(self) -> float:
        """Its prompt's compute time, as forecast."""
        return self.sized.work_ms if self.sized is not None else 0.0

    def move(self, to: RequestState) -> None:
        """Change the state. Raises contracts.lifecycle.IllegalMove."""
        self.state = move_request(self.state, to)

    def reopen(self) -> None:
        """Queue a finished request again."""
        self.move(RequestState.QUEUED)
        self.ended_s = None

    def key(self, sample: int) -> ChargeKey:
        """Return the name under which workers charge a sample of the current attempt."""
        return self.rid_bytes, self.attempt, sample

    @property
    def samples(self) -> Sequence[int]:
        """The samples that an attempt runs."""
        return [sample for sample in range(self.submit.num_samples) if sample not in self.done]

    @property
    def num_delivered(self) -> int:
        """Tokens of the longest unfinished sample that the gateway has."""
        delivered = self.delivered or ()
        return max((len(delivered[sample]) // 4 for sample in self.samples), default=0) if delivered else 0

    @property
    def input_tokens(self) -> int:
        """Tokens to compute before another attempt samples: the prompt, and the answer so far."""
        return self.prompt_tokens + self.num_delivered

    @property
    def output_tokens(self) -> int:
        """The most tokens that one sample of another attempt makes."""
        return max(1, self.submit.sampling.max_tokens - self.num_delivered)

    def view(self) -> RequestView:
        """Return the request as policy sees it."""
        return RequestView(
            prompt_tokens=self.input_tokens,
            max_tokens=self.output_tokens,
            num_samples=len(self.samples),
            hand_off=self.hand_off,
            excluded=frozenset(self.excluded),
            warm_replica=self.submit.warm_replica,
        )

    def side(self, *phases: Phase) -> Iterator[Part]:
        """Yield the parts of these phases."""
        return (part for part in self.parts.values() if part.phase in phases)

    def unknown_to(self, worker: Worker, sample: int) -> bool:
        """Whether the worker's last inventory cannot have a part: it was submitted later, or not yet."""
        return self.placing or any(
            part.worker is worker
            and part.sample == sample
            and (part.state is PartState.HELD or part.sent_s > worker.inventoried_s)
            for part in self.parts.values()
        )

    @property
    def streaming_parts(self) -> Iterator[Part]:
        """The parts whose tokens the tenant sees."""
        return self.side(Phase.DECODE, Phase.UNIFIED)

    @property
    def decode_ended(self) -> bool:
        """Whether every sample's token stream is over."""
        return all(part.ended for part in self.streaming_parts)

    @property
    def ended(self) -> bool:
        """Whether no worker runs anything of the current attempt."""
        return not self.placing and all(part.ended for part in self.parts.values())

    @property
    def terminal(self) -> bool:
        """Whether only the settlement is missing."""
        return self.state in (RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED)


class Book:
    """All unsettled requests, by the id in Redis (text) and on the wire (16 bytes)."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._by_bytes: dict[bytes, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def get(self, rid: str) -> Request | None:
        """Return a request, or None when it is not known or settled."""
        return self._requests.get(rid)

    def find(self, rid: bytes) -> Request | None:
        """Return a request by the 16 bytes of its id."""
        return self._by_bytes.get(rid)

    def add(self, request: Request) -> None:
        """Take a request in."""
        self._requests[request.rid] = request
        self._by_bytes[request.rid_bytes] = request

    def remove(self, rid: str) -> Request | None:
        """Forget a request and return it."""
        request = self._requests.pop(rid, None)
        if request is not None:
            del self._by_bytes[request.rid_bytes]
        return request
