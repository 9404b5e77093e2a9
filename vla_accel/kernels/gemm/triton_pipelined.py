"""Products of ten to some hundreds of rows with large weights: K passes through shared memory in stages.

A program owns a tile of rows and a tile of columns, and all of K or, where columns are few, a part: the last
program of a tile to arrive adds the parts, always in the same order. Row tiles of the same weights run next to each
other, so that a weight is read from memory once. A norm costs no pass of its own: where the rows come with moments, it
is a factor of the sums; elsewhere the kernel computes the moments, as in `triton_skinny`.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.config import Pipelined
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Workspace
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
from vla_accel.kernels.triton_common import can_prefetch, prefetch_rows, scale_of_sums, wait_for_previous


@triton.jit
def _row_tile(x, row, row0, k0, K: constexpr, TILE: constexpr):
    """(BLOCK_M, BLOCK_K) of (rows, K) activations, from `k0` on: of rows `row`, or, by TMA, of those from `row0` on,
    with zeros beyond the last."""
    if TILE.tma:
        return x.load([row0, k0])
    else:
        k = k0 + tl.arange(0, TILE.block_k)
        at = x + row[:, None] * K + k[None, :]
        # Without a mask if no tile ends beyond K.
        if K % (TILE.block_k * TILE.split) == 0:
            return tl.load(at)
        else:
            return tl.load(at, mask=(k < K)[None, :], other=0.0)


@triton.jit
def _weight_tile(w, n, n0, k0, K: constexpr, TILE: constexpr):
    """The operand of `_multiply` from a (N, K) weight: (BLOCK_N, BLOCK_K) of weights that come first, else
    (BLOCK_K, BLOCK_N). `n` and `n0` as `row` and `row0` of `_row_tile`."""
    if TILE.weights_first:
        return _row_tile(w, n, n0, k0, K, TILE)
    elif TILE.tma:
        return w.load([n0, k0]).T
    else:
        k = k0 + tl.arange(0, TILE.block_k)
        at = w + n[None, :] * K + k[:, None]
        if K % (TILE.block_k * TILE.split) == 0:
            return tl.load(at)
        else:
            return tl.load(at, mask=(k < K)[:, None], other=0.0)


@triton.jit
def _no_sums(TILE: constexpr):
    """The sums before the first `_multiply`."""
    if TILE.weights_first:
        return tl.full((TILE.columns, TILE.rows), 0.0, tl.float32)
    else:
        return tl.full((TILE.rows, TILE.columns), 0.0, tl.float32)


@triton.jit
def _multiply(x, w, sums, TILE: constexpr):
    """Add the product of a tile of activations (BLOCK_M, BLOCK_K) and one of weights. On Hopper the first operand may
    come from registers: there weights of one byte are widened without a way back to memory."""
    if TILE.weights_first:
        return tl.dot(w.to(x.dtype), x.T, sums)
    else:
        return tl.dot(x, w.to(x.dtype), sums)


@triton.jit
def _by_row(sums, TILE: constexpr):
    """(BLOCK_M, BLOCK_N) of the sums of `_multiply`."""
    if TILE.weights_first:
        return sums.T
    else:
        return sums


@triton.jit
def normed_pair(x, w, scales, norm, e, at, end, SHAPE: constexpr, TILE: constexpr):
    """Normed rows, from `at` to before `end`, times both tiles of weight rows of a pair. `scales`: of their sums. With
    moments the rows come scaled, and the norm is a factor of the sums."""
    group, i0, row0 = at
    HALF: constexpr = SHAPE.half
    K: constexpr = SHAPE.k
    # Rows beyond the last are the last one again: they are not stored.
    row = tl.minimum(row0 + tl.arange(0, TILE.rows), end - 1)
    real = (row0 + tl.arange(0, TILE.rows) < end)[:, None]
    low, high = group * (2 * HALF), group * (2 * HALF) + HALF
    n_a = tl.minimum(low + i0 + tl.arange(0, TILE.columns), low + HALF - 1)
    n_b = tl.minimum(high + i0 + tl.arange(0, TILE.columns), high + HALF - 1)
    acc_a, acc_b = _no_sums(TILE), _no_sums(TILE)
    squares = tl.full((TILE.rows,), 0.0, tl.float32)
    if SHAPE.tiles > 0:
        parts = of_tiles(norm.squares, row, e.rows, SHAPE.tiles)
    if e.pinned is not None:
        own = own_row(e, row, K)[:, None]
    for k0 in range(0, K, TILE.block_k):
        tile = _row_tile(x, row, row0, k0, K, TILE)
        wa = _weight_tile(w, n_a, low + i0, k0, K, TILE)
        wb = _weight_tile(w, n_b, high + i0, k0, K, TILE)
        if SHAPE.tiles == 0:
            k = k0 + tl.arange(0, TILE.block_k)
            # The product takes x from registers, never from the stage that the sum reads: on Hopper a stage that has
            # both readers is overwritten too early (triton-lang/triton#6691).
            wide = tl.where(real, tile.to(tl.float32), 0.0)
            squares += tl.sum(wide * wide, 1)
            if norm.scale is not None:
                if e.pinned is not None:
                    wide *= 1.0 + tl.load(norm.scale + own + k[None, :], mask=(k < K)[None, :], other=0.0)
                else:
                    wide *= (1.0 + tl.load(norm.scale + k, mask=k < K, other=0.0))[None, :]
            tile = wide.to(tile.dtype)
        acc_a = _multiply(tile, wa, acc_a, TILE)
        acc_b = _multiply(tile, wb, acc_b, TILE)
    if SHAPE.tiles > 0:
        squares = tl.sum(parts, 0)
    rstd = tl.rsqrt(squares / K + norm.eps)[:, None]
    return _by_row(acc_a, TILE) * scales[0] * rstd, _by_row(acc_b, TILE) * scales[1] * rstd


@triton.jit
def _pipelined_pair(x, weights, w_tma, norm, e, SHAPE: constexpr, TILE: constexpr, PDL: constexpr):
    w_ptr, wscale = weights
    HALF: constexpr = SHAPE.half
    K: constexpr = SHAPE.k
    IN_HALF: constexpr = (HALF + TILE.columns - 1) // TILE.columns
    row0 = tl.program_id(0) * TILE.rows
    group, i0 = tl.program_id(1) // IN_HALF, (tl.program_id(1) % IN_HALF) * TILE.columns
    # One program owns both columns of a pair.
    low, high = group * (2 * HALF), group * (2 * HALF) + HALF
    i = tl.minimum(i0 + tl.arange(0, TILE.columns), HALF - 1)
    # Programs of the same weights run next to each other: the first of them fetches.
    if tl.program_id(0) == 0:
        prefetch_rows(w_ptr + (low + i) * K, K, TILE.prefetch, PDL)
        prefetch_rows(w_ptr + (high + i) * K, K, TILE.prefetch, PDL)
    scales = (scale_of_sums(w_ptr, wscale, low + i), scale_of_sums(w_ptr, wscale, high + i))
    constants = load_pair(e, (group, i0, row0), SHAPE, TILE)
    wait_for_previous(PDL)
    w = w_tma if TILE.tma else w_ptr
    a, b = normed_pair(x, w, scales, norm, e, (group, i0, row0), e.rows, SHAPE, TILE)
    store_pair(a, b, constants, e, (group, i0, row0), SHAPE, TILE)


@triton.jit
def _constants(weights, norm, e, at, SHAPE: constexpr, TILE: constexpr):
    """The scale of the sums of a tile's columns, the sums of their weight rows, and what `load_columns` loads."""
    n = at[1] + tl.arange(0, TILE.columns)
    scale = scale_of_sums(weights[0], weights[1], tl.minimum(n, SHAPE.n - 1))
    constants = load_columns(e, at, SHAPE, TILE)
    weight_sums = scale
    if norm.weight_sums is not None:
        weight_sums = tl.load(norm.weight_sums + n, mask=n < SHAPE.n, other=0.0)[None, :]
    return scale, weight_sums, constants


