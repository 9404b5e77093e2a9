"""Timing several systems in turns, and how far their results are apart. Knows nothing about what it times."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_accel import latency
from vla_accel.errors import VlaAccelError
from vla_accel.numeric import cosine
from vla_accel.progress import counted, going_on

_log = logging.getLogger("vla_accel.bench")


@dataclass(frozen=True)
class Parity:
    """A result against a reference: mean squared and largest error, cosine, and PSNR over the reference's range."""

    mse: float
    cosine: float
    max_error: float
    psnr_db: float

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has neither: an exact result has a PSNR of 999, what is not finite is None."""
        values = {**dataclasses.asdict(self), "psnr_db": 999.0 if self.psnr_db == math.inf else self.psnr_db}
        return {k: v if math.isfinite(v) else None for k, v in values.items()}

    def passes(self, mse: float, cosine: float) -> bool:
        """Whether both are within bounds; never where a value is not finite."""
        return self.mse < mse and self.cosine > cosine


@dataclass(frozen=True)
class Timing:
    """Wall-clock milliseconds of whole calls, each ended by a synchronise."""

    p50_ms: float
    mean_ms: float
    min_ms: float
    calls: int

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class First:
    """A system's first calls: the result (a copy) and the seconds of the very first, compiling and building included;
    or why it has none."""

    result: Tensor | None
    seconds: float
    error: str = ""


def first_calls(
    part: str, systems: Mapping[str, Callable[[], Tensor]], progress: Callable[[str], None]
) -> dict[str, First]:
    """Call every system twice: some record a CUDA graph in their second call, which may fail as well. `progress` hears
    of each, as a system of `part`, before it begins and after.

    One that fails is reported, not fatal: the others were paid for already. Whoever asks must say so in the end: a
    benchmark with an error in it has failed.
    """
    found: dict[str, First] = {}
    for name, run in systems.items():
        began = time.perf_counter()
        try:
            with going_on(f"{part}, {name}: first call", progress):
                result = run().float().clone()
                seconds = time.perf_counter() - began
                run()
        except Exception as error:
            said = isinstance(error, VlaAccelError)  # on purpose, so that its words are enough
            _log.warning("%s failed%s", name, f": {error}" if said else "", exc_info=not said)
            text = " ".join(str(error).split())[:500]
            found[name] = First(None, time.perf_counter() - began, f"{type(error).__name__}: {text}")
        else:
            progress(f"{part}, {name}: the first call took {seconds:.1f} s")
            found[name] = First(result, seconds)
    return found


def parity(result: Tensor, reference: Tensor) -> Parity:
    """Compare in float64. A result that is not finite gives NaN, which no threshold passes."""
    a, b = result.detach().double().flatten().cpu(), reference.detach().double().flatten().cpu()
    error = a - b
    mse = float(error.square().mean())
    span = float(b.max() - b.min())
    psnr = math.inf if mse == 0 else 10 * math.log10(span**2 / mse) if span and math.isfinite(mse) else math.nan
    return Parity(mse, cosine(a.numpy(), b.numpy()), float(error.abs().max()), psnr)


def in_turns(
    systems: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    warm_up: int = 2,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Timing]:
    """Time every system once a round (`latency.in_turns`). `progress` is told what begins, then now and then how far
    it is."""
    for name, run in systems.items():
        progress(f"warming up: {name}")
        for _ in range(warm_up):
            run()
    taken, tell = {n: list[float]() for n in systems}, counted("calls", progress)
    ready = {name: lambda _, run=run: run() for name, run in systems.items()}
    timed = latency.in_turns(ready, lambda: None, calls=rounds, settle=lambda: synchronise(device))
    for done, (name, ms, _) in enumerate(timed, 1):
        taken[name].append(ms)
        tell(done, rounds * len(systems))
    return {n: Timing(float(np.median(t)), float(np.mean(t)), float(np.min(t)), len(t)) for n, t in taken.items()}


def synchronise(device: torch.device) -> None:
    """Wait for the device, where there is something to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device, run: Callable[[], object]) -> float | None:
    """GiB allocated at most while `run` runs, weights included; None without a GPU, where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
