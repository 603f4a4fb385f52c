# ruff: noqa: INP001 - this folder is a place on PYTHONPATH, no package
"""Hooks for SGLang on a machine without an accelerator, found through its plugin entry points.

SGLang calls `activate` in every one of its processes before the engine starts. With an accelerator
present it does nothing.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

UNPINNED_VARIABLE = "PDGATE_SGLANG_UNPINNED"
FAULTS_VARIABLE = "PDGATE_SGLANG_FAULTS_FILE"
STORE_VARIABLE = "PDGATE_SGLANG_STORE"
DROP_KV = "drop_kv"
_U32 = 0xFFFFFFFF


def activate() -> None:
    """Register the hooks."""
    if torch.accelerator.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    disaggregation = "sglang.srt.disaggregation"
    HookRegistry.register(f"{disaggregation}.utils.get_kv_class", _without_pinned_memory, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _with_seeds, HookType.AFTER
    )
    HookRegistry.register("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", murmur_hash32, HookType.REPLACE)
    # The record of experts asks the device's module for these two.
    for name, answer in (("is_current_stream_capturing", False), ("empty_cache", None)):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda answer=answer: answer)
    if UNPINNED_VARIABLE in os.environ:
        _never_pin()
    if STORE_VARIABLE in os.environ:
        import pdgate_sglang_hicache  # noqa: PLC0415 - it needs a folder on the path, as this module does

        pdgate_sglang_hicache.install(_kv_is_dropped)
    if FAULTS_VARIABLE in os.environ:
        sender = f"{disaggregation}.mooncake.conn.MooncakeKVManager.send_kvcache"
        HookRegistry.register(sender, _droppable, HookType.AROUND)


def _without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keep the KV sender off its host-tensor path, which needs pinned memory and torch.cuda.Event."""
    kv_class = original(*args, **kwargs)
    if getattr(kv_class, "supports_host_tensor_indices", False):
        kv_class.supports_host_tensor_indices = False
    return kv_class


def _never_pin() -> None:
    """Ignore requests for pinned memory: without an accelerator there is none, and SGLang's LoRA layers ask for it."""

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[assignment, method-assign]


def _droppable(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Send the KV payload, unless the control file says that it gets lost; 0 = sent."""
    return 0 if _kv_is_dropped() else original(*args, **kwargs)


def _kv_is_dropped() -> bool:
    try:
        return DROP_KV in Path(os.environ[FAULTS_VARIABLE]).read_text().split()
    except (KeyError, FileNotFoundError):
        return False


def _with_seeds(info: Any, cls: type, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Give every request of a batch a seed; SGLang itself does so in its deterministic mode only.

    All of them, because batches are merged and a merge keeps seeds only if both halves have them.
    """
    del cls, args, kwargs
    for request in batch.reqs:
        if request.sampling_params.sampling_seed is None:
            request.sampling_params.sampling_seed = random.getrandbits(62)
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
    return info


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3 of (64-bit seed, 32-bit position, 32-bit column), seed 0.

    Shapes: seed (n,), positions (n,), col_indices (m,); returns (n, m) int64 with values below 2^32.
    SGLang has this as a Triton kernel and as a compiled CPU op only.
    """
    seed = seed.to(torch.int64)
    hashed = torch.zeros_like(seed)
    for block in (seed & _U32, (seed >> 32) & _U32, positions.to(torch.int64) & _U32):
        hashed = _mix(hashed, block)
    hashed = _mix(hashed[:, None], (col_indices.to(torch.int64) & _U32)[None, :])
    hashed = hashed ^ 16  # length in bytes
    hashed = hashed ^ (hashed >> 16)
    hashed = (hashed * 0x85EBCA6B) & _U32
    hashed = hashed ^ (hashed >> 13)
    hashed = (hashed * 0xC2B2AE35) & _U32
    return hashed ^ (hashed >> 16)


def _mix(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    # int64 products wrap, and the low 32 bits are right all the same
    block = (block * 0xCC9E2D51) & _U32
    block = (_rotated(block, 15) * 0x1B873593) & _U32
    return (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & _U32


def _rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _U32
