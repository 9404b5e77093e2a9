"""Products of up to 16 rows with large weights: the denoise loop, where reading the weights is the cost.

A program owns a slice of output columns and all the rows. K is divided into PARTS pieces that become the batch of one
batched product, so that every warp has its own piece and the tensor cores see m16n8k16; the pieces are added at the
end. Weights are loaded into registers before the wait for the previous kernel, which they do not depend on; K passes
through shared memory in up to four chunks, so that two kernels fit on a multiprocessor and overlap. RMSNorm costs no
pass of its own: rms(x ∘ (1 + scale)) W = rstd ∘ ((x ∘ (1 + scale)) W), and the shift's product is a step's constant.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vla_accel.kernels.chain import launch
from vla_accel.kernels.gemm.config import Skinny
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm
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
)
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.triton_common import scale_of_sums, wait_for_previous


@triton.jit
def _weight_tile(
    w_ptr, first, k0, K: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, limit
):
    """(PARTS, PIECE, BLOCK_N) of a (N, K) weight, from row `first` and column k0."""
    part = tl.arange(0, PARTS)[:, None, None]
    piece = tl.arange(0, PIECE)[None, :, None]
    n = first + tl.arange(0, BLOCK_N)[None, None, :]
    k = k0 + part * PIECE + piece
    return tl.load(w_ptr + n.to(tl.int64) * K + k, mask=(n < limit) & (k < K), other=0.0)


@triton.jit
def _row_tile(x_ptr, row0, rows, k0, K: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr):
    """(PARTS, BLOCK_M, PIECE) of (rows, K) activations."""
    part = tl.arange(0, PARTS)[:, None, None]
    row = row0 + tl.arange(0, BLOCK_M)[None, :, None]
    k = k0 + part * PIECE + tl.arange(0, PIECE)[None, None, :]
    return tl.load(x_ptr + row * K + k, mask=(row < rows) & (k < K), other=0.0)


@triton.jit
def _early(w_ptr, first, K: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, limit,
           EARLY: tl.constexpr):  # fmt: skip
    """The first EARLY (one to four) chunks of a weight; those beyond repeat the first and are never used."""
    BLOCK_K: tl.constexpr = PARTS * PIECE
    w0 = _weight_tile(w_ptr, first, 0, K, BLOCK_N, PARTS, PIECE, limit)
    w1, w2, w3 = w0, w0, w0
    if EARLY > 1:
        w1 = _weight_tile(w_ptr, first, BLOCK_K, K, BLOCK_N, PARTS, PIECE, limit)
    if EARLY > 2:
        w2 = _weight_tile(w_ptr, first, 2 * BLOCK_K, K, BLOCK_N, PARTS, PIECE, limit)
    if EARLY > 3:
        w3 = _weight_tile(w_ptr, first, 3 * BLOCK_K, K, BLOCK_N, PARTS, PIECE, limit)
    return w0, w1, w2, w3


@triton.jit
def _pick(early, CHUNK: tl.constexpr, w_ptr, first, K: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
          PIECE: tl.constexpr, limit, EARLY: tl.constexpr):  # fmt: skip
    """A chunk of a weight: one that `_early` has loaded, or loaded now."""
    if CHUNK < EARLY:
        return early[CHUNK]
    else:
        return _weight_tile(w_ptr, first, CHUNK * PARTS * PIECE, K, BLOCK_N, PARTS, PIECE, limit)


@triton.jit
def _modulated(x, scale_ptr, own, k0, K: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr):
    """x ∘ (1 + scale) in the dtype of x, and the sums of squares of x by row, (BLOCK_M,) float32. `own`: where the
    rows' scales begin, 0 or (1, BLOCK_M, 1)."""
    wide = x.to(tl.float32)
    squares = tl.sum(tl.sum(wide * wide, 2), 0)
    if scale_ptr is not None:
        part = tl.arange(0, PARTS)[:, None, None]
        k = k0 + part * PIECE + tl.arange(0, PIECE)[None, None, :]
        wide = wide * (1.0 + tl.load(scale_ptr + (own + k), mask=k < K, other=0.0))
    return wide.to(x.dtype), squares


