"""Products of up to 16 rows with large weights: the denoise loop, where reading the weights is the cost.

A program owns a slice of output columns and all the rows. K is divided into PARTS pieces that become the batch of one
batched product, so that every warp has its own piece and the tensor cores see m16n8k16; the pieces are added at the
end. Weights are loaded into registers before the wait for the previous kernel, which they do not depend on; K passes
through shared memory in up to four chunks, so that two kernels fit on a multiprocessor and overlap. A norm needs no
pass of its own: its factor rstd multiplies the sums of (x ∘ (1 + scale)) W, a LayerNorm also subtracts the mean of x
times the sums of W's rows, and the shift's product is a step's constant. The moments of x come from the kernel that
wrote x; without them, this kernel computes them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.config import Skinny
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm
from vla_accel.kernels.gemm.triton_epilogues import (
    check_pairs,
    epilogue_arguments,
    load_columns,
    load_pair,
    load_residual,
    norm_arguments,
    own_row,
    product_shape,
    store_columns,
    store_pair,
)
from vla_accel.kernels.gemm.triton_moments import of_tiles
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import let_next_start, scale_of_sums, wait_for_previous


@triton.jit
def _weight_tile(w_ptr, first, limit, k0, K: constexpr, TILE: constexpr):
    """(PARTS, PIECE, BLOCK_N) of a (N, K) weight, from row `first` and column k0."""
    PIECE: constexpr = TILE.block_k // TILE.parts
    part = tl.arange(0, TILE.parts)[:, None, None]
    piece = tl.arange(0, PIECE)[None, :, None]
    n = first + tl.arange(0, TILE.columns)[None, None, :]
    k = k0 + part * PIECE + piece
    return tl.load(w_ptr + n.to(tl.int64) * K + k, mask=(n < limit) & (k < K), other=0.0)


@triton.jit
def _of_row(k0, TILE: constexpr):
    """Columns (PARTS, 1, PIECE) of a chunk of a row."""
    PIECE: constexpr = TILE.block_k // TILE.parts
    return k0 + tl.arange(0, TILE.parts)[:, None, None] * PIECE + tl.arange(0, PIECE)[None, None, :]


@triton.jit
def _row_tile(x_ptr, row0, rows, k0, K: constexpr, TILE: constexpr):
    """(PARTS, BLOCK_M, PIECE) of (rows, K) activations."""
    row = row0 + tl.arange(0, TILE.rows)[None, :, None]
    k = _of_row(k0, TILE)
    return tl.load(x_ptr + row * K + k, mask=(row < rows) & (k < K), other=0.0)


@triton.jit
def _early(w_ptr, first, limit, K: constexpr, TILE: constexpr):
    """The first chunks of a weight, one to four; those beyond repeat the first and are never used."""
    w0 = _weight_tile(w_ptr, first, limit, 0, K, TILE)
    w1, w2, w3 = w0, w0, w0
    if TILE.early > 1:
        w1 = _weight_tile(w_ptr, first, limit, TILE.block_k, K, TILE)
    if TILE.early > 2:
        w2 = _weight_tile(w_ptr, first, limit, 2 * TILE.block_k, K, TILE)
    if TILE.early > 3:
        w3 = _weight_tile(w_ptr, first, limit, 3 * TILE.block_k, K, TILE)
    return w0, w1, w2, w3


@triton.jit
def _no_sums(early, KIND: constexpr, TILE: constexpr, PDL: constexpr):
    """Sums of zero (PARTS, BLOCK_M, BLOCK_N). With `ready` they are products of zeros with the early weights, which are
    then widened and in the tensor cores' layout, behind their way through shared memory, before the wait."""
    sums = tl.full((TILE.parts, TILE.rows, TILE.columns), 0.0, tl.float32)
    if TILE.ready:
        zeros = tl.full((TILE.parts, TILE.rows, TILE.block_k // TILE.parts), 0.0, KIND)
        sums = tl.dot(zeros, early[0].to(KIND), sums)
        if TILE.early > 1:
            sums = tl.dot(zeros, early[1].to(KIND), sums)
        if TILE.early > 2:
            sums = tl.dot(zeros, early[2].to(KIND), sums)
        if TILE.early > 3:
            sums = tl.dot(zeros, early[3].to(KIND), sums)
        if PDL:
            # The compiler keeps the order of this and the wait.
            sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], tl.float32, is_pure=False, pack=1)
    return sums


