"""What the machine says of itself, for Status: its network counters, and its accelerators where NVML is."""

import time
from collections.abc import Callable
from typing import Final

import psutil

from contracts.v1 import worker_pb2 as pb
from workers.accelerators import Accelerators

REREAD_S: Final = 1.0
LOOPBACK: Final = "lo"


class Machine:
    """Reads at most once a second: a look at every interface costs as much as a status."""

    def __init__(
        self, *, accelerators: Accelerators | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._accelerators = accelerators
        self._now_s = now_s
        self._read_at_s = float("-inf")
        self._received = 0
        self._sent = 0

    def fill(self, status: pb.Status) -> None:
        """Write into a status: bytes since boot, of all interfaces but loopback; what the accelerators do."""
        if self._now_s() - self._read_at_s >= REREAD_S:
            self._read_at_s = self._now_s()
            nics = [c for name, c in psutil.net_io_counters(pernic=True).items() if name != LOOPBACK]
            self._received = sum(c.bytes_recv for c in nics)
            self._sent = sum(c.bytes_sent for c in nics)
        status.nic_received_bytes = self._received
        status.nic_sent_bytes = self._sent
        reading = self._accelerators.reading if self._accelerators is not None else None
        if reading is not None:
            status.gpu_utilisation = reading.utilisation
            status.gpu_memory_used_bytes = reading.memory_used_bytes
            status.gpu_memory_total_bytes = reading.memory_total_bytes
            if reading.power_watts is not None:
                status.gpu_power_watts = reading.power_watts
