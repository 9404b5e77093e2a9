"""Timing of several systems in turns, and agreement of their results."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
        """For JSON: an exact result has a PSNR of 999, and a value that is not finite is None."""
        values = {**dataclasses.asdict(self), "psnr_db": 999.0 if self.psnr_db == math.inf else self.psnr_db}
        return {k: v if math.isfinite(v) else None for k, v in values.items()}

    def passes(self, mse: float, cosine: float) -> bool:
        """Whether both are within bounds; never if a value is not finite."""
        return self.mse < mse and self.cosine > cosine


def parity(result: Tensor, reference: Tensor) -> Parity:
    """Compare in float64. A result that is not finite gives NaN, which no threshold passes."""
    a, b = result.detach().double().flatten().cpu(), reference.detach().double().flatten().cpu()
    error = a - b
    mse = float(error.square().mean())
    span = float(b.max() - b.min())
    psnr = math.inf if mse == 0 else 10 * math.log10(span**2 / mse) if span and math.isfinite(mse) else math.nan
    return Parity(mse, cosine(a.numpy(), b.numpy()), float(error.abs().max()), psnr)


class Bench:
    """Systems that take turns on a device: their errors, and the seconds of their first calls."""

    def __init__(self, device: torch.device, progress: Callable[[str], None]) -> None:
        self.device, self.progress = device, progress
        self.errors: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def first_calls(self, part: str, systems: Mapping[str, Callable[[], Tensor]], key: str = "{}") -> dict[str, Tensor]:
        """Call every system twice, as some record a CUDA graph in their second call; return the first results.

        A system that fails is left out, and its error kept; `key`: the format of its name in `errors` and `seconds`.
        """
        results: dict[str, Tensor] = {}
        for name, run in systems.items():
            began = time.perf_counter()
            try:
                with going_on(f"{part}, {name}: first call", self.progress):
                    result = run().to("cpu", torch.float32, copy=True)
                    seconds = time.perf_counter() - began
                    run()
            except Exception as error:
                expected = isinstance(error, VlaAccelError)  # whose message is enough
                _log.warning("%s failed%s", name, f": {error}" if expected else "", exc_info=not expected)
                seconds = time.perf_counter() - began
                self.errors[key.format(name)] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            else:
                self.progress(f"{part}, {name}: the first call took {seconds:.1f} s")
                results[name] = result
            self.seconds[key.format(name)] = seconds
        return results

    def timings(
        self, systems: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2
    ) -> dict[str, dict[str, Any]]:
        """Time every system once a round; return the wall-clock milliseconds of each, synchronisation included."""
        for name, run in systems.items():
            self.progress(f"warming up: {name}")
            for _ in range(warm_up):
                run()
        taken, tell = {n: list[float]() for n in systems}, counted("calls", self.progress)
        ready = {name: lambda _, run=run: run() for name, run in systems.items()}
        timed = latency.in_turns(ready, lambda: None, calls=rounds, settle=self.synchronise)
        for done, (name, ms, _) in enumerate(timed, 1):
            taken[name].append(ms)
            tell(done, rounds * len(systems))
        return {
            n: {"p50_ms": float(np.median(t)), "mean_ms": float(np.mean(t)), "min_ms": min(t), "calls": len(t)}
            for n, t in taken.items()
        }

    @staticmethod
    def rows(
        timings: Mapping[str, dict[str, Any]], compared: Mapping[str, tuple[Any, Tensor | None]], base: str
    ) -> list[dict[str, Any]]:
        """Return each system's row of a report, sped up over `base`, if that was timed.

        `compared`: the name of an agreement to the systems' results and their reference; None leaves it out.
        """
        base_ms = timings.get(base, {}).get("p50_ms")
        return [
            {
                "system": name,
                **timing,
                "speedup": None if base_ms is None else base_ms / timing["p50_ms"],
                **{k: parity(r[name], want).as_dict() for k, (r, want) in compared.items() if want is not None},
            }
            for name, timing in timings.items()
        ]

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_gib(self, run: Callable[[], object]) -> float | None:
        """Return the peak of allocated memory in GiB while `run` runs, weights included; None without a GPU."""
        if self.device.type != "cuda":
            return None
        self.synchronise()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        self.synchronise()
        return round(torch.cuda.max_memory_allocated(self.device) / 2**30, 2)
