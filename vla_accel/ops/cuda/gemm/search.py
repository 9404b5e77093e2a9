"""Tilings for a GEMM that the table does not have: those worth measuring, by counting waves of blocks.

Plain arithmetic; whoever builds a program measures them against the library (`vla_accel.ops.gemm_choice`).
"""

from __future__ import annotations

import torch

from vla_accel.numeric import round_up
from vla_accel.ops.cuda.gemm.launch import why_not_on
from vla_accel.ops.cuda.gemm.tiling import Tiling
from vla_accel.ops.gpu import Gpu
from vla_accel.ops.reference import GATED

LEAST, MOST = 129, 16_384
"""Rows that are searched for: fewer are better served by skinny tiles, more by the library."""
KINDS = ((1, 1, 1, False), (2, 1, 1, False), (3, 1, 1, False), (2, 1, 2, False), (2, 1, 3, False), (2, 2, 1, True))
"""Groups, parts, split and persistence of the table's tilings: others may be right, but were run less."""
MEASURED = 3
"""Tilings that are measured: each is compiled at the first start."""
LEAST_WORK = 1 << 27
"""Multiplications of a product that is worth compiling kernels for: smaller ones take a launch's time in any case."""
NARROWEST = 16
"""Tokens of a tile at least, where tiles are as many as there are multiprocessors."""
OVERHEAD = 192
"""What a block takes beside its products, in products of 64 x 8 x 64: start, first stage, epilogue."""


def searched(gpu: Gpu | None, kind: torch.dtype, activation: str, rows: int, n: int, k: int) -> list[Tiling]:
    """Tilings for any GEMM that the kernel takes, the most promising first.

    Arguments as `planned` takes them. Tilings of a plain product or of GELU can also take in a norm or a residual.
    """
    if gpu is None or why_not_searched(gpu, rows, n, k) is not None:
        return []
    chunks = -(-k * (1 if kind == torch.float8_e4m3fn else 2) // 128)
    found: dict[Tiling, float] = {}
    for groups, parts, split, persistent in KINDS:
        # Token tiles of equal width, so that none is mostly padding: few, or up to one for each multiprocessor.
        least = -(-rows // (parts * 256))
        whole = gpu.multiprocessors // (-(-n // (64 * groups)) * split)
        for tiles in (*range(least, least + 4), *range(least + 4, min(whole, rows // (parts * NARROWEST)) + 1)):
            width = round_up(-(-rows // (tiles * parts)), 8)
            tiling = _deepest(activation, groups, parts, width, split, persistent, chunks)
            if tiling is not None and tiling not in found:
                found[tiling] = _cost(gpu, tiling, rows, n, chunks)
    return sorted(found, key=lambda tiling: (found[tiling], -tiling.stages))[:MEASURED]


def why_not_searched(gpu: Gpu, rows: int, n: int, k: int) -> str | None:
    """Why nothing is searched for a product of these sizes on a GPU; None where something is."""
    if reason := why_not_on(gpu):
        return reason
    if not LEAST <= rows <= MOST:
        return f"it is tried from {LEAST} to {MOST} rows, these are {rows}"
    if n % 32 or k % 16:
        return f"it takes weights of whole 32 by 16, this is {n} by {k}"
    if rows * n * k < LEAST_WORK:
        return f"{rows} by {n} by {k} is too small to gain by it"
    return None


def _deepest(
    activation: str, groups: int, parts: int, width: int, split: int, persistent: bool, chunks: int
) -> Tiling | None:  # fmt: skip
    """With as many stages as there is room for, and at least three; None where the kernel cannot run it."""
    if -(-chunks // split) * (split - 1) >= chunks:
        return None
    for stages in range(8, 2, -1):
        tiling = Tiling(groups, 1, parts, width, stages, split=split, persistent=persistent)
        reasons = [tiling.why_not(activation)]
        if activation not in GATED:
            reasons += [tiling.why_not(activation, normed=True), tiling.why_not(activation, residual=True)]
        if not any(reasons):
            return tiling
    return None


def _cost(gpu: Gpu, tiling: Tiling, rows: int, n: int, chunks: int) -> float:
    """Waves of blocks, times the products that each makes."""
    blocks = -(-rows // tiling.tokens) * -(-n // tiling.weight_rows) * tiling.split
    waves = -(-blocks // gpu.multiprocessors)
    products = tiling.weight_rows // 64 * tiling.tokens // 8 * -(-chunks // tiling.split)
    # A persistent block fetches its next tile while it ends this one.
    return waves * products + OVERHEAD * (1 if tiling.persistent else waves) + OVERHEAD * (tiling.split - 1)
