"""What memory this machine has left."""

from pathlib import Path

import psutil


def free_memory_bytes() -> int:
    """Return the memory this process may still take: the machine's, or its control group's if that is less."""
    free: int = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)
