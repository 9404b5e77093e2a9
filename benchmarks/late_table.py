"""The table and the picture of stored runs of `eval.harness.late`: success against how late answers come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import bare_command, doubts, machines, rows
from eval.harness.late import SAID, draw

PICTURE = "libero_late.png"


def late(results: Sequence[Any]) -> str:
    """A row for each latency that was played or that a system has, a column for each kind of chunks.

    `results`: grids, such as one with plain chunks and one of a policy that was trained for others; and a `vla-accel
    bench`, whose systems would be so late.
    """
    grids, bench = results
    found = {(row["chunking"], row["latency_ticks"]): row for grid in grids for row in grid["rows"]}
    kinds = [kind for kind in SAID if any(kind == one for one, _ in found)]
    hz, systems = grids[0]["control_hz"], _systems(bench, grids[0]["control_hz"])
    late_by = sorted({*(ticks for _, ticks in found), *systems})
    body = [
        [str(ticks), f"{1e3 * ticks / hz:.0f}", *(_rate(found.get((kind, ticks))) for kind in kinds),
         ", ".join(systems.get(ticks, ())) or "-"]
        for ticks in late_by
    ]  # fmt: skip
    header = ["ticks late", "ms", *(SAID[kind] for kind in kinds), "so late would be"]
    counts = ", ".join(dict.fromkeys(str(row["steps"]) for row in found.values()))
    where = machines((bare_command(grid["command"]), grid["policy"]) for grid in grids)
    old = doubts((bare_command(g["command"]), g["policy"].get("policy"), g["policy"].get("weights")) for g in grids)
    notes = "".join(dict.fromkeys(f" {grid['note']}" for grid in grids if grid["note"]))
    missing = any((kind, ticks) not in found for kind in kinds for ticks in late_by)
    text = (
        f"Success (Wilson, 95 %), {counts} denoising steps; a tick is {1e3 / hz:.0f} ms. So late would be: π0.5 at its "
        f"published size, by the median of a call in [the table above](#latency).{' A dash: not played.' * missing} "
        f"{where}; `{bare_command(grids[0]['command'])}`.{notes}{old}"
    )
    return (
        f"{rows(header, body)}\n{text}\n\n"
        f"![Success against latency, a line for each kind of chunks](../benchmarks/results/{PICTURE})\n"
    )


def draw_late(results: Sequence[Any], path: Path) -> None:
    """Success over latency, of all grids in one picture."""
    grids, _ = results
    draw({**grids[0], "rows": [row for grid in grids for row in grid["rows"]]}, path)


def _systems(bench: dict[str, Any], hz: float) -> dict[int, list[str]]:
    """Ticks to the systems whose answers come that late; an answer is never there at the tick of its question."""
    found: dict[int, list[str]] = {}
    steps = max(row["steps"] for row in bench["rows"])
    for row in bench["rows"]:
        if row["steps"] == steps:
            ticks = max(1, math.ceil(row["median_ms"] * hz / 1e3))
            found.setdefault(ticks, []).append(f"{row['system']} ({row['median_ms']:.0f} ms)")
    return found


def _rate(row: dict[str, Any] | None) -> str:
    if row is None or row["rate"] is None:
        return "-"
    errors = f", {row['errors']} crashed" if row["errors"] else ""
    low, high = 100 * row["wilson_95_low"], 100 * row["wilson_95_high"]
    return f"{100 * row['rate']:.1f} % ({low:.1f} to {high:.1f}) of {row['episodes']}{errors}"
