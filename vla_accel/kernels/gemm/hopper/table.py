"""Which tiling is fast for which GEMM, by architecture: what was measured, and nothing else. Whoever builds a program
measures it against the library on the GPU at hand (`vla_accel.kernels.gemm.choice`)."""

from __future__ import annotations

import torch

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.hopper.tiling import Tiling
from vla_accel.kernels.gpu import Gpu

Table = dict[tuple[str, Activation, int, int], tuple[tuple[int, int, Tiling], ...]]

NONE, GELU, GEGLU = Activation.NONE, Activation.GELU, Activation.GEGLU
_GATE_UP = Tiling(2, 1, 2, 136, 4, persistent=True)
# By architecture, then by dtype, activation and (N, K): from how many rows to how many, and the tiling, for Gemma 2B
# and SigLIP. The fastest of many on an H200: SigLIP's inside the chain of two and of three views; Gemma's of two views
# and a prompt (544 rows), alone and together; Gemma's of three views (800 rows) follow from those by counting waves,
# and were timed together. SigLIP's BF16 products of two views are no faster than cuBLAS's alone: they win by the norms
# they take in. cuBLAS does the last FP8 one of two views at least as fast.
TABLES: dict[str, Table] = {"sm_90a": {
    ("fp8", GEGLU, 32_768, 2048): ((504, 544, _GATE_UP), (756, 816, _GATE_UP)),
    ("fp8", NONE, 2048, 16_384): ((504, 544, Tiling(2, 1, 1, 136, 6, split=2)),
                                    (756, 800, Tiling(2, 1, 1, 200, 5, split=2))),
    ("fp8", NONE, 2048, 2048): ((504, 544, Tiling(1, 1, 1, 136, 8)), (756, 800, Tiling(1, 1, 1, 200, 6))),
    ("half", GEGLU, 32_768, 2048): ((504, 544, _GATE_UP), (756, 816, _GATE_UP)),
    ("half", NONE, 2048, 16_384): ((504, 544, Tiling(2, 1, 1, 136, 6, split=2)),
                                     (756, 800, Tiling(2, 1, 1, 200, 5, split=2))),
    ("half", NONE, 2048, 2048): ((504, 544, Tiling(1, 1, 1, 136, 8)), (756, 800, Tiling(1, 1, 1, 200, 6))),
    ("half", NONE, 2560, 2048): ((504, 552, Tiling(1, 1, 1, 184, 6)), (756, 800, Tiling(2, 1, 1, 160, 5))),
    ("half", NONE, 3456, 1152): ((473, 512, Tiling(2, 1, 1, 128, 4)), (705, 784, Tiling(3, 1, 1, 112, 4))),
    ("half", NONE, 1152, 1152): ((473, 512, Tiling(1, 1, 1, 80, 8)), (705, 768, Tiling(1, 1, 1, 112, 8))),
    ("half", GELU, 4352, 1152): ((473, 512, Tiling(3, 1, 1, 104, 4)), (705, 768, Tiling(3, 1, 1, 160, 4))),
    ("half", NONE, 1152, 4352): ((473, 512, Tiling(2, 1, 1, 128, 4, split=3)),
                                   (705, 768, Tiling(2, 1, 1, 128, 5, split=2))),
    ("fp8", NONE, 3456, 1152): ((449, 512, Tiling(2, 1, 1, 128, 4)), (705, 784, Tiling(3, 1, 1, 112, 5))),
    ("fp8", NONE, 1152, 1152): ((449, 512, Tiling(1, 1, 1, 128, 8)), (705, 768, Tiling(1, 1, 1, 128, 8))),
    ("fp8", GELU, 4352, 1152): ((449, 528, Tiling(2, 1, 1, 176, 4)), (705, 768, Tiling(2, 1, 1, 256, 4))),
    ("fp8", NONE, 1152, 4352): ((705, 768, Tiling(1, 1, 1, 128, 8)),),
}}  # fmt: skip


def planned(gpu: Gpu | None, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int) -> Tiling | None:
    """The tiling that made this GEMM faster than the library's on a GPU of this architecture; None where none did.

    `kind`: dtype of both operands. `rows` (M) by a weight (n, k).
    """
    if gpu is None:
        return None
    name = "fp8" if kind == torch.float8_e4m3fn else "half"
    for least, most, tiling in TABLES.get(gpu.architecture, {}).get((name, activation, n, k), ()):
        if least <= rows <= most:
            return tiling
    return None
