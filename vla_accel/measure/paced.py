"""Calls at a fixed rate, as a robot makes them: between them a GPU rests, runs cooler, and lowers its clocks."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from vla_accel.measure.bench import System, summary

_EVERY = 0.1
"""Seconds between two looks at the power."""


def paced(
    system: System, prepare: Callable[[], Mapping[str, Any]], hz: float, calls: int, device: torch.device
) -> dict[str, Any]:
    """Time calls of one system every 1 / `hz` seconds. Latency as in `measure.bench.summary`; `late`: calls that began
    after their time; `power_w`: mean power, None if unknown."""
    taken: list[float] = []
    late = 0
    with power(device) as drawn:
        begin = time.perf_counter()
        for number in range(calls):
            given = dict(prepare())
            wait = begin + number / hz - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            late += number > 0 and wait < 0
            began = time.perf_counter()
            system.infer(given)
            taken.append((time.perf_counter() - began) * 1e3)
    mean = sum(drawn) / len(drawn) if drawn else None
    return {"hz": hz, "calls": calls, "late": late, "power_w": mean, **summary(taken)}


@contextlib.contextmanager
def power(device: torch.device) -> Iterator[list[float]]:
    """Watts of a GPU while the block runs, one entry a look; stays empty where nobody can tell."""
    drawn: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY):
            watts = _watts(device)
            if watts is None:
                return
            drawn.append(watts)

    watcher = threading.Thread(target=watch, daemon=True)
    if device.type == "cuda":
        watcher.start()
    try:
        yield drawn
    finally:
        ended.set()
        if watcher.ident is not None:
            watcher.join()


def _watts(device: torch.device) -> float | None:
    """What a GPU draws now: through NVML, or nvidia-smi where its bindings are missing."""
    with contextlib.suppress(ImportError, RuntimeError):
        return torch.cuda.power_draw(device) / 1e3
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        query = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        return float(subprocess.run(query, capture_output=True, text=True, check=True, timeout=5).stdout)
    return None