@triton.jit
def _skinny_pair(x_ptr, w_ptr, wscale, norm, e, out, rows, K: tl.constexpr, HEADS: tl.constexpr,
                 KV_HEADS: tl.constexpr, HALF: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    IN_HALF: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    group, i0 = tl.program_id(0) // IN_HALF, (tl.program_id(0) % IN_HALF) * BLOCK_N
    row0 = tl.program_id(1) * BLOCK_M
    # One program owns both columns of a pair.
    low, high = group * (2 * HALF) + i0, group * (2 * HALF) + HALF + i0
    low_end, high_end = low - i0 + HALF, high - i0 + HALF
    of_low, of_high, cos, sin = load_pair(e, group, i0, row0, rows, HEADS, KV_HEADS, HALF, BLOCK_M, BLOCK_N)
    early_a = _early(w_ptr, low, K, BLOCK_N, PARTS, PIECE, low_end, EARLY)
    early_b = _early(w_ptr, high, K, BLOCK_N, PARTS, PIECE, high_end, EARLY)
    scale_a = scale_of_sums(w_ptr, wscale, tl.minimum(low + tl.arange(0, BLOCK_N), low_end - 1))
    scale_b = scale_of_sums(w_ptr, wscale, tl.minimum(high + tl.arange(0, BLOCK_N), high_end - 1))
    wait_for_previous(PDL)
    acc_a = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    acc_b = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    own = 0
    if e.pinned is not None:
        own = own_row(e.pinned, row0 + tl.arange(0, BLOCK_M)[None, :, None], rows, K)
    coming = _row_tile(x_ptr, row0, rows, 0, K, BLOCK_M, PARTS, PIECE)
    for k0 in tl.static_range(0, K, PARTS * PIECE):
        x = coming
        if k0 + PARTS * PIECE < K:
            coming = _row_tile(x_ptr, row0, rows, k0 + PARTS * PIECE, K, BLOCK_M, PARTS, PIECE)
        wa = _pick(early_a, k0 // (PARTS * PIECE), w_ptr, low, K, BLOCK_N, PARTS, PIECE, low_end, EARLY)
        wb = _pick(early_b, k0 // (PARTS * PIECE), w_ptr, high, K, BLOCK_N, PARTS, PIECE, high_end, EARLY)
        x, more = _modulated(x, norm.scale, own, k0, K, PARTS, PIECE)
        squares += more
        acc_a = tl.dot(x, wa.to(x.dtype), acc_a)
        acc_b = tl.dot(x, wb.to(x.dtype), acc_b)
    rstd = tl.rsqrt(squares / K + norm.eps)[:, None]
    a, b = tl.sum(acc_a, 0) * scale_a * rstd, tl.sum(acc_b, 0) * scale_b * rstd
    store_pair(a, b, of_low, of_high, cos, sin, out, group, i0, row0, rows, HEADS, KV_HEADS, HALF, GATE, BLOCK_M,
               BLOCK_N)  # fmt: skip


@triton.jit
def _skinny_columns(x_ptr, w_ptr, wscale, e, out_ptr, rows, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
                    RESIDUAL: tl.constexpr, SKIP_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    n0, row0 = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    early = _early(w_ptr, n0, K, BLOCK_N, PARTS, PIECE, N, EARLY)
    scale = scale_of_sums(w_ptr, wscale, tl.minimum(n0 + tl.arange(0, BLOCK_N), N - 1))
    shift, gate = load_columns(e, n0, row0, rows, N, BLOCK_M, BLOCK_N)
    wait_for_previous(PDL)
    before, keep = load_residual(out_ptr, e, n0, row0, rows, N, BLOCK_M, BLOCK_N, RESIDUAL, SKIP_FIRST)
    acc = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    coming = _row_tile(x_ptr, row0, rows, 0, K, BLOCK_M, PARTS, PIECE)
    for k0 in tl.static_range(0, K, PARTS * PIECE):
        x = coming
        if k0 + PARTS * PIECE < K:
            coming = _row_tile(x_ptr, row0, rows, k0 + PARTS * PIECE, K, BLOCK_M, PARTS, PIECE)
        w = _pick(early, k0 // (PARTS * PIECE), w_ptr, n0, K, BLOCK_N, PARTS, PIECE, N, EARLY)
        acc = tl.dot(x, w.to(x.dtype), acc)
    y = tl.sum(acc, 0) * scale
    store_columns(y, shift, gate, before, keep, out_ptr, e, 0, n0, row0, rows, N, BLOCK_M, BLOCK_N, ACTIVATION)


def product(
    x: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None, config: Skinny
) -> None:
    """`vla_accel.kernels.gemm.gemm`. A product of columns takes no norm; no moments are read or written."""
    rows, k = x.shape
    tile = (config.rows, config.columns, config.parts, config.block_k // config.parts, config.early)
    run = {"num_warps": config.parts, "num_stages": 1}
    if norm is not None:
        shape, outputs, tokens = pair_shape(out, epilogue)
        launch(
            _skinny_pair, (shape.groups * triton.cdiv(shape.half, config.columns), triton.cdiv(rows, config.rows)),
            x, weights.weight, weights.sums_scale, norm_arguments(norm), epilogue_arguments(weights, epilogue, tokens),
            outputs, rows, k, *shape, *tile, **run,
        )  # fmt: skip
        return
    n = len(weights.weight)
    launch(
        _skinny_columns, (triton.cdiv(n, config.columns), triton.cdiv(rows, config.rows)),
        x, weights.weight, weights.sums_scale, epilogue_arguments(weights, epilogue, epilogue.skip_every or 1), out,
        rows, n, k, *tile, epilogue.residual, epilogue.skip_every > 0, epilogue.activation.code, **run,
    )  # fmt: skip
