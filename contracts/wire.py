"""Messages in Redis entries (msgpack), and the only translation to and from protobuf.

A Redis stream entry has one field `d`: a tagged msgpack map. Receivers ignore unknown fields, so
versions N and N-1 interoperate; `v` says which one wrote it.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from contracts.dimensions import NO_DIMENSIONS, Dimensions
from contracts.identity import rid_bytes, rid_from_bytes
from contracts.lifecycle import FinishReason, HandOff, Path, Phase, Role, WorkerState
from contracts.parsing import Grammar, Parsing
from contracts.perf import LatencyModel
from contracts.rating import Price
from contracts.slo import SloTarget, Timings
from contracts.v1 import worker_pb2 as pb

FIELD = "d"
VERSION = 1


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample. `max_tokens` is the effective maximum and always set.

    `top_logprobs` None = no log probabilities; 0 = those of the sampled tokens only.
    """

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = {}
    top_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who pays for a request and under which terms: all that a settlement needs besides the counts."""

    org: str
    project: str
    key_id: str
    model: str  # public name
    tier: str
    price: Price
    slo: SloTarget
    simulated: bool = False
    dimensions: Dimensions = NO_DIMENSIONS
    share_group: str = ""  # whose prefixes the request finds, and adds to; empty = its organisation's own
    repeated: bool = False  # makes an answer again that was paid, and costs nothing
    batch: bool = False  # a line of a batch, at its prices
    traceparent: str = ""  # W3C context of the request's own span; empty = not traced
    trace_parent_id: str = ""  # span id of the caller's span, 16 hex digits; empty = this one begins the trace


# -- inbox: gateway -> scheduler -----------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A new request. `prompt` is packed u32 (see pack_ids)."""

    v: int = VERSION
    rid: str
    pool: str
    gateway_id: str
    owner: Owner
    prompt: bytes
    sampling: Sampling
    deadline_unix_ms: int
    num_samples: int = 1
    stream: bool = False
    batch: bool = False
    cache_salt: str = ""
    adapter: str = ""
    parsing: Parsing | None = None
    session: str = ""  # affinity key
    local: bool = False  # the small model of a route, instead of the one that was asked for
    warm_replica: int = 0  # k >= 1: only the prompt is wanted, on the k-th worker of those that hold most of it
    unreachable: tuple[str, ...] = ()  # workers that the gateway cannot hear, so their tokens would reach nobody


class Continue(msgspec.Struct, frozen=True, kw_only=True, tag="continue"):
    """Go on with a request whose worker was lost; `delivered` is what the gateway has accepted of it.

    Tokens and text are counted apart, since a worker may have sent a token and held back a part of its text.
    """

    v: int = VERSION
    rid: str
    lost_attempt: int
    delivered: tuple[bytes, ...]  # packed ids per sample; empty = nothing of any sample
    delivered_chars: tuple[int, ...] = ()  # code points of each sample: text, reasoning, names and arguments of calls
    done: tuple[int, ...] = ()  # samples whose answer is whole
    unreachable: tuple[str, ...] = ()  # workers of the lost attempt that the gateway cannot hear
    gateway_id: str = ""  # who asks, should the scheduler know nothing of the request


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop a request in whatever state it is."""

    v: int = VERSION
    rid: str
    reason: str


InboxEntry = Submit | Continue | Abort


# -- notices: scheduler -> gateway -----------------------------------------------------------------------


class WorkerRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker is and which of its lives is meant."""

    worker_id: str
    epoch: int
    address: str


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag="placed"):
    """An attempt runs. `decode` streams the tokens; `prefill` is None for a unified worker."""

    v: int = VERSION
    rid: str
    attempt: int
    path: Path
    hand_off: HandOff | None
    decode: WorkerRef
    prefill: WorkerRef | None = None
    reason: str = ""  # of the placement
    queued_ms: float | None = None  # from the inbox to here; None = of another version, which does not say


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The scheduler will not run the request. `code` is one of contracts.errors."""

    v: int = VERSION
    rid: str
    code: str
    message: str
    retry_after_s: float | None = None


class AttemptLost(msgspec.Struct, frozen=True, kw_only=True, tag="attempt_lost"):
    """An attempt ended through a fault; `retrying` = the scheduler starts another one itself."""

    v: int = VERSION
    rid: str
    attempt: int
    cause: str
    retrying: bool


Notice = Placed | Refused | AttemptLost


# -- tenancy: command line, admin API -> gateways ----------------------------------------------------------


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A key changed its state, something is held or held no more; budgets, names or what is stored are others."""

    v: int = VERSION
    kind: str  # key | org | project | model | budget, texts (id = organisation) | name, catalogue (id = the name)
    id: str
    state: str  # of a key: `STATE:VERSION`; of the others: suspended, read_only, or empty = free
    drain: bool = False  # running streams may end by themselves


