"""The floor of a policy's time: its work (`families.bench.Work`) at the measured rates of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vla_accel.component import OVERLAP
from vla_accel.families.bench import Work
from vla_accel.kernels.gpu import Gpu

_OVERLAPS = (OVERLAP, "the first step beside the prefix")
"""The ledger's text for a first step that overlaps the prefix; the second is that of stored reports."""


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of a GPU: FLOP/s (those of BF16 for a type that it lacks), and bytes/s of a copy, read plus
    write."""

    bf16_flops: float
    fp8_flops: float
    bytes_per_s: float
    int8_flops: float = 0.0


def floors_ms(work: Mapping[str, Work], ceilings: Ceilings, batch: int = 1) -> dict[str, float]:
    """Milliseconds of each component at the ceilings, by bytes or arithmetic, whichever is more, and their `total`.
    `work`: of one observation. A batch multiplies the arithmetic; the bytes, nearly all weights, are read once."""
    rates = {"bf16": ceilings.bf16_flops, "fp8": ceilings.fp8_flops, "int8": ceilings.int8_flops}
    parts = {n: 1e3 * max(batch * w.flop / rates[w.precision], w.bytes / ceilings.bytes_per_s) for n, w in work.items()}
    return {**parts, "total": sum(parts.values())}


def add_batch_floors(
    throughput: Sequence[dict[str, Any]], rows: Sequence[Mapping[str, Any]], ceilings: Ceilings
) -> None:  # fmt: skip
    """Add `floors_ms` to batched calls of systems whose work is known from the rows of single ones."""
    works = {(row["system"], row["steps"]): row.get("work") for row in rows}
    for row in throughput:
        if work := works.get((row["system"], row["steps"])):
            parts = {name: Work(**one) for name, one in work.items()}
            row["floors_ms"] = floors_ms(parts, ceilings, row["batch"])


def steps_timed(row: Mapping[str, Any]) -> int:
    """Steps in the loop's own time, of a row of a report: a first step that overlaps the prefix is in its time."""
    details = [line.get("detail", "") for line in row.get("engines", ())]
    return row["steps"] - any(text in detail for text in _OVERLAPS for detail in details)


def rates(row: Mapping[str, Any]) -> dict[str, float]:
    """TFLOP/s of each part of a row, or GB/s of a part that reads, for the steps in its own time."""
    found = {}
    for name, one in row["work"].items():
        if ms := row["parts_ms"].get(name):
            if not one["bytes"]:
                found[f"{name}_tflops"] = one["flop"] / ms * 1e-9
            elif inside := steps_timed(row):
                found[f"{name}_gb_per_s"] = inside / row["steps"] * one["bytes"] / ms * 1e-6
    return found


def measure_ceilings(device: torch.device) -> Ceilings:
    """A large product in BF16 and in FP8, and a large copy, each the best of several on random data."""

    def best(run: object, amount: float, repeats: int = 8) -> float:
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()  # type: ignore[operator]
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return amount / min(times)

    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    bf16 = best(lambda: a @ b, 2.0 * n**3)
    fp8 = bf16
    gpu = Gpu.of(device)
    if gpu is not None and gpu.fp8:
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        fp8 = best(
            lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16,
                                     use_fast_accum=True), 2.0 * n**3
        )  # fmt: skip
    int8 = bf16
    if gpu is not None and gpu.int8:
        a8, b8 = (torch.randint(-127, 128, (n, n), dtype=torch.int8, device=device) for _ in range(2))
        int8 = best(lambda: torch._int_mm(a8, b8.t()), 2.0 * n**3)
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    copied = best(lambda: target.copy_(source), 2.0 * source.numel() * 4)
    return Ceilings(bf16, fp8, copied, int8)
