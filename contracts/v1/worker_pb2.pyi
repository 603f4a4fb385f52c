from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
    PHASE_UNIFIED: _ClassVar[Phase]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_UNIFIED: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_SWITCHING: _ClassVar[WorkerState]
    WORKER_STATE_UNHEALTHY: _ClassVar[WorkerState]
    WORKER_STATE_STOPPED: _ClassVar[WorkerState]
    WORKER_STATE_SLEEPING: _ClassVar[WorkerState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_READER_LOST: _ClassVar[FinishReason]
    FINISH_REASON_HAND_OFF: _ClassVar[FinishReason]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_STORE: _ClassVar[Tier]
PHASE_UNSPECIFIED: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase
PHASE_UNIFIED: Phase
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_UNIFIED: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_SWITCHING: WorkerState
WORKER_STATE_UNHEALTHY: WorkerState
WORKER_STATE_STOPPED: WorkerState
WORKER_STATE_SLEEPING: WorkerState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_READER_LOST: FinishReason
FINISH_REASON_HAND_OFF: FinishReason
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_STORE: Tier

class AttemptId(_message.Message):
    __slots__ = ("rid", "attempt", "sample")
    RID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    rid: bytes
    attempt: int
    sample: int
    def __init__(self, rid: _Optional[bytes] = ..., attempt: _Optional[int] = ..., sample: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "min_tokens", "ignore_eos", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "top_logprobs", "stop_token_ids", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    min_tokens: int
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    top_logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., top_logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Parsing(_message.Message):
    __slots__ = ("tool_parser", "reasoning_parser", "tools", "tool_choice", "tool_name", "parallel_tool_calls", "reasoning_open")
    TOOL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_OPEN_FIELD_NUMBER: _ClassVar[int]
    tool_parser: str
    reasoning_parser: str
    tools: str
    tool_choice: str
    tool_name: str
    parallel_tool_calls: bool
    reasoning_open: bool
    def __init__(self, tool_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., tools: _Optional[str] = ..., tool_choice: _Optional[str] = ..., tool_name: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ..., reasoning_open: _Optional[bool] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cached_host_tokens", "cached_store_tokens", "estimated")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_host_tokens: int
    cached_store_tokens: int
    estimated: bool
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., cached_host_tokens: _Optional[int] = ..., cached_store_tokens: _Optional[int] = ..., estimated: _Optional[bool] = ...) -> None: ...

class Stages(_message.Message):
    __slots__ = ("queue_ms", "compute_ms", "transfer_ms", "first_token_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    compute_ms: float
    transfer_ms: float
    first_token_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ...) -> None: ...

class ControlCommand(_message.Message):
    __slots__ = ("hello", "submit", "abort", "set_role", "drain", "settled", "probe", "kv_resync", "sleep", "also")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SET_ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    KV_RESYNC_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    abort: Abort
    set_role: SetRole
    drain: Drain
    settled: Settled
    probe: Probe
    kv_resync: KvResync
    sleep: Sleep
    also: _containers.RepeatedCompositeFieldContainer[ControlCommand]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., set_role: _Optional[_Union[SetRole, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., kv_resync: _Optional[_Union[KvResync, _Mapping]] = ..., sleep: _Optional[_Union[Sleep, _Mapping]] = ..., also: _Optional[_Iterable[_Union[ControlCommand, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("scheduler_id", "leader_epoch", "v")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    leader_epoch: int
    v: int
    def __init__(self, scheduler_id: _Optional[str] = ..., leader_epoch: _Optional[int] = ..., v: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("id", "leader_epoch", "worker_epoch", "phase", "gateway_id", "deadline_unix_ms", "prompt", "sampling", "bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_salt", "adapter", "delivered", "traceparent", "hand_off", "parsing", "delivered_chars", "link", "prompt_only", "payer", "placed")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_HOST_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_PORT_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    PARSING_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_CHARS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ONLY_FIELD_NUMBER: _ClassVar[int]
    PAYER_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    leader_epoch: int
    worker_epoch: int
    phase: Phase
    gateway_id: str
    deadline_unix_ms: int
    prompt: bytes
    sampling: Sampling
    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    cache_salt: str
    adapter: str
    delivered: bytes
    traceparent: str
    hand_off: str
    parsing: Parsing
    delivered_chars: int
    link: str
    prompt_only: bool
    payer: str
    placed: bytes
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., leader_epoch: _Optional[int] = ..., worker_epoch: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., gateway_id: _Optional[str] = ..., deadline_unix_ms: _Optional[int] = ..., prompt: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., bootstrap_host: _Optional[str] = ..., bootstrap_port: _Optional[int] = ..., bootstrap_room: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., delivered: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., hand_off: _Optional[str] = ..., parsing: _Optional[_Union[Parsing, _Mapping]] = ..., delivered_chars: _Optional[int] = ..., link: _Optional[str] = ..., prompt_only: _Optional[bool] = ..., payer: _Optional[str] = ..., placed: _Optional[bytes] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("id", "all_samples", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    ALL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    all_samples: bool
    reason: str
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., all_samples: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class SetRole(_message.Message):
    __slots__ = ("role", "leader_epoch")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    role: Role
    leader_epoch: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., leader_epoch: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("on", "leader_epoch")
    ON_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    on: bool
    leader_epoch: int
    def __init__(self, on: _Optional[bool] = ..., leader_epoch: _Optional[int] = ...) -> None: ...

class Sleep(_message.Message):
    __slots__ = ("on", "leader_epoch")
    ON_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    on: bool
    leader_epoch: int
    def __init__(self, on: _Optional[bool] = ..., leader_epoch: _Optional[int] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("rid",)
    RID_FIELD_NUMBER: _ClassVar[int]
    rid: bytes
    def __init__(self, rid: _Optional[bytes] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("submit",)
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ...) -> None: ...

class KvResync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ControlReport(_message.Message):
    __slots__ = ("inventory", "accepted", "rejected", "status", "prefill_done", "final", "delivered", "role_result", "kv_events", "probe_result", "expert_hits", "also")
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    ROLE_RESULT_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    PROBE_RESULT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HITS_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    inventory: Inventory
    accepted: Accepted
    rejected: Rejected
    status: Status
    prefill_done: PrefillDone
    final: Final
    delivered: Delivered
    role_result: RoleResult
    kv_events: KvEvents
    probe_result: ProbeResult
    expert_hits: ExpertHits
    also: _containers.RepeatedCompositeFieldContainer[ControlReport]
    def __init__(self, inventory: _Optional[_Union[Inventory, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ..., delivered: _Optional[_Union[Delivered, _Mapping]] = ..., role_result: _Optional[_Union[RoleResult, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., probe_result: _Optional[_Union[ProbeResult, _Mapping]] = ..., expert_hits: _Optional[_Union[ExpertHits, _Mapping]] = ..., also: _Optional[_Iterable[_Union[ControlReport, _Mapping]]] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("worker_id", "worker_epoch", "leader_epoch", "running", "finals", "status", "v")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FINALS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker_epoch: int
    leader_epoch: int
    running: _containers.RepeatedCompositeFieldContainer[Running]
    finals: _containers.RepeatedCompositeFieldContainer[Final]
    status: Status
    v: int
    def __init__(self, worker_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., leader_epoch: _Optional[int] = ..., running: _Optional[_Iterable[_Union[Running, _Mapping]]] = ..., finals: _Optional[_Iterable[_Union[Final, _Mapping]]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., v: _Optional[int] = ...) -> None: ...

class Running(_message.Message):
    __slots__ = ("id", "phase", "gateway_id", "bootstrap_room")
    ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    phase: Phase
    gateway_id: str
    bootstrap_room: int
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., gateway_id: _Optional[str] = ..., bootstrap_room: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("id", "phase")
    ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    phase: Phase
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("id", "phase", "code", "message")
    ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    phase: Phase
    code: str
    message: str
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("worker_epoch", "role", "state", "num_running", "num_waiting", "prefill_queue_tokens", "kv_used_tokens", "kv_capacity_tokens", "tokens_produced", "prefill_chunks_done", "last_progress_age_ms", "progressing", "num_transfers", "transfer_p50_ms", "num_waiting_decode_memory", "sent_unix_ms", "num_prefill_waiting", "num_prefill_bootstrap", "num_prefill_inflight", "num_decode_transfer", "transfers_done", "transfers_failed", "transfer_total_ms", "transfer_exposed_ms", "transfer_exposed_p50_ms", "links", "hit_device_tokens", "hit_host_tokens", "hit_store_tokens", "computed_tokens", "kv_seq", "gpu_utilisation", "gpu_memory_used_bytes", "gpu_memory_total_bytes", "gpu_power_watts", "nic_received_bytes", "nic_sent_bytes")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PRODUCED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNKS_DONE_FIELD_NUMBER: _ClassVar[int]
    LAST_PROGRESS_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    PROGRESSING_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_P50_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_DECODE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_DONE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FAILED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_P50_MS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    HIT_DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_SEQ_FIELD_NUMBER: _ClassVar[int]
    GPU_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    NIC_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NIC_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    role: Role
    state: WorkerState
    num_running: int
    num_waiting: int
    prefill_queue_tokens: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    tokens_produced: int
    prefill_chunks_done: int
    last_progress_age_ms: float
    progressing: bool
    num_transfers: int
    transfer_p50_ms: float
    num_waiting_decode_memory: int
    sent_unix_ms: int
    num_prefill_waiting: int
    num_prefill_bootstrap: int
    num_prefill_inflight: int
    num_decode_transfer: int
    transfers_done: int
    transfers_failed: int
    transfer_total_ms: float
    transfer_exposed_ms: float
    transfer_exposed_p50_ms: float
    links: _containers.RepeatedCompositeFieldContainer[LinkCount]
    hit_device_tokens: int
    hit_host_tokens: int
    hit_store_tokens: int
    computed_tokens: int
    kv_seq: int
    gpu_utilisation: float
    gpu_memory_used_bytes: int
    gpu_memory_total_bytes: int
    gpu_power_watts: float
    nic_received_bytes: int
    nic_sent_bytes: int
    def __init__(self, worker_epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., prefill_queue_tokens: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., tokens_produced: _Optional[int] = ..., prefill_chunks_done: _Optional[int] = ..., last_progress_age_ms: _Optional[float] = ..., progressing: _Optional[bool] = ..., num_transfers: _Optional[int] = ..., transfer_p50_ms: _Optional[float] = ..., num_waiting_decode_memory: _Optional[int] = ..., sent_unix_ms: _Optional[int] = ..., num_prefill_waiting: _Optional[int] = ..., num_prefill_bootstrap: _Optional[int] = ..., num_prefill_inflight: _Optional[int] = ..., num_decode_transfer: _Optional[int] = ..., transfers_done: _Optional[int] = ..., transfers_failed: _Optional[int] = ..., transfer_total_ms: _Optional[float] = ..., transfer_exposed_ms: _Optional[float] = ..., transfer_exposed_p50_ms: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkCount, _Mapping]]] = ..., hit_device_tokens: _Optional[int] = ..., hit_host_tokens: _Optional[int] = ..., hit_store_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., kv_seq: _Optional[int] = ..., gpu_utilisation: _Optional[float] = ..., gpu_memory_used_bytes: _Optional[int] = ..., gpu_memory_total_bytes: _Optional[int] = ..., gpu_power_watts: _Optional[float] = ..., nic_received_bytes: _Optional[int] = ..., nic_sent_bytes: _Optional[int] = ...) -> None: ...

class LinkCount(_message.Message):
    __slots__ = ("link", "done", "failed")
    LINK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    link: str
    done: int
    failed: int
    def __init__(self, link: _Optional[str] = ..., done: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("seq", "cleared", "tier", "stored", "removed")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    cleared: bool
    tier: Tier
    stored: bytes
    removed: bytes
    def __init__(self, seq: _Optional[int] = ..., cleared: _Optional[bool] = ..., tier: _Optional[_Union[Tier, str]] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class ExpertHits(_message.Message):
    __slots__ = ("experts", "tokens")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    experts: int
    tokens: bytes
    def __init__(self, experts: _Optional[int] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class ProbeResult(_message.Message):
    __slots__ = ("id", "phase", "ok", "ms", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    phase: Phase
    ok: bool
    ms: float
    error: str
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., ok: _Optional[bool] = ..., ms: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("id", "counts", "stages")
    ID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    counts: Counts
    stages: Stages
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., counts: _Optional[_Union[Counts, _Mapping]] = ..., stages: _Optional[_Union[Stages, _Mapping]] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("id", "phase", "reason", "counts", "stages", "delivered", "error", "gateway_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    phase: Phase
    reason: FinishReason
    counts: Counts
    stages: Stages
    delivered: bool
    error: str
    gateway_id: str
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., counts: _Optional[_Union[Counts, _Mapping]] = ..., stages: _Optional[_Union[Stages, _Mapping]] = ..., delivered: _Optional[bool] = ..., error: _Optional[str] = ..., gateway_id: _Optional[str] = ...) -> None: ...

class Delivered(_message.Message):
    __slots__ = ("id", "phase")
    ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    phase: Phase
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ...) -> None: ...

class RoleResult(_message.Message):
    __slots__ = ("ok", "role", "worker_epoch", "drain_ms", "switch_ms", "message")
    OK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAIN_MS_FIELD_NUMBER: _ClassVar[int]
    SWITCH_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    role: Role
    worker_epoch: int
    drain_ms: float
    switch_ms: float
    message: str
    def __init__(self, ok: _Optional[bool] = ..., role: _Optional[_Union[Role, str]] = ..., worker_epoch: _Optional[int] = ..., drain_ms: _Optional[float] = ..., switch_ms: _Optional[float] = ..., message: _Optional[str] = ...) -> None: ...

class AttachCommand(_message.Message):
    __slots__ = ("hello", "ack", "abort")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    hello: AttachHello
    ack: Ack
    abort: Abort
    def __init__(self, hello: _Optional[_Union[AttachHello, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class AttachHello(_message.Message):
    __slots__ = ("gateway_id", "worker_epoch", "last_seq", "v")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    worker_epoch: int
    last_seq: int
    v: int
    def __init__(self, gateway_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., last_seq: _Optional[int] = ..., v: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("seq", "worker_epoch", "opened", "handle", "text", "num_tokens", "token_ids", "finished", "v", "lost", "details")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    worker_epoch: int
    opened: _containers.RepeatedCompositeFieldContainer[Opened]
    handle: _containers.RepeatedScalarFieldContainer[int]
    text: _containers.RepeatedScalarFieldContainer[str]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    v: int
    lost: bool
    details: _containers.RepeatedCompositeFieldContainer[Detail]
    def __init__(self, seq: _Optional[int] = ..., worker_epoch: _Optional[int] = ..., opened: _Optional[_Iterable[_Union[Opened, _Mapping]]] = ..., handle: _Optional[_Iterable[int]] = ..., text: _Optional[_Iterable[str]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., v: _Optional[int] = ..., lost: _Optional[bool] = ..., details: _Optional[_Iterable[_Union[Detail, _Mapping]]] = ...) -> None: ...

class Detail(_message.Message):
    __slots__ = ("entry", "reasoning", "tool_calls", "logprobs")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    entry: int
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, entry: _Optional[int] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob", "token", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    token: bytes
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., token: _Optional[bytes] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("handle", "id", "phase", "placed")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    id: AttemptId
    phase: Phase
    placed: bytes
    def __init__(self, handle: _Optional[int] = ..., id: _Optional[_Union[AttemptId, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., placed: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "reason", "counts", "stages", "error", "matched_stop")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: FinishReason
    counts: Counts
    stages: Stages
    error: str
    matched_stop: str
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., counts: _Optional[_Union[Counts, _Mapping]] = ..., stages: _Optional[_Union[Stages, _Mapping]] = ..., error: _Optional[str] = ..., matched_stop: _Optional[str] = ...) -> None: ...