# -- scheduler's records ---------------------------------------------------------------------------------


class Inflight(msgspec.Struct, frozen=True, kw_only=True):
    """Write-ahead record of a placement, so that a new leader can adopt or repeat it."""

    v: int = VERSION
    rid: str
    entry_id: str  # of the inbox entry
    attempt: int
    leader_epoch: int
    path: Path
    hand_off: HandOff | None
    decode: WorkerRef
    prefill: WorkerRef | None
    rooms: tuple[int, ...]  # one per sample; empty unless the hand-off is direct
    continued: bool = False  # the attempt goes on from tokens that only the gateway knows
    done: tuple[int, ...] = ()  # samples that are whole already and do not run


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one request saw, gateway -> scheduler, best effort."""

    v: int = VERSION
    rid: str
    model: str
    tier: str
    outcome: str
    timings: Timings | None
    slo_met: bool | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    path: Path | None


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's lease value: where it is, what it can be paired with, and how it is."""

    v: int = VERSION
    worker_id: str
    epoch: int
    pid: int
    address: str  # gRPC, host:port
    pool: str
    role: Role
    state: WorkerState
    engine: str  # sglang | timed
    simulated: bool
    model_path: str  # folder's name, not its place
    model_revision: str  # hash of config and weights' sizes
    dtype: str
    kv_dtype: str
    page_size: int
    tp_size: int
    dp_size: int
    transfer_backend: str
    bootstrap_host: str
    bootstrap_port: int
    kv_capacity_tokens: int
    max_running: int
    context_tokens: int
    hand_offs: tuple[HandOff, ...]
    catalog_revision: str
    started_unix_ms: int
    zone: str = ""
    node: str = ""  # machine; links between two workers of one node are the cheapest
    hash_format: str = ""  # of the prefix blocks in its KvEvents (contracts.prefix.HASH_FORMAT); empty = sends none
    capabilities: tuple[str, ...] = ()  # what its engine can: "role_switch", "probe", "kv_events", ...
    num_running: int = 0
    num_waiting: int = 0
    kv_used: float = 0.0  # 0.0 to 1.0
    latency: LatencyModel | None = None  # costs, where the engine knows them; otherwise the scheduler learns them


_inbox_decoder = msgspec.msgpack.Decoder(InboxEntry)
_notice_decoder = msgspec.msgpack.Decoder(Notice)
_change_decoder = msgspec.msgpack.Decoder(Change)
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return the msgpack form of any message of this module or of contracts.usage."""
    return _encoder.encode(message)


def decode_inbox(raw: bytes) -> InboxEntry:
    """Return an inbox entry. Raises msgspec.ValidationError or DecodeError on garbage."""
    return _inbox_decoder.decode(raw)


def decode_notice(raw: bytes) -> Notice:
    """Return a notice. Raises msgspec.ValidationError or DecodeError on garbage."""
    return _notice_decoder.decode(raw)


def decode_change(raw: bytes) -> Change:
    """Return a change. Raises msgspec.ValidationError or DecodeError on garbage."""
    return _change_decoder.decode(raw)


# -- token ids -----------------------------------------------------------------------------------------------


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian u32."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(raw: bytes) -> list[int]:
    """Return the ids of pack_ids. Raises ValueError when `raw` is no whole number of u32."""
    unpacked = array("I")
    unpacked.frombytes(raw)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


# -- protobuf ------------------------------------------------------------------------------------------------

PHASE_TO_PB = {Phase.PREFILL: pb.PHASE_PREFILL, Phase.DECODE: pb.PHASE_DECODE, Phase.UNIFIED: pb.PHASE_UNIFIED}
PHASE_FROM_PB = {v: k for k, v in PHASE_TO_PB.items()}
ROLE_TO_PB = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE, Role.UNIFIED: pb.ROLE_UNIFIED}
ROLE_FROM_PB = {v: k for k, v in ROLE_TO_PB.items()}
STATE_TO_PB = {s: cast("pb.WorkerState", pb.WorkerState.Value(f"WORKER_STATE_{s.name}")) for s in WorkerState}
STATE_FROM_PB = {v: k for k, v in STATE_TO_PB.items()}
FINISH_TO_PB = {r: cast("pb.FinishReason", pb.FinishReason.Value(f"FINISH_REASON_{r.name}")) for r in FinishReason}
FINISH_FROM_PB = {v: k for k, v in FINISH_TO_PB.items()}


class Attempt(msgspec.Struct, frozen=True):
    """One engine request: hashable, the key of every table of running work."""

    rid: str
    attempt: int
    sample: int = 0


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one engine request, from the engine."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_host_tokens: int = 0  # of the cached ones: from host memory
    cached_store_tokens: int = 0  # and from the store; the rest was in the device's memory
    estimated: bool = False  # by a worker whose server told no counts


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one engine request in its worker, ms."""

    queue_ms: float = 0.0
    compute_ms: float = 0.0
    transfer_ms: float = 0.0
    first_token_ms: float = 0.0


