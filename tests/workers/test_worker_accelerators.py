"""What a worker says of its accelerators. NVML cannot run here, so a module of the same shape stands in for it."""

import sys
import time
from types import SimpleNamespace

import pytest

from contracts.v1 import worker_pb2 as pb
from workers.accelerators import Accelerators, find_accelerators
from workers.machine import Machine

GIB = 2**30


class NvmlError(Exception):
    pass


def nvml(*, power: bool = True, broken: bool = False) -> SimpleNamespace:
    """Two devices, as pynvml tells them: percent, bytes, milliwatts."""
    devices = {0: (50, 10 * GIB, 300_000), 1: (100, 30 * GIB, 400_500)}
    by_uuid = {"GPU-b": 1}

    def handle(index: int) -> int:
        if index not in devices:
            raise NvmlError(f"no device {index}")
        return index

    def milliwatts(device: int) -> int:
        if not power:
            raise NvmlError("not supported")
        return devices[device][2]

    def init() -> None:
        if broken:
            raise NvmlError("driver not loaded")

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=lambda name: by_uuid[name],
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=devices[device][0], memory=0),
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=devices[device][1], total=80 * GIB),
        nvmlDeviceGetPowerUsage=milliwatts,
    )


def status_of(accelerators: Accelerators | None) -> pb.Status:
    status = pb.Status()
    Machine(accelerators=accelerators).fill(status)
    return status


def test_all_devices_of_a_worker_are_one_figure():
    accelerators = Accelerators(nvml(), visible=None)
    accelerators.read()
    status = status_of(accelerators)
    assert status.gpu_utilisation == 0.75
    assert (status.gpu_memory_used_bytes, status.gpu_memory_total_bytes) == (40 * GIB, 160 * GIB)
    assert status.gpu_power_watts == 700.5


@pytest.mark.parametrize("visible", ["1", "GPU-b"])
def test_only_visible_devices_count(visible: str):
    accelerators = Accelerators(nvml(), visible=visible)
    accelerators.read()
    status = status_of(accelerators)
    assert (status.gpu_utilisation, status.gpu_memory_used_bytes) == (1.0, 30 * GIB)


def test_a_device_that_does_not_measure_power_says_the_rest():
    accelerators = Accelerators(nvml(power=False), visible="0")
    accelerators.read()
    status = status_of(accelerators)
    assert status.gpu_utilisation == 0.5
    assert not status.HasField("gpu_power_watts")


def test_an_old_reading_is_none():
    clock = [100.0]
    accelerators = Accelerators(nvml(), visible="0", now_s=lambda: clock[0])
    assert accelerators.reading is None
    accelerators.read()
    assert accelerators.reading is not None
    clock[0] += 6.0  # the driver holds a call
    assert accelerators.reading is None
    assert not status_of(accelerators).HasField("gpu_utilisation")


def test_without_nvml_or_its_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what import makes of a module that is not there
    assert find_accelerators({}) is None
    monkeypatch.setitem(sys.modules, "pynvml", nvml(broken=True))
    assert find_accelerators({}) is None
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert find_accelerators({"CUDA_VISIBLE_DEVICES": "7"}) is None
    assert not status_of(None).HasField("gpu_memory_used_bytes")


def test_a_watched_worker_is_read_by_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    accelerators = find_accelerators({})
    assert accelerators is not None
    accelerators.watch()
    for _ in range(1000):
        if accelerators.reading is not None:
            break
        time.sleep(0.005)
    assert accelerators.reading is not None
