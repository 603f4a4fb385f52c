"""Mooncake Store's master on one machine: it says who holds which KV page; the pages are in the workers' memory.

Its binary comes with the engine's environment. When the master dies, engines compute what they do not find;
when it is back, their segments are mounted again by their own clients.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

LEASE_MS: Final = 5_000
"""How long a page that was just read cannot be evicted."""


def free_ports() -> tuple[int, int]:
    """Return two TCP ports of the loopback interface that were free a moment ago: for calls, for metrics."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def master_binary(python: Path) -> Path:
    """Return the master's program beside an engine's interpreter."""
    return python.parent / "mooncake_master"


def master_command(python: Path, *, port: int, metrics_port: int) -> Sequence[str]:
    """Return the command of a master on the loopback interface.

    What bounds it: it hands out the memory that workers lend (`WORKER_STORE_SEGMENT_BYTES` each), and evicts what
    was not used for longest when nine tenths of that are full.
    """
    return (
        str(master_binary(python)),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
        f"--default_kv_lease_ttl={LEASE_MS}",
        "--eviction_high_watermark_ratio=0.9",
        "--logtostderr",
    )
