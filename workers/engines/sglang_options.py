"""How SGLang is started: the environment and the arguments, with and without an accelerator.

No module but `workers.engines.sglang` imports SGLang; this one only knows its names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from contracts.lifecycle import Role
from workers.engines.sglang_store import StoreOptions, store_arguments, store_environment

CPU_FOLDER = Path(__file__).parent / "sglang_cpu"
UNPINNED_VARIABLE = "PDGATE_SGLANG_UNPINNED"
FAULTS_VARIABLE = "PDGATE_SGLANG_FAULTS_FILE"
CPU_TOKENS = 8_192
CPU_RUNNING = 32
CPU_CHUNK_TOKENS = 512
MAX_LORAS_PER_BATCH = 8
# The longest normal silence. On a CPU: one prefill chunk of a 135M model while neighbours use the cores.
CPU_SLOWEST_STEP_MS = 15_000.0
ACCELERATOR_SLOWEST_STEP_MS = 2_500.0


class SglangOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker decides about its engine."""

    role: Role
    model_path: str
    bootstrap_host: str
    bootstrap_port: int  # of the prefill side; 0 = a free one
    peer_timeout_s: float
    max_total_tokens: int = 0  # 0 = SGLang's choice, or CPU_TOKENS without an accelerator
    max_running: int = 0  # 0 = SGLang's choice, or CPU_RUNNING without an accelerator
    faults_file: str = ""
    tool_parsers: frozenset[str] = frozenset()  # of the pool's models
    reasoning_parser: str = ""  # of the pool's models; grammars wait for the end of the reasoning
    adapters: Mapping[str, str] = msgspec.field(default_factory=dict)  # LoRA: folder by the engine's name for it
    store: StoreOptions | None = None  # hand-off by the store; None = direct
    sleeps: bool = False  # weights and KV cache may leave the device while the engine idles
    further: Mapping[str, Any] = msgspec.field(default_factory=dict)  # win over everything else
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)  # of the environment, of a profile


def environment(options: SglangOptions, *, accelerator: bool, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set before SGLang is imported and its processes are spawned.

    SGLang's two timeouts count the peer's queue, its computing and the wait for decode memory in, so they
    are a backstop; the scheduler's hand-off timer, which starts at the end of prefill, is the short one.
    """
    timeout_s = str(max(1, round(options.peer_timeout_s)))
    variables = {
        **options.variables,
        "HF_HUB_OFFLINE": "1",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": timeout_s,
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": timeout_s,
    }
    if options.store is not None:
        variables |= store_environment(options.store, accelerator=accelerator)
    if accelerator:
        return variables
    path = [str(CPU_FOLDER), *filter(None, [inherited.get("PYTHONPATH", "")])]
    variables |= {
        "PYTHONPATH": ":".join(path),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "pdgate_sglang_models",
        "SGLANG_HOST_IP": options.bootstrap_host,
        "OMP_NUM_THREADS": "1",
        # sending a cached prefix ahead of the forward pass needs torch.cuda.Event
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        # torch.compile would need a C++ compiler on the machine
        "TORCHDYNAMO_DISABLE": "1",
    }
    if options.adapters:
        variables[UNPINNED_VARIABLE] = "1"
    if options.faults_file:
        variables[FAULTS_VARIABLE] = options.faults_file
    return variables


def arguments(options: SglangOptions, *, accelerator: bool, bootstrap_port: int, kv_events: str = "") -> dict[str, Any]:
    """Return the arguments of `sglang.Engine`; `kv_events` = the ZeroMQ address to tell of the cache at."""
    chosen: dict[str, Any] = {
        "model_path": options.model_path,
        "log_level": "error",
        "incremental_streaming_output": True,
        "enable_metrics": True,  # for the stage times in each answer; per-request metrics are switched off
        "enable_cache_report": True,
        "radix_eviction_policy": "priority",  # what was computed ahead goes last (workers.pins); else by last use
        # A schema would allow blanks between its parts, and small models go on with them until their last token.
        "constrained_json_disable_any_whitespace": True,
    }
    if not accelerator:
        chosen |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "dtype": "float32",
            # max_total_tokens decides. A small fraction of what was free at start would shrink it further
            # whenever a neighbour starts at the same time.
            "mem_fraction_static": 0.9,
            "max_total_tokens": CPU_TOKENS,
            "max_running_requests": CPU_RUNNING,
            "chunked_prefill_size": CPU_CHUNK_TOKENS,
            "sleep_on_idle": True,  # an idle scheduler would burn a core
        }
    if options.sleeps and accelerator:  # without one there is no memory to give back, and no library for it
        chosen |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    if options.reasoning_parser:
        chosen["reasoning_parser"] = options.reasoning_parser
    if options.adapters:
        chosen |= {"enable_lora": True, "lora_paths": dict(options.adapters)}
        chosen["max_loras_per_batch"] = min(len(options.adapters) + 1, MAX_LORAS_PER_BATCH)  # and no adapter
        if not accelerator:
            chosen["lora_backend"] = "torch_native"
    if options.max_total_tokens:
        chosen["max_total_tokens"] = options.max_total_tokens
    if options.max_running:
        chosen["max_running_requests"] = options.max_running
    chosen |= _of_role(options, accelerator=accelerator, bootstrap_port=bootstrap_port) | _of_events(kv_events)
    return {**chosen, **options.further}


def _of_events(address: str) -> dict[str, Any]:
    if not address:
        return {}
    told = {"publisher": "zmq", "topic": "kv", "endpoint": address, "bind": True, "format": "dynamo"}
    return {"kv_events_config": json.dumps(told)}


def _of_role(options: SglangOptions, *, accelerator: bool, bootstrap_port: int) -> dict[str, Any]:
    if options.store is not None:
        return store_arguments(options.store, accelerator=accelerator)
    if options.role is Role.UNIFIED:
        return {}
    chosen: dict[str, Any] = {
        "disaggregation_mode": options.role.value,
        "disaggregation_transfer_backend": "mooncake" if accelerator else "mooncake_tcp",
        # Both roles have what either needs, so that the role can change.
        "disaggregation_bootstrap_port": bootstrap_port,
    }
    if not accelerator:
        chosen["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    if switchable(options.further):
        chosen |= {"enable_pd_role_switch": True, "disaggregation_decode_enable_radix_cache": True}
    return chosen


def switchable(further: Mapping[str, Any]) -> bool:
    """Return whether SGLang can change its role under these arguments, which it checks when it starts."""
    parallel = (further.get(name, 1) for name in ("dp_size", "ep_size", "pp_size"))
    return (
        all(size == 1 for size in parallel)
        and further.get("enable_pd_role_switch", True)
        and not further.get("speculative_algorithm")
        and not further.get("enable_dp_attention")
        and further.get("moe_a2a_backend", "none") == "none"
        and str(further.get("disaggregation_transfer_backend", "mooncake")).startswith(("mooncake", "mori"))
    )


def slowest_step_ms(*, accelerator: bool) -> float:
    """Return the longest time without visible progress that is still normal."""
    return ACCELERATOR_SLOWEST_STEP_MS if accelerator else CPU_SLOWEST_STEP_MS
