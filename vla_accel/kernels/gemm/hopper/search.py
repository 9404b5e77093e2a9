"""Tilings for a GEMM that the table does not have: those worth measuring, by counting waves of blocks.

This module only computes; `vla_accel.kernels.gemm.choice` compares the configs with the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.hopper.launch import why_not_on
from vla_accel.kernels.gemm.hopper.tiling import Tiling
from vla_accel.kernels.gpu import Gpu
from vla_accel.numeric import round_up

LEAST, MOST = 129, 32_768
"""Rows that are searched for: fewer are better served by skinny tiles, more by the library."""
KINDS = tuple(
    Tiling(groups, 1, parts, 8, 3, split=split, persistent=persistent)
    for groups, parts, split, persistent in (
        (1, 1, 1, False), (2, 1, 1, False), (3, 1, 1, False), (2, 1, 2, False), (2, 1, 3, False), (2, 2, 1, True),
    )
)  # fmt: skip
"""The table's, of any width and at least so many stages: others may be right, but were run less."""
MEASURED = 3
"""Tilings that are measured: each is compiled at the first start."""
MANY = 1024
"""Beyond so many rows tiles are large, and what multiprocessors get from the cache is as much as it gives."""
KINDS_OF_MANY = tuple(
    Tiling(2, 1, parts, 8, 4, across=across, persistent=persistent)
    for parts, persistent in ((1, False), (2, True))
    for across in (1, 2)
)
"""Of each of these the best `BEST` are measured; two blocks may share their tokens."""
BEST = 2
LEAST_WORK = 1 << 27
"""Multiplications of a product that is worth compiling kernels for: smaller ones take a launch's time in any case."""
NARROWEST = 16
"""Tokens of a tile at least, where tiles are as many as there are multiprocessors."""
OVERHEAD = 192
"""What a block takes beside its products, in products of 64 x 8 x 64: start, first stage, epilogue."""
MORE = 3
"""Tiles of tokens that are tried beyond the fewest."""


def searched(gpu: Gpu | None, kind: torch.dtype, activation: Activation, rows: int, n: int, k: int) -> list[Tiling]:
    """Tilings for any GEMM that the kernel takes, the most promising first.

    Arguments as `planned` takes them. Tilings of a plain product or of GELU can also take in a norm or a residual.
    """
    if gpu is None or why_not_searched(gpu, rows, n, k) is not None:
        return []
    chunks = -(-k * (1 if kind == torch.float8_e4m3fn else 2) // 128)
    kinds, wider, of_each, of_all = (KINDS_OF_MANY, 2, BEST, None) if rows > MANY else (KINDS, 1, MEASURED, MEASURED)
    costs: dict[Tiling, float] = {}
    for kind_of in kinds:
        found: dict[Tiling, float] = {}
        # Token tiles of equal width, so that none is mostly padding: few, or up to one for each multiprocessor.
        least = -(-rows // (kind_of.parts * 256))
        whole = gpu.multiprocessors // (-(-n // kind_of.weight_rows) * kind_of.split)
        most = max(least * wider + MORE, min(whole, rows // (kind_of.parts * NARROWEST)))
        for tiles in range(least, most + 1):
            width = round_up(-(-rows // (tiles * kind_of.parts)), 8)
            tiling = _deepest(activation, replace(kind_of, width=width), chunks)
            if tiling is not None:
                found.setdefault(tiling, _cost(gpu, tiling, rows, n, chunks))
        costs |= {tiling: found[tiling] for tiling in _cheapest(found)[:of_each]}
    return _cheapest(costs)[:of_all]


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


def _deepest(activation: Activation, tiling: Tiling, chunks: int) -> Tiling | None:
    """With as many stages as there is room for, and at least its own; None where the kernel cannot run it."""
    if -(-chunks // tiling.split) * (tiling.split - 1) >= chunks:
        return None
    for stages in range(8, tiling.stages - 1, -1):
        deeper = replace(tiling, stages=stages)
        reasons = [deeper.why_not(activation)]
        if not activation.gated:
            reasons += [deeper.why_not(activation, normed=True), deeper.why_not(activation, residual=True)]
        if not any(reasons):
            return deeper
    return None


def _cheapest(costs: Mapping[Tiling, float]) -> list[Tiling]:
    return sorted(costs, key=lambda tiling: (costs[tiling], -tiling.stages))


def _cost(gpu: Gpu, tiling: Tiling, rows: int, n: int, chunks: int) -> float:
    """Waves of blocks, times the products that each makes."""
    blocks = -(-rows // tiling.tokens) * round_up(-(-n // tiling.weight_rows), tiling.across) * tiling.split
    waves = -(-blocks // gpu.multiprocessors)
    products = tiling.weight_rows // 64 * tiling.tokens // 8 * -(-chunks // tiling.split)
    # A persistent block fetches its next tile while it ends this one.
    return waves * products + OVERHEAD * (1 if tiling.persistent else waves) + OVERHEAD * (tiling.split - 1)
