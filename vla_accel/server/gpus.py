"""Memory and clock of this machine's GPUs, from NVIDIA's driver, without a CUDA context."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuState:
    """One GPU now; `clock_hertz` is the clock of its multiprocessors."""

    name: str
    memory_used_bytes: int
    memory_total_bytes: int
    clock_hertz: float


def gpus() -> list[GpuState]:
    """Every GPU that the driver reports; none without a driver or without nvidia-ml-py (extra `serve`)."""
    nvml, found = _nvml(), []
    if nvml is None:
        return []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            name = nvml.nvmlDeviceGetName(handle)
            name = name.decode() if isinstance(name, bytes) else name
            found.append(GpuState(f"{index} {name}", int(memory.used), int(memory.total), clock * 1e6))
    except nvml.NVMLError:  # a MIG slice has no clock: leave out what is unknown
        pass
    return found


@functools.cache
def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
