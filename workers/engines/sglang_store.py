"""SGLang's arguments for the hand-off by a store: unified engines that share KV pages (HiCache).

Two stores: `file`, a folder on one machine, and `mooncake`, the memory of all workers together, over TCP or RDMA.
Pages are found by a hash that begins with the tenant's salt and the adapter (SGLang's own naming), in a space
that is named after the model's revision here: other weights never meet these pages.

What bounds them: the folder is swept (workers.store_sweeper). Mooncake holds no more than the segments that the
workers lend it, and its master evicts what was not used for longest when they are full.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

STORE_VARIABLE: Final = "PDGATE_SGLANG_STORE"
PAGE_TOKENS: Final = 16
HOST_RATIO: Final = 2.0
"""Host memory for pages, in device KV caches: what was computed lately is found there, before the store."""


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's KV pages go."""

    kind: Literal["file", "mooncake"]
    scope: str  # pool and model revision
    folder: Path  # `file`: of this scope
    master: str = ""  # `mooncake`: host:port
    protocol: str = "tcp"  # or rdma
    host: str = "127.0.0.1"  # of this worker, as its peers reach it
    segment_bytes: int = 0  # memory that this worker lends the store


def store_environment(store: StoreOptions, *, accelerator: bool) -> dict[str, str]:
    """Return the variables to set before SGLang is imported."""
    variables: dict[str, str] = {} if accelerator else {STORE_VARIABLE: store.kind}
    if store.kind == "file":
        variables["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(store.folder)
    return variables


def store_arguments(store: StoreOptions, *, accelerator: bool) -> dict[str, Any]:
    """Return the arguments of `sglang.Engine` that make its KV pages shared."""
    mooncake = store.kind == "mooncake"
    layout = "page_first_direct" if mooncake else "layer_first"
    if accelerator:
        layout = "page_first"
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": HOST_RATIO,
        "hicache_io_backend": "kernel" if accelerator else "direct",
        "hicache_mem_layout": layout,
        # A page is stored when it is computed, not when it is evicted: others wait for it.
        "hicache_write_policy": "write_through",
        # A request waits until its pages are here: computing them again costs more.
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": store.kind,
        "hicache_storage_backend_extra_config": json.dumps(_extra(store)),
        "page_size": PAGE_TOKENS,
    }


def _extra(store: StoreOptions) -> Mapping[str, Any]:
    extra: dict[str, Any] = {"prefetch_threshold": PAGE_TOKENS}  # from one page on
    if store.kind == "mooncake":
        extra |= {
            "extra_backend_tag": store.scope,
            "master_server_address": store.master,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": store.protocol,
            "local_hostname": store.host,
            "global_segment_size": store.segment_bytes,
        }
    return extra
