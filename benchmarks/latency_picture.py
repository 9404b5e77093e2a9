"""A picture of docs/results.md: the components of a call as stacked bars, from `vla-accel bench` reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.markdown import MODELS
from benchmarks.svg import INK, bar, document, text
from vla_accel.report import colours
from vla_accel.report.colours import OTHER

PARTS = {**{name: colours.PARTS[name] for name in ("vision", "kv_cache", "denoise")}, "the rest": colours.PARTS[OTHER]}
SYSTEMS = {
    "native-bf16": "BF16",
    "native-fp8": "FP8 prefix",
    "native-fp8-vision": "FP8 prefix, vision",
    "native-int8-denoise": "INT8 expert",
    "native-fp8-int8-denoise": "FP8 prefix, INT8 expert",
    "native-fp8-vision-int8-denoise": "FP8 both, INT8 expert",
}
"""Labels of the bars; a run need not have all of them."""
_LEFT, _WIDTH, _RIGHT = 180, 460, 250  # of the labels, the longest bar and the text behind it, in pixels
_ROW, _GAP, _TOP = 22, 34, 40


def draw(reports: Sequence[dict[str, Any]]) -> str:
    """One group of bars for each model and step count, one bar for each native system, a line at its floor.

    Args: `reports`: as `vla-accel bench` writes them. Returns the SVG file's text.
    """
    groups = [group for report in reports for group in _groups(report)]
    longest = max(row["median_ms"] for _, _, rows in groups for row in rows)
    scale, y, body = _WIDTH / longest, _TOP, []
    x = _LEFT
    for name, colour in PARTS.items():
        body.append(bar(x, 10, 12, 12, colour))
        body.append(text(x + 17, 20, name.replace("kv_cache", "KV cache")))
        x += 95
    body.append(f'<path d="M{x + 6} 8v16" stroke="{INK}" stroke-width="2"/>' + text(x + 14, 20, "floor"))
    for title, base, rows in groups:
        y += 18
        body.append(text(8, y - 4, title, weight="bold"))
        for row in rows:
            body += _bars(row, base, y, scale)
            y += _ROW
        y += _GAP - 18
    return document(_LEFT + _WIDTH + _RIGHT, y, body)


def _groups(report: dict[str, Any]) -> list[tuple[str, dict[int, float], list[dict[str, Any]]]]:
    """Title, openpi's median ms by step count, and the rows of our systems, for each step count."""
    model = report["model"]
    name = MODELS[model["kind"]]
    base = {r["steps"]: r["median_ms"] for r in report["rows"] if r["system"] == "openpi-eager"}
    found = []
    for steps in dict.fromkeys(r["steps"] for r in report["rows"]):
        rows = [r for r in report["rows"] if r["steps"] == steps and r["system"] in SYSTEMS and r["parts_ms"]]
        title = f"{name}, {model['views']} views, {model['action_horizon']} actions, {steps} step{'s' * (steps > 1)}"
        if rows:
            found.append((title, base, rows))
    return found


def _bars(row: dict[str, Any], base: dict[int, float], y: int, scale: float) -> list[str]:
    whole, parts = row["median_ms"], row["parts_ms"]
    lengths = {name: parts.get(name, 0.0) for name in ("vision", "kv_cache", "denoise")}
    lengths["the rest"] = max(whole - sum(lengths.values()), 0.0)
    shapes, x = [text(_LEFT - 8, y + 13, SYSTEMS[row["system"]], anchor="end")], float(_LEFT)
    for name, ms in lengths.items():
        shapes.append(bar(x, y, ms * scale, _ROW - 5, PARTS[name], f"{name}: {ms:.2f} ms"))
        x += ms * scale
    floor = row["floors_ms"].get("total")
    if floor:
        shapes.append(f'<path d="M{_LEFT + floor * scale:.1f} {y - 2}v{_ROW - 1}" stroke="{INK}" stroke-width="2"/>')
    faster = f", {base[row['steps']] / whole:.1f}× openpi" if row["steps"] in base else ""
    return [*shapes, text(x + 8, y + 13, f"{whole:.2f} ms, {1e3 / whole:.0f} Hz{faster}")]
