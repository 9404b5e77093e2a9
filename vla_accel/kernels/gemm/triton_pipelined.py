"""Products of ten to some hundreds of rows with large weights: K passes through shared memory in stages.

A program owns a tile of rows and a tile of columns, and all of K or, where columns are few, a part (SPLIT): the last
program of a tile to arrive adds the parts, always in the same order. Row tiles of the same weights run next to each
other, so that a weight is read from memory once. A norm costs no pass of its own: where the rows come with moments, it
is a factor of the sums; elsewhere the kernel computes the moments, as in `triton_skinny`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.config import Pipelined
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Workspace
from vla_accel.kernels.gemm.triton_epilogues import (
    epilogue_arguments,
    load_columns,
    load_pair,
    load_residual,
    norm_arguments,
    own_row,
    pair_shape,
    store_columns,
    store_pair,
    tiles_of,
)
from vla_accel.kernels.gemm.triton_moments import of_tiles
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import can_fetch_ahead, fetch_ahead, scale_of_sums, wait_for_previous


@triton.jit
def _row_tile(x_ptr, x_tma, row, row0, k0, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile (BLOCK_M, BLOCK_K) of activations (rows, K) from column `k0` on: the rows `row`, or with TMA the rows
    from `row0` on, zeros beyond the last. EVEN: K is a multiple of BLOCK_K."""
    if x_tma is not None:
        return x_tma.load([row0, k0])
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        at = x_ptr + row[:, None] * K + k[None, :]
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=(k < K)[None, :], other=0.0)


@triton.jit
def _weight_tile(w_ptr, w_tma, n, n0, k0, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
                 WEIGHTS_FIRST: tl.constexpr):  # fmt: skip
    """The operand of `_multiply` from a (N, K) weight: (BLOCK_N, BLOCK_K) with WEIGHTS_FIRST, else (BLOCK_K, BLOCK_N).
    `n`, `n0`: as `row`, `row0` in `_row_tile`."""
    if WEIGHTS_FIRST:
        return _row_tile(w_ptr, w_tma, n, n0, k0, K, BLOCK_K, EVEN)
    elif w_tma is not None:
        return w_tma.load([n0, k0]).T
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        at = w_ptr + n[None, :] * K + k[:, None]
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=(k < K)[:, None], other=0.0)


