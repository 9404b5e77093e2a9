"""The ops around a product of cuBLAS: norm, rotation, gates and moments, on sums in global memory.

Every kernel lets the next one start at once: it reads only constants before it has waited for the product.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm
from vla_accel.kernels.gemm.triton_epilogues import (
    epilogue_arguments,
    load_columns,
    load_pair,
    load_residual,
    norm_arguments,
    product_shape,
    store_columns,
    store_pair,
)
from vla_accel.kernels.gemm.triton_moments import of_tiles
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import let_next_start, wait_for_previous
from vla_accel.numeric import power_of_two

ROWS = 4
"""Rows of a program that rotates or gates: its loads stay long, and the GPU busy."""


class Tile(NamedTuple):
    """Constants of a kernel: rows and columns of a program."""

    rows: int
    columns: int


@triton.jit
def _sums(y_ptr, row, rows, n, in_row, N: constexpr):
    """(BLOCK_M, BLOCK_N) float32 of a product (rows, N) in memory: columns n, those of `in_row`."""
    at = row.to(tl.int64)[:, None] * N + n[None, :]
    return tl.load(y_ptr + at, mask=(row < rows)[:, None] & in_row[None, :], other=0.0).to(tl.float32)


@triton.jit
def _library_pair(y_ptr, norm, e, SHAPE: constexpr, TILE: constexpr, PDL: constexpr):
    HALF: constexpr = SHAPE.half
    IN_HALF: constexpr = (HALF + TILE.columns - 1) // TILE.columns
    row0 = tl.program_id(0) * TILE.rows
    group, i0 = tl.program_id(1) // IN_HALF, tl.program_id(1) % IN_HALF * TILE.columns
    row, i = row0 + tl.arange(0, TILE.rows), i0 + tl.arange(0, TILE.columns)
    let_next_start(PDL)
    constants = load_pair(e, (group, i0, row0), SHAPE, TILE)
    wait_for_previous(PDL)
    squares = tl.sum(of_tiles(norm.squares, tl.minimum(row, e.rows - 1), e.rows, SHAPE.tiles), 0)
    rstd = tl.rsqrt(squares / SHAPE.k + norm.eps)[:, None]
    a = _sums(y_ptr, row, e.rows, group * (2 * HALF) + i, i < HALF, SHAPE.n) * rstd
    b = _sums(y_ptr, row, e.rows, group * (2 * HALF) + HALF + i, i < HALF, SHAPE.n) * rstd
    store_pair(a, b, constants, e, (group, i0, row0), SHAPE, TILE)


@triton.jit
def _library_columns(y_ptr, e, SHAPE: constexpr, TILE: constexpr, PDL: constexpr):
    at = (0, 0, tl.program_id(0))
    row, n = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, TILE.columns)
    let_next_start(PDL)
    constants = load_columns(e, at, SHAPE, TILE)
    wait_for_previous(PDL)
    residual = load_residual(e, at, SHAPE, TILE)
    store_columns(_sums(y_ptr, row, e.rows, n, n < SHAPE.n, SHAPE.n), constants, residual, e, at, SHAPE, TILE)


def finish(y: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None) -> None:
    """Launch what follows the product y (R, N). Its bias is in y already."""
    rows, shape = len(y), product_shape(weights, epilogue, out, norm)
    if norm is None:
        after, tile = epilogue_arguments(Linear(weights.weight), epilogue, out, rows), Tile(1, power_of_two(shape.n))
        launch(_library_columns, (rows,), y, after, shape, tile, num_warps=4)
        return
    columns = power_of_two(shape.half) if shape.heads else min(512, power_of_two(shape.half))
    grid = (triton.cdiv(rows, ROWS), shape.groups * triton.cdiv(shape.half, columns))
    after = epilogue_arguments(weights, epilogue, out, rows)
    launch(_library_pair, grid, y, norm_arguments(norm), after, shape, Tile(ROWS, columns), num_warps=4)
