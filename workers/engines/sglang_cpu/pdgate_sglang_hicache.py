# ruff: noqa: INP001 - this folder is a place on PYTHONPATH, no package
"""SGLang's hierarchical cache on a machine without an accelerator: unpinned host memory, and its copies in torch.

SGLang binds the copies between device and host memory to its kernels' package only where there is a GPU. Shapes
below: L layers, T tokens, P pages of S tokens, H heads, D head dimension. Indices are of token slots, whole pages.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def install(payload_is_lost: Callable[[], bool]) -> None:
    """Replace what needs an accelerator. `payload_is_lost`: pages are then found and not copied (a test's control)."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile  # noqa: PLC0415
    from sglang.srt.mem_cache.pool_host import base, mha  # noqa: PLC0415

    _wrap(base.HostKVCache, "__init__", _unpinned)
    mha.transfer_kv_direct = copy_slots
    mha.transfer_kv_per_layer_direct_pf_lf = copy_pages_to_layer
    mha.transfer_kv_all_layer_direct_lf_pf = copy_layers_to_pages
    _wrap(mha.MHATokenToKVPoolHost, "load_to_device_per_layer", lambda load: _unless(payload_is_lost, load))
    _wrap(HiCacheFile, "get", _touching)


def copy_slots(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy token slots between memories that keep each layer apart. Shapes of all layers: (slots, H, D)."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].reshape(-1, *target.shape[1:])


def copy_pages_to_layer(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of host pages, (P, L, S, H, D) each of keys and values, to the device's (slots, H, D)."""
    page, offset = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[page, layer_id, offset].reshape(-1, *target.shape[1:])


def copy_layers_to_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy all layers of the device, keys of each and then values of each, to host pages (P, L, S, H, D)."""
    page, offset = dst_indices // page_size, dst_indices % page_size
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for which, target in enumerate(dst_ptrs):
        for layer in range(num_layers):
            source = src_ptrs[which * num_layers + layer]
            target[page, layer, offset] = source[src_indices].reshape(-1, *target.shape[3:])


def _wrap(owner: type, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, around(getattr(owner, name)))


def _unpinned(make: Callable[..., None]) -> Callable[..., None]:
    def made(*args: Any, **kwargs: Any) -> None:
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        make(*args, **kwargs)

    return made


def _unless(lost: Callable[[], bool], load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(*args: Any, **kwargs: Any) -> Any:
        return None if lost() else load(*args, **kwargs)

    return loaded


def _touching(get: Callable[..., Any]) -> Callable[..., Any]:
    """Note in the file that it was used: the store is swept by age, and file systems do not record reads in time."""

    def got(store: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        found = get(store, key, *args, **kwargs)
        if found is not None:
            with contextlib.suppress(OSError):  # swept a moment ago
                os.utime(Path(store.file_path) / f"{store._get_suffixed_key(key)}.bin")  # noqa: SLF001 - its own name for it
        return found

    return got