@triton.jit
def sums_of_parts(acc, workspace, TILE: constexpr):
    """Store this program's part of a tile's sums. Returns whether it is the last one, and then the sums of all."""
    part_ptr, count_ptr = workspace
    SIZE: constexpr = TILE.rows * TILE.columns
    split = tl.program_id(2)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    inside = tl.arange(0, TILE.rows)[:, None] * TILE.columns + tl.arange(0, TILE.columns)[None, :]
    parts = part_ptr + tile * (TILE.split * SIZE) + inside
    tl.store(parts + split * SIZE, acc)
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu") == TILE.split - 1
    total = tl.full((TILE.rows, TILE.columns), 0.0, tl.float32)
    if last:
        tl.debug_barrier()
        for other in range(TILE.split):
            total += tl.load(parts + other * SIZE, cache_modifier=".cg")
        tl.store(count_ptr + tile, 0)
    return last, total


@triton.jit
def _pipelined_columns(x, weights, w_tma, norm, e, workspace, SHAPE: constexpr, TILE: constexpr, PDL: constexpr):
    K: constexpr = SHAPE.k
    BLOCK_K: constexpr = TILE.block_k
    row0, n0, split = tl.program_id(0) * TILE.rows, tl.program_id(1) * TILE.columns, tl.program_id(2)
    at = (tl.program_id(1), n0, row0)
    # Rows and columns beyond the last are the last one again: they are not stored.
    real = row0 + tl.arange(0, TILE.rows) < e.rows
    row = tl.minimum(row0 + tl.arange(0, TILE.rows), e.rows - 1)
    n = tl.minimum(n0 + tl.arange(0, TILE.columns), SHAPE.n - 1)
    SHARE: constexpr = ((K + BLOCK_K - 1) // BLOCK_K + TILE.split - 1) // TILE.split * BLOCK_K
    # Tiles of many rows behind a norm need their registers for the sums: they load constants after the product.
    NORMED: constexpr = norm.eps is not None
    LATE: constexpr = NORMED and TILE.rows > 64
    if tl.program_id(0) == 0 and split * SHARE < K:
        prefetch_rows(weights[0] + n * K + split * SHARE, tl.minimum(SHARE, K - split * SHARE), TILE.prefetch, PDL)
    if not LATE:
        scale, weight_sums, constants = _constants(weights, norm, e, at, SHAPE, TILE)
    wait_for_previous(PDL)
    residual = load_residual(e, at, SHAPE, TILE)
    acc = _no_sums(TILE)
    total = tl.full((TILE.rows,), 0.0, tl.float32)
    squares = tl.full((TILE.rows,), 0.0, tl.float32)
    if SHAPE.tiles > 0:
        # Added up here: both moments of all tiles would not fit in the registers next to the sums.
        total = tl.sum(of_tiles(norm.sums, row, e.rows, SHAPE.tiles), 0)
        squares = tl.sum(of_tiles(norm.squares, row, e.rows, SHAPE.tiles), 0)
    for k0 in range(0, SHARE, BLOCK_K):
        k = split * SHARE + k0
        tile = _row_tile(x, row, row0, k, K, TILE)
        w = _weight_tile(w_tma if TILE.tma else weights[0], n, n0, k, K, TILE)
        if NORMED and SHAPE.tiles == 0:
            # From registers, as in `normed_pair`.
            wide = tl.where(real[:, None], tile.to(tl.float32), 0.0)
            total += tl.sum(wide, 1)
            squares += tl.sum(wide * wide, 1)
            if norm.scale is not None:
                by_k = k + tl.arange(0, BLOCK_K)
                wide *= (1.0 + tl.load(norm.scale + by_k, mask=by_k < K, other=0.0))[None, :]
            tile = wide.to(tile.dtype)
        acc = _multiply(tile, w, acc, TILE)
    y, last = _by_row(acc, TILE), True
    if TILE.split > 1:
        last, y = sums_of_parts(y, workspace, TILE)
    if LATE:
        scale, weight_sums, constants = _constants(weights, norm, e, at, SHAPE, TILE)
    if last:
        y *= scale
        if norm.weight_sums is not None:
            mean = total / K
            rstd = tl.rsqrt(tl.maximum(squares / K - mean * mean, 0.0) + norm.eps)
            y = (y - mean[:, None] * weight_sums) * rstd[:, None]
        elif NORMED:
            y *= tl.rsqrt(squares / K + norm.eps)[:, None]
        store_columns(y, constants, residual, e, at, SHAPE, TILE)


def product(
    x: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None, config: Pipelined,
    workspace: Workspace | None,
) -> None:  # fmt: skip
    """`vla_accel.kernels.gemm.gemm`."""
    rows, shape = len(x), product_shape(weights, epilogue, out, norm)
    check_pairs(shape, norm)
    x = x if norm is None else norm.rows(x)
    operands = (x, (weights.weight, weights.sums_scale), None)
    if config.tma:
        by_tma = TensorDescriptor.from_tensor(weights.weight, [config.columns, config.block_k])
        operands = (TensorDescriptor.from_tensor(x, [config.rows, config.block_k]), operands[1], by_tma)
    arguments = (*operands, norm_arguments(norm), epilogue_arguments(weights, epilogue, out, rows))
    tile = replace(config, prefetch=config.prefetch and can_prefetch(weights.weight))
    run = {"num_warps": config.warps, "num_stages": config.stages}
    row_tiles = triton.cdiv(rows, config.rows)
    if shape.half:
        grid = (row_tiles, shape.groups * triton.cdiv(shape.half, config.columns))
        launch(_pipelined_pair, grid, *arguments, shape, tile, **run)
        return
    parts = workspace if workspace is not None and config.split > 1 else (None, None)
    grid = (row_tiles, triton.cdiv(shape.n, config.columns), config.split)
    launch(_pipelined_columns, grid, *arguments, parts, shape, tile, **run)
