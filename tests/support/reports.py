"""Reports as their commands store them, for the tests of tables, pictures and pages."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.families.bench import Work
from vla_accel.ledger import Ledger, LedgerEntry
from vla_accel.measure import bench
from vla_accel.measure.roofline import Ceilings, floors_ms, rates

ROOT = Path(__file__).parents[2]
GPU: dict[str, Any] = {"hardware": {"device": "cuda", "gpu": "NVIDIA X"}, "software": {"torch": "2.11.0"}}
CPU: dict[str, Any] = {
    "hardware": {"device": "cpu", "cpu": "Some CPU", "threads": 1},
    "software": {"torch": "2.13.0"},
}
CEILINGS = Ceilings(1e15, 2e15, 4e12)
BATCHES: list[dict[str, Any]] = [
    {"system": "native-bf16", "steps": 10, "batch": n, "median_ms": 9.0 * n, "per_second": 111.0} for n in (1, 2, 8)
]


def figures_in(text: str) -> set[float]:
    """All measured values that a page's tables carry."""
    return {float(value) for value in re.findall(r'<data value="([^"]+)">', text)}


def cells(table: str) -> list[list[str]]:
    """The cells of the first Markdown table in a text, without its header."""
    lines = table.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| ---")) + 1
    body = lines[first : next((i for i in range(first, len(lines)) if not lines[i]), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def ledger(used: str = "native") -> list[dict[str, object]]:
    """A ledger whose second component ran with the engine `used`."""
    kept = Ledger()
    kept.record(LedgerEntry("vision", "native", "native"))
    kept.record(LedgerEntry("kv_cache", "native", used, "" if used == "native" else "no GPU"))
    return kept.as_list()


def bench_report(ceilings: Ceilings | None, baseline: str = "openpi-eager", used: str = "native") -> dict[str, Any]:
    """A `vla-accel bench` of two systems at two step counts, made by its own functions but for the times."""
    work = {"vision": Work(1e12), "kv_cache": Work(3e12), "denoise": Work(1e9, bytes=2e9)}
    listed: list[dict[str, Any]] = []
    for steps in (10, 1):
        for name, ms in (("native-bf16", 4.0 + steps), (baseline, 50.0 + steps)):
            ours = name != "openpi-eager"
            system = bench.System(name, lambda _, own=ours: {"policy_timing": {"vision_ms": 1.0} if own else {}}, steps)
            if ours:
                system.notes = {"engines": ledger(used), "work": {n: asdict(w) for n, w in work.items()}}
                if ceilings:
                    system.floors = floors_ms(work, ceilings)
            (row,) = bench.run([system], lambda _: {}, calls=1, warmup=1)
            row["median_ms"] = ms
            if ours:
                row["parts_ms"] = {"vision": 2.0, "kv_cache": 3.0, "denoise": 0.5 * steps, "transfer": 0.1}
                row |= rates(row)
                row["share_of_floor"] = row["floors_ms"]["total"] / ms if ceilings else None
            listed.append(row)
    bench.add_speedups(listed, baseline)
    return {
        "command": "vla-accel bench --output " + "/somewhere" + "/out.json",
        **(GPU if ceilings else CPU),
        "model": {"kind": "pi05", "views": 2, "action_horizon": 10} if ceilings else {},
        "ceilings": None if ceilings is None else ceilings.__dict__,
        "left_out": {} if ceilings else {"openpi-eager": "openpi is not installed"},
        "rows": listed,
        "throughput": [],
    }


def shape_report(views: int, horizon: int, ms: float, **more: Any) -> dict[str, Any]:
    """A `vla-accel bench` of π0.5 at ten steps, compared with openpi's eager code."""
    row = {
        "system": "native-bf16", "steps": 10, "median_ms": ms, "p10_ms": ms, "p90_ms": ms, "calls": 9,
        "parts_ms": {"vision": 1.0}, "floors_ms": {"total": 2.0}, "engines": [],
        "work": {"vision": {"flop": 1e12, "bytes": 0.0, "precision": "bf16"},
                 "denoise": {"flop": 1e9, "bytes": 4e9, "precision": "bf16"}},
    }  # fmt: skip
    slow = {**row, "system": "openpi-eager", "median_ms": 306.0, "floors_ms": {}, "parts_ms": {}}
    return {
        **GPU, "schema": "vla_accel.bench/1", "model": {"kind": "pi05", "views": views, "action_horizon": horizon},
        "rows": [row, slow], "throughput": [], "ceilings": CEILINGS.__dict__, "command": "vla-accel bench",
        "left_out": {}, **more,
    }  # fmt: skip


def libero_result(won: np.ndarray, weights: str | None, errors: int = 0, used: str = "native") -> dict[str, Any]:
    """An evaluation result of one task at 10 and 3 steps, whose first episodes crashed."""
    return {
        "protocol": {},
        "policy": {"name": "demo", "weights": weights, "metadata": {"engines": ledger(used)}},
        "launches": [GPU],
        "episodes": [
            {"steps": s, "task_id": 0, "trial": i, "success": bool(w), "error": "crash" if i < errors else None}
            for s in (10, 3)
            for i, w in enumerate(won)
        ],
    }
