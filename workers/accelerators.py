"""What NVML says of this worker's devices, for Status: use, memory and power. Absent where there is no NVML.

`pynvml` is no dependency: SGLang's own environment on NVIDIA hardware has it. A driver in trouble can hold a call for
ever, so a thread of its own reads, and a reading that is old is none.
"""

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

PERIOD_S: Final = 1.0
FRESH_S: Final = 5.0


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at all devices of a worker."""

    utilisation: float  # 0.0 to 1.0, mean
    memory_used_bytes: int  # sum
    memory_total_bytes: int  # sum
    power_watts: float | None  # sum; None where a device does not tell


class Accelerators:
    """The devices that this process may use, by `CUDA_VISIBLE_DEVICES` or all."""

    def __init__(self, nvml: Any, *, visible: str | None, now_s: Callable[[], float] = time.monotonic) -> None:
        """`nvml`: the module pynvml, initialised. Raises its NVMLError for a device that is not there."""
        self._nvml = nvml
        self._now_s = now_s
        self._read_at_s = float("-inf")
        self._last: Reading | None = None
        if visible is None:
            self._devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        else:
            self._devices = [self._device(name.strip()) for name in visible.split(",") if name.strip()]

    def watch(self) -> None:
        """Read once a second in a thread that ends with the process."""
        if self._devices:
            threading.Thread(target=self._read_forever, name="nvml", daemon=True).start()

    @property
    def reading(self) -> Reading | None:
        """The last look, None when there was none within `FRESH_S`."""
        return self._last if self._now_s() - self._read_at_s <= FRESH_S else None

    def read(self) -> Reading:
        """Look at all devices. Raises NVMLError."""
        nvml, devices = self._nvml, self._devices
        memory = [nvml.nvmlDeviceGetMemoryInfo(device) for device in devices]
        power: float | None
        try:
            power = sum(nvml.nvmlDeviceGetPowerUsage(device) for device in devices) / 1000
        except nvml.NVMLError:  # not every device measures it
            power = None
        reading = Reading(
            utilisation=sum(nvml.nvmlDeviceGetUtilizationRates(one).gpu for one in devices) / len(devices) / 100,
            memory_used_bytes=sum(int(one.used) for one in memory),
            memory_total_bytes=sum(int(one.total) for one in memory),
            power_watts=power,
        )
        self._last, self._read_at_s = reading, self._now_s()
        return reading

    def _read_forever(self) -> None:
        while True:
            with suppress(self._nvml.NVMLError):  # the reading grows old, and is none then
                self.read()
            time.sleep(PERIOD_S)

    def _device(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)


def find_accelerators(environ: Mapping[str, str] = os.environ) -> Accelerators | None:
    """Return this process's devices; None without pynvml, without a driver, or without a device."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        return Accelerators(nvml, visible=environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NVMLError:
        return None
