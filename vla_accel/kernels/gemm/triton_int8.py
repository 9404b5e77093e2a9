"""Products of INT8 weights and activations, on any GPU with BF16: exact sums in int32, scales, bias and activation."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.int8 import Int8Tile
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import activated, let_next_start, store_rounded, wait_for_previous

TURNS = constexpr(8)
"""Row tiles that take turns at the same columns of weights, which stay in L2 meanwhile."""


class Int8Shape(NamedTuple):
    """Constants of a kernel: columns of the output, K, the code of the activation or of the gate's, whether gate and up
    become one, and whether they are paired.
    """

    n: int
    k: int
    activation: int
    gated: bool
    paired: bool


@triton.jit
def _own_tile(rows, column_tiles, ROWS: constexpr):
    """A program's rows (ROWS,) and which of the column tiles is its own."""
    program = tl.program_id(0)
    first = program // (TURNS * column_tiles) * TURNS
    turns = min(tl.cdiv(rows, ROWS) - first, TURNS)
    row = (first + program % turns) * ROWS + tl.arange(0, ROWS)
    return row, program % (TURNS * column_tiles) // turns


@triton.jit
def _fetched(at, real, k, K: constexpr, DEPTH: constexpr):
    """An operand's next DEPTH of K, zero beyond its end."""
    if K % DEPTH == 0:
        return tl.load(at, mask=real, other=0)
    else:
        return tl.load(at, mask=real & (k < K), other=0)


@triton.jit
def _in_units(total, n, real, scale_ptr, bias_ptr, input_scale):
    """Sums of the weight's rows n times their scales, and the bias."""
    y = total.to(tl.float32) * (tl.load(scale_ptr + n, mask=real, other=0.0) * input_scale)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _int8_product(x_ptr, weights, out_ptr, scales, rows, S: constexpr, TILE: constexpr, PDL: constexpr):
    """Half of a gated tile's columns are of the gate and half of up: eight of each in turns if they are paired,
    otherwise all of the gate first.
    """
    let_next_start(PDL)
    w_ptr, scale_ptr, bias_ptr = weights
    N: constexpr = S.n
    K: constexpr = S.k
    ROWS: constexpr = TILE.rows
    COLUMNS: constexpr = TILE.columns // 2 if S.gated else TILE.columns
    DEPTH: constexpr = TILE.depth
    row, tile = _own_tile(rows, tl.cdiv(N, COLUMNS), ROWS)
    n = tile * COLUMNS + tl.arange(0, COLUMNS)
    first, second = n, n + N
    if S.paired:
        first = n // 8 * 16 + n % 8
        second = first + 8
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    first_at = w_ptr + first.to(tl.int64)[None, :] * K + k[:, None]
    second_at = w_ptr + second.to(tl.int64)[None, :] * K + k[:, None]
    wait_for_previous(PDL)
    firsts, seconds = tl.zeros((ROWS, COLUMNS), tl.int32), tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, K, DEPTH):
        x = _fetched(x_at, (row < rows)[:, None], start + k[None, :], K, DEPTH)
        w = _fetched(first_at, (n < N)[None, :], start + k[:, None], K, DEPTH)
        if S.gated:
            up = _fetched(second_at, (n < N)[None, :], start + k[:, None], K, DEPTH)
        firsts = tl.dot(x, w, firsts, out_dtype=tl.int32)
        if S.gated:
            seconds = tl.dot(x, up, seconds, out_dtype=tl.int32)
        x_at += DEPTH
        first_at += DEPTH
        second_at += DEPTH
    y = activated(_in_units(firsts, first, n < N, scale_ptr, bias_ptr, scales[0]), S.activation)
    if S.gated:
        y *= _in_units(seconds, second, n < N, scale_ptr, bias_ptr, scales[0])
    keep = (row < rows)[:, None] & (n < N)[None, :]
    store_rounded(out_ptr + row.to(tl.int64)[:, None] * N + n[None, :], y, keep, scales[1])


def product(x: Tensor, weights: Linear, out: Tensor, epilogue: Epilogue, tile: Int8Tile) -> None:
    """See `vla_accel.kernels.gemm.gemm`."""
    (rows, k), n, kind = x.shape, out.shape[1], epilogue.activation
    shape = Int8Shape(n, k, kind.gate.code if kind.gated else kind.code, kind.gated, kind.gated and weights.paired)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.columns // (1 + kind.gated)),)
    operands = (x, (weights.weight, weights.weight_scale, weights.bias), out)
    scales, run = (weights.input_scale_value, epilogue.quantize), {"num_warps": tile.warps, "num_stages": tile.stages}
    launch(_int8_product, grid, *operands, scales, rows, shape, tile, **run)
