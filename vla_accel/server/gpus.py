"""The GPUs of this machine as NVIDIA's driver reports them, without a CUDA context."""

from __future__ import annotations

import contextlib
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
        return found
    with contextlib.suppress(nvml.NVMLError):  # a MIG slice has no clock: leave out what is unknown
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle)
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            name = name.decode() if isinstance(name, bytes) else name
            found.append(GpuState(f"{index} {name}", int(memory.used), int(memory.total), clock * 1e6))
    return found


@functools.cache
def _nvml() -> Any:
    """The module `pynvml`, initialised; None without it or without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError or NVMLError
        return None
    return pynvml