def attempt_to_pb(attempt: Attempt) -> pb.AttemptId:
    """Return the protobuf form of an attempt's name."""
    return pb.AttemptId(rid=rid_bytes(attempt.rid), attempt=attempt.attempt, sample=attempt.sample)


def attempt_from_pb(message: pb.AttemptId) -> Attempt:
    """Return the attempt named by a message."""
    return Attempt(rid_from_bytes(message.rid), message.attempt, message.sample)


def counts_to_pb(counts: Counts) -> pb.Counts:
    """Return the protobuf form of counts."""
    return pb.Counts(
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=counts.completion_tokens,
        reasoning_tokens=counts.reasoning_tokens,
        cached_host_tokens=counts.cached_host_tokens,
        cached_store_tokens=counts.cached_store_tokens,
        estimated=counts.estimated,
    )


def counts_from_pb(message: pb.Counts) -> Counts:
    """Return the counts in a message."""
    return Counts(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        completion_tokens=message.completion_tokens,
        reasoning_tokens=message.reasoning_tokens,
        cached_host_tokens=message.cached_host_tokens,
        cached_store_tokens=message.cached_store_tokens,
        estimated=message.estimated,
    )


def stages_to_pb(stages: Stages) -> pb.Stages:
    """Return the protobuf form of stage durations."""
    return pb.Stages(
        queue_ms=stages.queue_ms,
        compute_ms=stages.compute_ms,
        transfer_ms=stages.transfer_ms,
        first_token_ms=stages.first_token_ms,
    )


def stages_from_pb(message: pb.Stages) -> Stages:
    """Return the stage durations in a message."""
    return Stages(
        queue_ms=message.queue_ms,
        compute_ms=message.compute_ms,
        transfer_ms=message.transfer_ms,
        first_token_ms=message.first_token_ms,
    )


_OPTIONAL_SAMPLING = (  # named alike in both forms
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "top_logprobs",
)


def sampling_to_pb(sampling: Sampling) -> pb.Sampling:
    """Return the protobuf form of sampling parameters; what is None stays absent."""
    message = pb.Sampling(max_tokens=sampling.max_tokens, stop=sampling.stop, ignore_eos=sampling.ignore_eos)
    for name in _OPTIONAL_SAMPLING:
        value = getattr(sampling, name)
        if value is not None:
            setattr(message, name, value)
    if sampling.logit_bias:
        message.logit_bias.update(sampling.logit_bias)
    if sampling.stop_token_ids:
        message.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.grammar is not None:
        message.grammar.kind, message.grammar.text = sampling.grammar.kind, sampling.grammar.text
    return message


def sampling_from_pb(message: pb.Sampling) -> Sampling:
    """Return the sampling parameters in a message. Raises msgspec.ValidationError for an unknown kind of grammar."""
    present = {field.name: value for field, value in message.ListFields()}
    given = {name: present[name] for name in _OPTIONAL_SAMPLING if name in present}
    grammar = None
    if message.HasField("grammar"):
        grammar = msgspec.convert({"kind": message.grammar.kind, "text": message.grammar.text}, Grammar)
    return Sampling(
        max_tokens=message.max_tokens,
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        grammar=grammar,
        **given,
    )
