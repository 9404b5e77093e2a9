"""Time attention at the shapes of the models with every backend: own kernels, torch's SDPA, flash-attn.

    python -m benchmarks.time_attention --output attention_h200.json
    python -m benchmarks.time_attention --tiny --output runs/attention.json    # without a GPU: is it correct?

The JSON has, for each backend, the largest and mean difference from the float32 reference, and the microseconds of one
call inside a CUDA graph. It is written again after each shape. The exit status is 1 if a backend is wrong.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.script import options_parser, reason, report_head
from eval.script import concluded
from tests.support import kernel_calls as calls
from vla_accel.errors import VlaAccelError
from vla_accel.files import write_json
from vla_accel.kernels.attention import ops
from vla_accel.kernels.attention.choice import CALLS, random_tensors
from vla_accel.kernels.attention.config import AttentionShape
from vla_accel.kernels.attention.ops import BACKENDS, attend
from vla_accel.kernels.autotune import milliseconds, unfit
from vla_accel.machine import resolve_device

WORST, MEAN = 0.02, 0.003
"""Differences from float32 that BF16 may have, as in the tests."""
TOWER = AttentionShape(2, 256, 256, 16, 16, 72, torch.bfloat16, padded=False, quantised=False)
PREFIX = AttentionShape(1, 544, 544, 8, 1, 256, torch.bfloat16, padded=True, quantised=False)
SHAPES = {
    "π0.5 vision, 2 views": TOWER,
    "π0.5 vision, 3 views": replace(TOWER, batch=3),
    "π0.5 vision, 2 views, batch 8": replace(TOWER, batch=16),
    "π0.5 prefix, 2 views": PREFIX,
    "π0.5 prefix, 3 views": replace(PREFIX, tokens=800, source=800),
    "π0.5 prefix, 2 views, batch 8": replace(PREFIX, batch=8),
}
TINY = {"vision": replace(TOWER, tokens=16, source=16, dtype=torch.float32)}


def row(way: str, sizes: AttentionShape, device: torch.device) -> dict[str, Any]:
    """How right and how fast one way is."""
    q, k, v, out, lengths = random_tensors(sizes, device)
    if lengths is not None:
        lengths.fill_(sizes.source - 12)
    want = torch.empty(out.shape, dtype=torch.float32)
    host = [x if x is None else x.cpu() for x in (q, k, v, lengths)]
    wide = [x.float() for x in host[:3] if x is not None]
    ops.attention(wide[0], wide[1], wide[2], want, host[3])
    try:
        if way == "flash_attn":
            ops.flash_module()
        attend(way, q, k, v, out, lengths)
        found = calls.difference(out, want)
        right = found.worst <= WORST and found.mean <= MEAN
        found_row: dict[str, Any] = {"worst": found.worst, "mean": found.mean, "right": right}
        if device.type == "cuda":
            ms = milliseconds(lambda: attend(way, q, k, v, out, lengths), device, CALLS)
            found_row["us"] = 1e3 * ms
    except (VlaAccelError, *unfit()) as error:
        found_row = {"error": reason(error)}
    return {"way": way, **found_row}


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="one small shape on a CPU")
    options = parser.parse_args()
    device = resolve_device("cpu" if options.tiny else "cuda")
    report: dict[str, Any] = {**report_head("time_attention", device), "shapes": []}
    if importlib.util.find_spec("flash_attn") is not None:
        report["software"]["flash_attn"] = _version()
    with torch.inference_mode():
        for name, sizes in (TINY if options.tiny else SHAPES).items():
            described = {n: v for n, v in asdict(sizes).items() if isinstance(v, int) and not isinstance(v, bool)}
            ways = [row(way, sizes, device) for way in BACKENDS]
            report["shapes"].append({"name": name, **described, "ways": ways})
            write_json(options.output, report)
    wrong = [f"{s['name']}: {w['way']}" for s in report["shapes"] for w in s["ways"] if w.get("right") is False]
    print(json.dumps({"shapes": len(report["shapes"]), "wrong": wrong}))
    return 1 if wrong else 0


def _version() -> str:
    """The version of flash-attn, which may be built without being installed."""
    try:
        return importlib.metadata.version("flash_attn")
    except importlib.metadata.PackageNotFoundError:
        return getattr(importlib.import_module("flash_attn"), "__version__", "unknown")


if __name__ == "__main__":
    sys.exit(concluded(main))