@triton.jit
def _pick(early, CHUNK: constexpr, w_ptr, first, limit, K: constexpr, TILE: constexpr):
    """A chunk of a weight: one that `_early` has loaded, or loaded now."""
    if TILE.early > CHUNK:
        return early[CHUNK]
    else:
        return _weight_tile(w_ptr, first, limit, CHUNK * TILE.block_k, K, TILE)


@triton.jit
def _modulated(x, scale_ptr, own, k0, K: constexpr, TILE: constexpr):
    """x ∘ (1 + scale) in the dtype of x, and the sums of squares of x by row, (BLOCK_M,) float32. `own`: where the
    rows' scales begin, 0 or (1, BLOCK_M, 1)."""
    wide = x.to(tl.float32)
    squares = tl.sum(tl.sum(wide * wide, 2), 0)
    if scale_ptr is not None:
        k = _of_row(k0, TILE)
        wide = wide * (1.0 + tl.load(scale_ptr + (own + k), mask=k < K, other=0.0))
    return wide.to(x.dtype), squares


@triton.jit
def _skinny_pair(x_ptr, weights, norm, e, SHAPE: constexpr, TILE: constexpr, PDL: constexpr):
    let_next_start(PDL and TILE.releases)
    w_ptr, wscale = weights
    HALF: constexpr = SHAPE.half
    K: constexpr = SHAPE.k
    BLOCK_K: constexpr = TILE.block_k
    IN_HALF: constexpr = (HALF + TILE.columns - 1) // TILE.columns
    group, i0 = tl.program_id(0) // IN_HALF, (tl.program_id(0) % IN_HALF) * TILE.columns
    row0 = tl.program_id(1) * TILE.rows
    # One program owns both columns of a pair.
    low, high = group * (2 * HALF) + i0, group * (2 * HALF) + HALF + i0
    low_end, high_end = low - i0 + HALF, high - i0 + HALF
    constants = load_pair(e, (group, i0, row0), SHAPE, TILE)
    early_a = _early(w_ptr, low, low_end, K, TILE)
    early_b = _early(w_ptr, high, high_end, K, TILE)
    scale_a = scale_of_sums(w_ptr, wscale, tl.minimum(low + tl.arange(0, TILE.columns), low_end - 1))
    scale_b = scale_of_sums(w_ptr, wscale, tl.minimum(high + tl.arange(0, TILE.columns), high_end - 1))
    acc_a, acc_b = (
        _no_sums(early_a, x_ptr.dtype.element_ty, TILE, PDL),
        _no_sums(early_b, x_ptr.dtype.element_ty, TILE, PDL),
    )
    wait_for_previous(PDL)
    squares = tl.full((TILE.rows,), 0.0, tl.float32)
    own = 0
    if e.pinned is not None:
        own = own_row(e, row0 + tl.arange(0, TILE.rows)[None, :, None], K)
    if SHAPE.tiles > 0:
        parts = of_tiles(norm.squares, tl.minimum(row0 + tl.arange(0, TILE.rows), e.rows - 1), e.rows, SHAPE.tiles)
    coming = _row_tile(x_ptr, row0, e.rows, 0, K, TILE)
    for k0 in tl.static_range(0, K, BLOCK_K):
        x = coming
        if k0 + BLOCK_K < K:
            coming = _row_tile(x_ptr, row0, e.rows, k0 + BLOCK_K, K, TILE)
        wa = _pick(early_a, k0 // BLOCK_K, w_ptr, low, low_end, K, TILE)
        wb = _pick(early_b, k0 // BLOCK_K, w_ptr, high, high_end, K, TILE)
        if SHAPE.tiles == 0:
            x, more = _modulated(x, norm.scale, own, k0, K, TILE)
            squares += more
        acc_a = tl.dot(x, wa.to(x.dtype), acc_a)
        acc_b = tl.dot(x, wb.to(x.dtype), acc_b)
    if SHAPE.tiles > 0:
        squares = tl.sum(parts, 0)
    rstd = tl.rsqrt(squares / K + norm.eps)[:, None]
    a, b = tl.sum(acc_a, 0) * scale_a * rstd, tl.sum(acc_b, 0) * scale_b * rstd
    store_pair(a, b, constants, e, (group, i0, row0), SHAPE, TILE)


@triton.jit
def _skinny_columns(x_ptr, weights, norm, e, SHAPE: constexpr, TILE: constexpr, PDL: constexpr):
    let_next_start(PDL and TILE.releases)
    w_ptr, wscale = weights
    N: constexpr = SHAPE.n
    K: constexpr = SHAPE.k
    BLOCK_K: constexpr = TILE.block_k
    n0, row0 = tl.program_id(0) * TILE.columns, tl.program_id(1) * TILE.rows
    early = _early(w_ptr, n0, N, K, TILE)
    scale = scale_of_sums(w_ptr, wscale, tl.minimum(n0 + tl.arange(0, TILE.columns), N - 1))
    constants = load_columns(e, (0, n0, row0), SHAPE, TILE)
    acc = _no_sums(early, x_ptr.dtype.element_ty, TILE, PDL)
    NORMED: constexpr = norm.eps is not None
    weight_sums = scale
    if norm.weight_sums is not None:
        n = n0 + tl.arange(0, TILE.columns)
        weight_sums = tl.load(norm.weight_sums + n, mask=n < N, other=0.0)[None, :]
    wait_for_previous(PDL)
    residual = load_residual(e, (0, n0, row0), SHAPE, TILE)
    total = tl.full((TILE.rows,), 0.0, tl.float32)
    squares = tl.full((TILE.rows,), 0.0, tl.float32)
    if SHAPE.tiles > 0:
        row = tl.minimum(row0 + tl.arange(0, TILE.rows), e.rows - 1)
        sums, parts = of_tiles(norm.sums, row, e.rows, SHAPE.tiles), of_tiles(norm.squares, row, e.rows, SHAPE.tiles)
    coming = _row_tile(x_ptr, row0, e.rows, 0, K, TILE)
    for k0 in tl.static_range(0, K, BLOCK_K):
        x = coming
        if k0 + BLOCK_K < K:
            coming = _row_tile(x_ptr, row0, e.rows, k0 + BLOCK_K, K, TILE)
        w = _pick(early, k0 // BLOCK_K, w_ptr, n0, N, K, TILE)
        if NORMED and SHAPE.tiles == 0:
            if norm.weight_sums is not None:
                total += tl.sum(tl.sum(x.to(tl.float32), 2), 0)
            x, more = _modulated(x, norm.scale, 0, k0, K, TILE)
            squares += more
        acc = tl.dot(x, w.to(x.dtype), acc)
    y = tl.sum(acc, 0) * scale
    if SHAPE.tiles > 0:
        total, squares = tl.sum(sums, 0), tl.sum(parts, 0)
    if norm.weight_sums is not None:
        mean = total / K
        variance = tl.maximum(squares / K - mean * mean, 0.0)
        y = (y - mean[:, None] * weight_sums) * tl.rsqrt(variance + norm.eps)[:, None]
    elif NORMED:
        y *= tl.rsqrt(squares / K + norm.eps)[:, None]
    store_columns(y, constants, residual, e, (tl.program_id(0), n0, row0), SHAPE, TILE)


def product(
    x: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None, config: Skinny
) -> None:
    """`vla_accel.kernels.gemm.gemm`."""
    shape, row_tiles = product_shape(weights, epilogue, out, norm), triton.cdiv(len(x), config.rows)
    check_pairs(shape, norm)
    operands, after = (weights.weight, weights.sums_scale), epilogue_arguments(weights, epilogue, out, len(x))
    x = x if norm is None else norm.rows(x)
    run = {"num_warps": config.parts, "num_stages": 1}
    arguments = (x, operands, norm_arguments(norm), after, shape, config)
    if shape.half:
        grid = (shape.groups * triton.cdiv(shape.half, config.columns), row_tiles)
        launch(_skinny_pair, grid, *arguments, **run)
    else:
        grid = (triton.cdiv(shape.n, config.columns), row_tiles)
        launch(_skinny_columns, grid, *arguments, **run)
