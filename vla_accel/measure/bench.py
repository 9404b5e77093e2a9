"""Several systems timed in turns in one run: the whole call, from a NumPy observation to NumPy actions, on a fresh
random observation that is made before the clock starts. `systems.py` makes the systems."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vla_accel.latency import in_turns
from vla_accel.measure.host import Others
from vla_accel.progress import counted, going_on

SCHEMA = "vla_accel.bench/1"


@dataclass
class System:
    """A system to time. `infer(observation)` returns a mapping that may have `policy_timing` (ms by part). `memory`:
    as in `OptimizedPolicy.memory`, only `total` for another project's code; `peak_loading` and `peak_running` on a
    GPU."""

    name: str
    infer: Callable[[dict[str, Any]], Mapping[str, Any]]
    steps: int
    first_call_s: float = 0.0
    floors: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Any] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Samples:
    total_ms: list[float] = field(default_factory=list)
    parts_ms: dict[str, list[float]] = field(default_factory=dict)


def run(
    systems: Sequence[System],
    observe: Callable[[np.random.Generator], dict[str, Any]],
    *,
    calls: int = 100,
    turn: int = 10,
    warmup: int = 5,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    heard: Callable[[float | None], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Time `calls` calls of each system, `turn` at a time, in turns; return a row for each system. `heard` receives how
    many cores other processes kept busy during the timed calls; first calls compile in processes of their own."""
    rng = np.random.default_rng(seed)
    samples = {system.name: _Samples() for system in systems}
    for system in systems:
        steps = f"{system.steps} step{'s' * (system.steps > 1)}"
        begins = f"warming up {', '.join(dict.fromkeys((system.name, steps)))}"
        with going_on(begins, progress), peak() as running:
            start = time.perf_counter()
            system.infer(observe(rng))
            system.first_call_s = system.first_call_s or time.perf_counter() - start
            for _ in range(warmup - 1):
                system.infer(observe(rng))
        if running and system.memory is not None:
            system.memory["peak_running"] = system.memory["total"] + running[0]
    infer, others, tell = {s.name: s.infer for s in systems}, Others(), counted("calls of each", progress)
    for done, (name, ms, result) in enumerate(in_turns(infer, lambda: observe(rng), calls=calls, turn=turn), 1):
        kept = samples[name]
        kept.total_ms.append(ms)
        for part, value in result.get("policy_timing", {}).items():
            if part not in ("infer_ms", "total_ms"):
                kept.parts_ms.setdefault(part.removesuffix("_ms"), []).append(value)
        tell(done // len(systems), calls)
    heard(others.cores())
    return [_row(system, samples[system.name]) for system in systems]


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """Most bytes allocated on the GPU in the block beyond those before it: one number at its end; none without a
    GPU."""
    found: list[int] = []
    if not torch.cuda.is_available():
        yield found
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield found
    found.append(torch.cuda.max_memory_allocated() - before)


def _row(system: System, samples: _Samples) -> dict[str, Any]:
    total = summary(samples.total_ms)
    parts = {name: summary(values)["median_ms"] for name, values in samples.parts_ms.items()}
    floor = system.floors.get("total")
    return {
        "system": system.name,
        "steps": system.steps,
        "calls": len(samples.total_ms),
        **total,
        "parts_ms": parts,
        # To compare with the caller's clock.
        "parts_sum_ms": sum(parts.values()),
        "floors_ms": system.floors,
        "share_of_floor": floor / total["median_ms"] if floor else None,
        "first_call_s": system.first_call_s,
        "memory": system.memory,
        **system.notes,
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and spread."""
    array = np.asarray(values)
    p10, p50, p90 = (float(np.percentile(array, q)) for q in (10, 50, 90))
    return {"median_ms": p50, "p10_ms": p10, "p90_ms": p90, "min_ms": float(array.min()), "max_ms": float(array.max())}


def add_speedups(rows: list[dict[str, Any]], baseline: str) -> None:
    """`speedup` of each row over the baseline's row of the same number of steps; None where there is none."""
    for row in rows:
        base = next((r for r in rows if r["system"] == baseline and r["steps"] == row["steps"]), None)
        row["speedup"] = base["median_ms"] / row["median_ms"] if base else None
