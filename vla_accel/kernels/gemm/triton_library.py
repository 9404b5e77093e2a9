"""What surrounds a product of cuBLAS: the norm, the rotation, the gates and the moments, of sums that lie in memory.

Every kernel lets the next one start at once: it reads only constants before it has waited for the product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm
from vla_accel.kernels.gemm.triton_epilogues import (
    epilogue_arguments,
    load_columns,
    load_pair,
    load_residual,
    norm_arguments,
    pair_shape,
    store_columns,
    store_pair,
    tiles_of,
)
from vla_accel.kernels.gemm.triton_moments import of_tiles
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import let_next_start, wait_for_previous
from vla_accel.numeric import power_of_two

ROWS = 4
"""Rows of a program that rotates or gates: its loads stay long, and the GPU busy."""


@triton.jit
def _sums(y_ptr, row, rows, n, in_row, N: tl.constexpr):
    """(BLOCK_M, BLOCK_N) float32 of a product (rows, N) in memory: columns n, those of `in_row`."""
    at = row.to(tl.int64)[:, None] * N + n[None, :]
    return tl.load(y_ptr + at, mask=(row < rows)[:, None] & in_row[None, :], other=0.0).to(tl.float32)


@triton.jit
def _library_pair(y_ptr, norm, e, out, rows, K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                  HALF: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  TILES: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    N: tl.constexpr = (HEADS + 2 * KV_HEADS if HEADS > 0 else 1) * 2 * HALF
    IN_HALF: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    row0 = tl.program_id(0) * BLOCK_M
    group, i0 = tl.program_id(1) // IN_HALF, tl.program_id(1) % IN_HALF * BLOCK_N
    row, i = row0 + tl.arange(0, BLOCK_M), i0 + tl.arange(0, BLOCK_N)
    let_next_start(PDL)
    low, high, cos, sin = load_pair(e, group, i0, row0, rows, HEADS, KV_HEADS, HALF, BLOCK_M, BLOCK_N)
    wait_for_previous(PDL)
    squares = tl.sum(of_tiles(norm.squares, tl.minimum(row, rows - 1), rows, TILES, BLOCK_T), 0)
    rstd = tl.rsqrt(squares / K + norm.eps)[:, None]
    a = _sums(y_ptr, row, rows, group * (2 * HALF) + i, i < HALF, N) * rstd
    b = _sums(y_ptr, row, rows, group * (2 * HALF) + HALF + i, i < HALF, N) * rstd
    store_pair(a, b, low, high, cos, sin, out, group, i0, row0, rows, HEADS, KV_HEADS, HALF, GATE, BLOCK_M, BLOCK_N)


@triton.jit
def _library_columns(y_ptr, e, out_ptr, rows, N: tl.constexpr, BLOCK_N: tl.constexpr, RESIDUAL: tl.constexpr,
                     SKIP_FIRST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row0 = tl.program_id(0)
    row, n = row0 + tl.arange(0, 1), tl.arange(0, BLOCK_N)
    let_next_start(PDL)
    shift, gate = load_columns(e, 0, row0, rows, N, 1, BLOCK_N)
    wait_for_previous(PDL)
    before, keep = load_residual(out_ptr, e, 0, row0, rows, N, 1, BLOCK_N, RESIDUAL, SKIP_FIRST)
    y = _sums(y_ptr, row, rows, n, n < N, N)
    store_columns(y, shift, gate, before, keep, out_ptr, e, 0, 0, row0, rows, N, 1, BLOCK_N, 0)


def finish(y: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None, k: int) -> None:
    """Launch what follows the product y (R, N) of rows (R, k). Its bias is in y already."""
    rows = len(y)
    if norm is None:
        assert isinstance(out, Tensor)
        n, plain = out.shape[1], Linear(weights.weight)
        launch(
            _library_columns, (rows,), y, epilogue_arguments(plain, epilogue, epilogue.skip_every or 1), out, rows, n,
            power_of_two(n), epilogue.residual, epilogue.skip_every > 0, num_warps=4,
        )  # fmt: skip
        return
    shape, outputs, tokens = pair_shape(out, epilogue)
    columns = power_of_two(shape.half) if shape.heads else min(512, power_of_two(shape.half))
    launch(
        _library_pair, (triton.cdiv(rows, ROWS), shape.groups * triton.cdiv(shape.half, columns)),
        y, norm_arguments(norm), epilogue_arguments(weights, epilogue, tokens), outputs, rows, k, *shape, ROWS,
        columns, *tiles_of(norm), num_warps=4,
    )  # fmt: skip
