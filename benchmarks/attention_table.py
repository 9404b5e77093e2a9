"""The table of `benchmarks.time_attention`: attention at the models' shapes by own kernels and by libraries'."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import bare_command, machine, rows

WAYS = {"own": "own", "sdpa": "torch's SDPA", "flash_attn": "flash-attn"}


def attention(result: dict[str, Any]) -> str:
    """A row for each shape: µs of one call, and the largest difference from float32."""
    body = []
    for shape in result["shapes"]:
        found = {one["way"]: one for one in shape["ways"]}
        sizes = f"{shape['batch']} x {shape['tokens']}, {shape['heads']} heads of {shape['head_dim']}"
        body.append([shape["name"], sizes, *(_cell(found.get(way)) for way in WAYS)])
    flash = result["software"].get("flash_attn")
    built = f" flash-attn {flash}, built from its source package for this GPU." if flash else ""
    text = "µs of one call inside a CUDA graph (the largest difference from float32)."
    where = f"{machine(result)}; `{bare_command(result['command'])}`."
    return f"{rows(['attention', 'shape', *WAYS.values()], body)}\n{text}{built} {where}\n"


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return "-"
    if "error" in one:
        return one["error"].partition(":")[0]
    wrong = "" if one["right"] else ", **wrong**"
    return f"{one['us']:.1f} ({one['worst']:.3f}){wrong}" if "us" in one else f"- ({one['worst']:.3f}){wrong}"