@triton.jit
def _no_sums(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    """The sums before the first `_multiply`."""
    if WEIGHTS_FIRST:
        return tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        return tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def _multiply(x, w, sums, WEIGHTS_FIRST: tl.constexpr):
    """Add the product of a tile of activations (BLOCK_M, BLOCK_K) and one of weights. WEIGHTS_FIRST: Hopper reads the
    first operand from registers, where weights of one byte are widened without storing them again."""
    if WEIGHTS_FIRST:
        return tl.dot(w.to(x.dtype), x.T, sums)
    else:
        return tl.dot(x, w.to(x.dtype), sums)


@triton.jit
def _by_row(sums, WEIGHTS_FIRST: tl.constexpr):
    """(BLOCK_M, BLOCK_N) of the sums of `_multiply`."""
    if WEIGHTS_FIRST:
        return sums.T
    else:
        return sums


@triton.jit
def normed_pair(x_ptr, x_tma, w_ptr, w_tma, scale_a, scale_b, norm, pinned_ptr, row0, end, rows, first, first_end,
                second, second_end, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_K: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
                WEIGHTS_FIRST: tl.constexpr):  # fmt: skip
    """Normed rows, of all `rows` those from `row0` to before `end`, times two tiles of weight rows, from `first` and
    from `second`, whose sums are multiplied by `scale_a` and `scale_b`. With moments (TILES > 0) the rows come scaled,
    and the norm is a factor of the sums."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    # Rows beyond the last are the last one again: they are not stored.
    row = tl.minimum(row0 + tl.arange(0, BLOCK_M), end - 1)
    real = (row0 + tl.arange(0, BLOCK_M) < end)[:, None]
    n_a = tl.minimum(first + tl.arange(0, BLOCK_N), first_end - 1)
    n_b = tl.minimum(second + tl.arange(0, BLOCK_N), second_end - 1)
    acc_a = _no_sums(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
    acc_b = _no_sums(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    if TILES > 0:
        parts = of_tiles(norm.squares, row, rows, TILES, BLOCK_T)
    if pinned_ptr is not None:
        own = own_row(pinned_ptr, row, rows, K)[:, None]
    for k0 in range(0, K, BLOCK_K):
        x = _row_tile(x_ptr, x_tma, row, row0, k0, K, BLOCK_K, EVEN)
        wa = _weight_tile(w_ptr, w_tma, n_a, first, k0, K, BLOCK_K, EVEN, WEIGHTS_FIRST)
        wb = _weight_tile(w_ptr, w_tma, n_b, second, k0, K, BLOCK_K, EVEN, WEIGHTS_FIRST)
        if TILES == 0:
            k = k0 + tl.arange(0, BLOCK_K)
            # The product takes x from registers, never from the stage that the sum reads: on Hopper a stage that has
            # both readers is overwritten too early (triton-lang/triton#6691).
            wide = tl.where(real, x.to(tl.float32), 0.0)
            squares += tl.sum(wide * wide, 1)
            if norm.scale is not None:
                if pinned_ptr is not None:
                    wide *= 1.0 + tl.load(norm.scale + own + k[None, :], mask=(k < K)[None, :], other=0.0)
                else:
                    wide *= (1.0 + tl.load(norm.scale + k, mask=k < K, other=0.0))[None, :]
            x = wide.to(x.dtype)
        acc_a = _multiply(x, wa, acc_a, WEIGHTS_FIRST)
        acc_b = _multiply(x, wb, acc_b, WEIGHTS_FIRST)
    if TILES > 0:
        squares = tl.sum(parts, 0)
    rstd = tl.rsqrt(squares / K + norm.eps)[:, None]
    return _by_row(acc_a, WEIGHTS_FIRST) * scale_a * rstd, _by_row(acc_b, WEIGHTS_FIRST) * scale_b * rstd


@triton.jit
def _pipelined_pair(x_ptr, x_tma, w_ptr, w_tma, wscale, norm, e, out, rows, K: tl.constexpr, HEADS: tl.constexpr,
                    KV_HEADS: tl.constexpr, HALF: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, TILES: tl.constexpr,
                    BLOCK_T: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    IN_HALF: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    row0 = tl.program_id(0) * BLOCK_M
    group, i0 = tl.program_id(1) // IN_HALF, (tl.program_id(1) % IN_HALF) * BLOCK_N
    # One program owns both columns of a pair.
    low, high = group * (2 * HALF), group * (2 * HALF) + HALF
    i = tl.minimum(i0 + tl.arange(0, BLOCK_N), HALF - 1)
    # Programs of the same weights run next to each other: the first of them fetches.
    if tl.program_id(0) == 0:
        fetch_ahead(w_ptr + (low + i) * K, K, PREFETCH, PDL)
        fetch_ahead(w_ptr + (high + i) * K, K, PREFETCH, PDL)
    scale_a, scale_b = scale_of_sums(w_ptr, wscale, low + i), scale_of_sums(w_ptr, wscale, high + i)
    of_low, of_high, cos, sin = load_pair(e, group, i0, row0, rows, HEADS, KV_HEADS, HALF, BLOCK_M, BLOCK_N)
    wait_for_previous(PDL)
    a, b = normed_pair(x_ptr, x_tma, w_ptr, w_tma, scale_a, scale_b, norm, e.pinned, row0, rows, rows, low + i0,
                       low + HALF, high + i0, high + HALF, K, BLOCK_M, BLOCK_N, BLOCK_K, TILES, BLOCK_T,
                       WEIGHTS_FIRST)  # fmt: skip
    store_pair(a, b, of_low, of_high, cos, sin, out, group, i0, row0, rows, HEADS, KV_HEADS, HALF, GATE, BLOCK_M,
               BLOCK_N)  # fmt: skip


@triton.jit
def _constants(w_ptr, wscale, norm, e, n0, row0, rows, N: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    """The scale of the sums of a tile's columns, the sums of their weight rows, and what `load_columns` loads."""
    n = n0 + tl.arange(0, BLOCK_N)
    scale = scale_of_sums(w_ptr, wscale, tl.minimum(n, N - 1))
    shift, gate = load_columns(e, n0, row0, rows, N, BLOCK_M, BLOCK_N)
    weight_sums = shift
    if norm.weight_sums is not None:
        weight_sums = tl.load(norm.weight_sums + n, mask=n < N, other=0.0)[None, :]
    return scale, weight_sums, shift, gate


@triton.jit
def _sums_of_parts(acc, part_ptr, count_ptr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store this program's part of a tile's sums. Returns whether it is the last one, and then the sums of all."""
    split = tl.program_id(2)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    parts = part_ptr + tile * (SPLIT * BLOCK_M * BLOCK_N) + inside
    tl.store(parts + split * (BLOCK_M * BLOCK_N), acc)
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if last:
        tl.debug_barrier()
        for other in range(SPLIT):
            total += tl.load(parts + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
        tl.store(count_ptr + tile, 0)
    return last, total


@triton.jit
def _pipelined_columns(x_ptr, x_tma, w_ptr, w_tma, wscale, norm, e, out_ptr, part_ptr, count_ptr, rows,
                       N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, PREFETCH: tl.constexpr, RESIDUAL: tl.constexpr,
                       SKIP_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
                       WEIGHTS_FIRST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row0, n0, split = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    # Rows and columns beyond the last are the last one again: they are not stored.
    real = row0 + tl.arange(0, BLOCK_M) < rows
    row = tl.minimum(row0 + tl.arange(0, BLOCK_M), rows - 1)
    n = tl.minimum(n0 + tl.arange(0, BLOCK_N), N - 1)
    SHARE: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    EVEN: tl.constexpr = K % (BLOCK_K * SPLIT) == 0
    # Tiles of many rows behind a norm need their registers for the sums: they load constants after the product.
    LATE: tl.constexpr = norm.weight_sums is not None and BLOCK_M > 64
    if tl.program_id(0) == 0 and split * SHARE < K:
        fetch_ahead(w_ptr + n * K + split * SHARE, tl.minimum(SHARE, K - split * SHARE), PREFETCH, PDL)
    if not LATE:
        scale, weight_sums, shift, gate = _constants(w_ptr, wscale, norm, e, n0, row0, rows, N, BLOCK_M, BLOCK_N)
    wait_for_previous(PDL)
    before, keep = load_residual(out_ptr, e, n0, row0, rows, N, BLOCK_M, BLOCK_N, RESIDUAL, SKIP_FIRST)
    acc = _no_sums(BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
    total = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    if TILES > 0:
        # Added up here: both moments of all tiles would not fit in the registers next to the sums.
        total = tl.sum(of_tiles(norm.sums, row, rows, TILES, BLOCK_T), 0)
        squares = tl.sum(of_tiles(norm.squares, row, rows, TILES, BLOCK_T), 0)
    for k0 in range(0, SHARE, BLOCK_K):
        k = split * SHARE + k0
        x = _row_tile(x_ptr, x_tma, row, row0, k, K, BLOCK_K, EVEN)
        w = _weight_tile(w_ptr, w_tma, n, n0, k, K, BLOCK_K, EVEN, WEIGHTS_FIRST)
        if norm.weight_sums is not None and TILES == 0:
            # From registers, as in `normed_pair`.
            wide = tl.where(real[:, None], x.to(tl.float32), 0.0)
            total += tl.sum(wide, 1)
            squares += tl.sum(wide * wide, 1)
            if norm.scale is not None:
                at = k + tl.arange(0, BLOCK_K)
                wide *= (1.0 + tl.load(norm.scale + at, mask=at < K, other=0.0))[None, :]
            x = wide.to(x.dtype)
        acc = _multiply(x, w, acc, WEIGHTS_FIRST)
    y, last = _by_row(acc, WEIGHTS_FIRST), True
    if SPLIT > 1:
        last, y = _sums_of_parts(y, part_ptr, count_ptr, SPLIT, BLOCK_M, BLOCK_N)
    if LATE:
        scale, weight_sums, shift, gate = _constants(w_ptr, wscale, norm, e, n0, row0, rows, N, BLOCK_M, BLOCK_N)
    if last:
        y *= scale
        if norm.weight_sums is not None:
            mean = total / K
            rstd = tl.rsqrt(squares / K - mean * mean + norm.eps)
            y = (y - mean[:, None] * weight_sums) * rstd[:, None]
        store_columns(y, shift, gate, before, keep, out_ptr, e, tl.program_id(1), n0, row0, rows, N, BLOCK_M, BLOCK_N,
                      ACTIVATION)  # fmt: skip


def operands(x: Tensor, weight: Tensor, config: Pipelined) -> tuple[Any, Any, Any, Any]:
    """Return activations and a weight for a kernel, each followed by its tensor map if tiles come by TMA."""
    if not config.tma:
        return x, None, weight, None
    rows = TensorDescriptor.from_tensor(x, [config.rows, config.block_k])
    return x, rows, weight, TensorDescriptor.from_tensor(weight, [config.columns, config.block_k])


def product(
    x: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None, config: Pipelined,
    workspace: Workspace | None,
) -> None:  # fmt: skip
    """`vla_accel.kernels.gemm.gemm`. Columns with a norm are those of a LayerNorm."""
    rows, k = x.shape
    x = x if norm is None else norm.rows(x)
    args = (*operands(x, weights.weight, config), weights.sums_scale, norm_arguments(norm))
    prefetch = config.prefetch and can_fetch_ahead(weights.weight)
    run = {"num_warps": config.warps, "num_stages": config.stages}
    row_tiles = triton.cdiv(rows, config.rows)
    if isinstance(out, Heads) or epilogue.activation.gated:
        shape, outputs, tokens = pair_shape(out, epilogue)
        launch(
            _pipelined_pair, (row_tiles, shape.groups * triton.cdiv(shape.half, config.columns)), *args,
            epilogue_arguments(weights, epilogue, tokens), outputs, rows, k, *shape, config.rows, config.columns,
            config.block_k, prefetch, *tiles_of(norm), config.weights_first, **run,
        )  # fmt: skip
        return
    n = len(weights.weight)
    parts, counters = workspace if workspace is not None and config.split > 1 else (None, None)
    launch(
        _pipelined_columns, (row_tiles, triton.cdiv(n, config.columns), config.split), *args,
        epilogue_arguments(weights, epilogue, epilogue.skip_every or 1), out, parts, counters, rows, n, k, config.rows,
        config.columns, config.block_k, config.split, prefetch, epilogue.residual, epilogue.skip_every > 0,
        epilogue.activation.code, *tiles_of(norm), config.weights_first, **run,
    )  # fmt: skip
