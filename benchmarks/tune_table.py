"""The table and the picture of a stored `vla-accel tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.markdown import bare_command, machine, rows
from eval.script import write_png
from vla_accel.report.tune import agreement_points, draw_agreement

PICTURE = "tune_demo_h100.png"


def tune(result: dict[str, Any]) -> str:
    """Everything tried, the fastest first, and why it was dropped."""
    tried = sorted(result["tried"], key=lambda row: (row["latency"] or {}).get("median_ms", float("inf")))
    body = [
        [
            f"**{row['name']}**" if row["chosen"] else row["name"],
            f"{row['latency']['median_ms']:.2f}" if row["latency"] else "-",
            f"{row['agreement']['cosine']:.6f}" if row["agreement"] else "-",
            _episodes(row["success"]),
            "chosen" if row["chosen"] else row["dropped"] or "the reference",
        ]
        for row in tried
    ]
    header = ["configuration", "median ms", "cosine", "lost / gained", "verdict"]
    left_out = "; ".join(f"{name}: {why}" for name, why in result["left_out"].items())
    text = (
        f"**{result['chosen']}** is {result['times_as_fast']:.1f} times as fast as FP32 eager: {result['why']}. "
        f"{machine(result)}; {result['seconds'] / 60:.0f} minutes; `{bare_command(result['command'])}`."
    )
    text += f" Not tried: {left_out}." if left_out else ""
    return (
        f"{rows(header, body)}\n{text}\n\n"
        f"![Latency against disagreement with FP32 eager, everything tried](../benchmarks/results/{PICTURE})\n"
    )


def draw_tune(result: dict[str, Any], path: Path) -> None:
    """Latency against disagreement."""
    write_png(draw_agreement(agreement_points(result["tried"])), path)


def _episodes(success: dict[str, Any] | None) -> str:
    if success is None:
        return "-"
    proven = f"above {100 * success['lower_bound']:+.1f} points"
    return f"{success['lost']} / {success['gained']} of {success['pairs']}, {proven}"
