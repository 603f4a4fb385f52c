"""CPU time of processes, from the scheduler's own nanosecond clock."""

from pathlib import Path

import psutil


def cpu_ns(pid: int) -> int:
    """Return the nanoseconds on CPU of a process, its threads and its children; 0 for one that ended."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for member in family:
        for task in Path(f"/proc/{member.pid}/task").glob("*"):
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except (OSError, IndexError):
                continue  # a thread that ended in between
    return total


def snapshot(pids: dict[str, int]) -> dict[str, int]:
    """Return the CPU nanoseconds of each named process."""
    return {name: cpu_ns(pid) for name, pid in pids.items()}
